"""The header of a GGUF file (versions 2 and 3): metadata and the table of tensors, in milliseconds.

The ``gguf`` package reads the same header through one numpy array per string: seconds for a vocabulary.
Here string arrays are only walked, and decoded when asked for. Neither torch nor numpy is imported.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

from outrider.verify.checkpoint.config import UnsupportedCheckpoint

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_LENGTH = struct.Struct("<Q")


class StringArray(Sequence[str]):
    """An array of strings, left in the file until one is read."""

    def __init__(self, buffer: mmap.mmap, spans: list[tuple[int, int]]) -> None:
        self._buffer = buffer
        self._spans = spans

    def __len__(self) -> int:
        return len(self._spans)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self._decode(span) for span in self._spans[index]]
        return self._decode(self._spans[index])

    def __iter__(self) -> Iterator[str]:
        return map(self._decode, self._spans)

    def _decode(self, span: tuple[int, int]) -> str:
        return self._buffer[span[0] : span[1]].decode("utf-8", errors="replace")


Value = int | float | bool | str | tuple[int | float | bool, ...] | StringArray


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies. ``shape`` is outermost first, as in torch; ``start`` counts from the file's begin."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    start: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """What a GGUF file says before its tensors' data."""

    path: Path
    buffer: mmap.mmap
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]

    def text(self, key: str) -> str | None:
        """The string at ``key``, or None.

        Raises:
            UnsupportedCheckpoint: there is something else.
        """
        value = self.metadata.get(key)
        if value is None or isinstance(value, str):
            return value
        raise self.wrong(key, "a string")

    def integer(self, key: str) -> int | None:
        """The integer at ``key``, or None; the same for ``number``, ``flag`` and the arrays below."""
        value = self.metadata.get(key)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        raise self.wrong(key, "an integer")

    def number(self, key: str) -> float | None:
        value = self.metadata.get(key)
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            return value
        raise self.wrong(key, "a number")

    def flag(self, key: str) -> bool | None:
        value = self.metadata.get(key)
        if value is None or isinstance(value, bool):
            return value
        raise self.wrong(key, "a boolean")

    def strings(self, key: str) -> StringArray | None:
        value = self.metadata.get(key)
        if value is None or isinstance(value, StringArray):
            return value
        raise self.wrong(key, "an array of strings")

    def numbers(self, key: str) -> tuple[int | float | bool, ...] | None:
        value = self.metadata.get(key)
        if value is None or isinstance(value, tuple):
            return value
        raise self.wrong(key, "an array of numbers")

    def wrong(self, key: str, wanted: str) -> UnsupportedCheckpoint:
        shown = repr(self.metadata[key])[:60]
        return UnsupportedCheckpoint(f"{self.path}: metadata {key} is {shown} where {wanted} belongs")


def read_header(path: Path) -> GGUFHeader:
    """Map ``path`` and read its header; no count or length is believed beyond the end of the file.

    Raises:
        UnsupportedCheckpoint: not a GGUF file, a version or byte order not supported, cut off or damaged.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        if not file.read(1):
            raise UnsupportedCheckpoint(f"{path} is empty; fetch the file again")
        buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        return _Parser(path, buffer).header()
    except (struct.error, OverflowError, MemoryError, _PastEnd) as error:  # counts and lengths that run past the end
        raise UnsupportedCheckpoint(
            f"{path} is cut off or damaged: its header runs past the end of the file; fetch the file again"
        ) from error
    except UnicodeDecodeError as error:
        raise UnsupportedCheckpoint(f"{path} is damaged: its header holds a name that is not UTF-8") from error


class _PastEnd(Exception):
    pass


class _Parser:
    """A cursor over the header. Whatever a count says, nothing is set aside for it before it is read."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self._path = path
        self._buffer = buffer
        self._pos = 0

    def header(self) -> GGUFHeader:
        if self._buffer[:4] != b"GGUF":
            raise UnsupportedCheckpoint(f"{self._path} is not a GGUF file: it begins with {self._buffer[:4]!r}")
        self._pos = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise UnsupportedCheckpoint(
                f"{self._path} has GGUF version {version}; only versions 2 and 3 in little-endian order are supported"
            )
        num_tensors = int(self._scalar("Q"))
        num_values = int(self._scalar("Q"))
        metadata = {}
        for _ in range(num_values):
            key = self._string()
            metadata[key] = self._value(int(self._scalar("I")))
        tensors = self._tensors(num_tensors, metadata.get("general.alignment", 32))
        return GGUFHeader(self._path, self._buffer, metadata, tensors)

    def _tensors(self, count: int, alignment: Value) -> dict[str, TensorInfo]:
        if not isinstance(alignment, int) or alignment <= 0:
            raise UnsupportedCheckpoint(f"{self._path} is damaged: general.alignment is {alignment!r}")
        infos = []
        for _ in range(count):
            name = self._string()
            num_dimensions = int(self._scalar("I"))
            if num_dimensions > _MAX_DIMENSIONS:
                raise UnsupportedCheckpoint(f"{self._path} is damaged: tensor {name} has {num_dimensions} dimensions")
            shape = tuple(int(self._scalar("Q")) for _ in range(num_dimensions))[::-1]
            infos.append((name, shape, int(self._scalar("I")), int(self._scalar("Q"))))
        data_start = -(-self._pos // alignment) * alignment
        tensors = {name: TensorInfo(name, shape, type_id, data_start + at) for name, shape, type_id, at in infos}
        if len(tensors) != count:
            raise UnsupportedCheckpoint(f"{self._path} is damaged: it names a tensor twice")
        return tensors

    def _value(self, type_id: int) -> Value:
        if type_id == _STRING:
            return self._string()
        if type_id == _ARRAY:
            return self._array()
        return self._scalar(self._scalar_code(type_id))

    def _array(self) -> StringArray | tuple[int | float | bool, ...]:
        type_id = int(self._scalar("I"))
        if type_id == _STRING:
            return self._string_array()
        code = self._scalar_code(type_id)
        count = int(self._scalar("Q"))
        if count > len(self._buffer):
            raise _PastEnd
        values = struct.Struct(f"<{count}{code}")
        self._pos += values.size
        return values.unpack_from(self._buffer, self._pos - values.size)

    def _string_array(self) -> StringArray:
        count = int(self._scalar("Q"))
        if count > len(self._buffer) // _LENGTH.size:
            raise _PastEnd
        # The one hot loop: 100,000 and more strings.
        buffer, unpack_from, pos = self._buffer, _LENGTH.unpack_from, self._pos
        spans = []
        for _ in range(count):
            start = pos + 8
            pos = start + unpack_from(buffer, pos)[0]
            spans.append((start, pos))
        if pos > len(buffer):
            raise _PastEnd
        self._pos = pos
        return StringArray(buffer, spans)

    def _scalar_code(self, type_id: int) -> str:
        code = _SCALARS.get(type_id)
        if code is None:
            raise UnsupportedCheckpoint(f"{self._path} holds metadata of type {type_id}, which GGUF does not define")
        return code

    def _scalar(self, code: str) -> int | float | bool:
        layout = struct.Struct("<" + code)
        (value,) = layout.unpack_from(self._buffer, self._pos)
        self._pos += layout.size
        return value  # type: ignore[no-any-return]

    def _string(self) -> str:
        start = self._pos + _LENGTH.size
        end = start + _LENGTH.unpack_from(self._buffer, self._pos)[0]
        if end > len(self._buffer):
            raise _PastEnd
        self._pos = end
        return self._buffer[start:end].decode()
