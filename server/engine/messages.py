"""What the server and the engine process say to each other, as msgpack.

A message is an array: its place in ``_MESSAGES``, then its fields in order. The encoding of every field is
derived from its dataclass, so a new field crosses by itself, or the import fails if its type is unknown here.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgpack

from outrider.server.engine.request import EngineStats, ModelInfo, Request, StepOutput


class MessageError(ValueError):
    """Something that cannot be sent, or bytes that are no message."""


@dataclass(frozen=True, slots=True)
class Submit:
    request: Request


@dataclass(frozen=True, slots=True)
class Cancel:
    request_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave in good order, after the step that is running."""


@dataclass(frozen=True, slots=True)
class Ready:
    model: ModelInfo


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a step gave; sent after every step, also an empty one: it is the engine's sign of life."""

    outputs: tuple[StepOutput, ...]
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class Failed:
    """The last message of an engine that cannot go on; a sentence."""

    message: str


ToEngine = Submit | Cancel | Stop
FromEngine = Ready | Outputs | Failed
Message = ToEngine | FromEngine

_MESSAGES: tuple[type[Message], ...] = (Submit, Cancel, Stop, Ready, Outputs, Failed)

_PLAIN = (str, int, float, bool)  # msgpack gives these back as they went in


@dataclass(frozen=True, slots=True)
class _Codec:
    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


@cache
def _codec(kind: Any) -> _Codec | None:
    """How values of this type cross; None: as they are (arrays come back as tuples)."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in _PLAIN:
        return None
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return _Codec(str, kind)
    if is_dataclass(kind):
        return _dataclass_codec(kind)
    if origin in (Union, types.UnionType) and len(arguments) == 2 and type(None) in arguments:
        inner = _codec(next(a for a in arguments if a is not type(None)))
        return inner and _optional_codec(inner)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        inner = _codec(arguments[0])
        return inner and _tuple_codec(inner)
    if origin is tuple and all(_codec(a) is None for a in arguments):
        return None
    if origin is Mapping and all(_codec(a) is None for a in arguments):
        return _Codec(lambda mapping: tuple(mapping.items()), dict)  # maps with int keys are refused by strict_map_key
    raise TypeError(f"messages.py has no encoding for {kind}")


def _optional_codec(inner: _Codec) -> _Codec:
    return _Codec(
        lambda value: None if value is None else inner.encode(value),
        lambda value: None if value is None else inner.decode(value),
    )


def _tuple_codec(inner: _Codec) -> _Codec:
    return _Codec(
        lambda values: tuple(map(inner.encode, values)),
        lambda values: tuple(map(inner.decode, values)),
    )


def _dataclass_codec(cls: Any) -> _Codec:
    kinds = get_type_hints(cls)
    names = [field.name for field in fields(cls)]
    codecs = [(i, codec) for i, name in enumerate(names) if (codec := _codec(kinds[name])) is not None]

    def encode(value: Any) -> list[Any]:
        row = [getattr(value, name) for name in names]
        for i, codec in codecs:
            row[i] = codec.encode(row[i])
        return row

    def decode(row: Any) -> Any:
        row = list(row)
        if len(row) != len(names):
            raise ValueError(f"{cls.__name__} has {len(names)} fields, not {len(row)}")
        for i, codec in codecs:
            row[i] = codec.decode(row[i])
        return cls(*row)

    return _Codec(encode, decode)


_CODECS = tuple(_dataclass_codec(cls) for cls in _MESSAGES)
_INDEX = {cls: i for i, cls in enumerate(_MESSAGES)}


def encode(message: Message) -> bytes:
    """Raises:
    MessageError: a number beyond 64 bits, or text with an unpaired surrogate.
    """
    index = _INDEX[type(message)]
    try:
        packed: bytes = msgpack.packb([index, *_CODECS[index].encode(message)])
    except (OverflowError, UnicodeEncodeError) as error:
        raise MessageError(f"{type(message).__name__} cannot be encoded: {error}") from error
    return packed


def decode(data: bytes | bytearray | memoryview) -> Message:
    """Raises:
    MessageError: not a message.
    """
    try:
        index, *row = msgpack.unpackb(data, use_list=False, strict_map_key=True, max_map_len=0, max_ext_len=0)
        message: Message = _CODECS[index].decode(row)
    except (ValueError, TypeError, IndexError, OverflowError, msgpack.UnpackException) as error:
        raise MessageError(f"not a message: {error}") from error
    return message
