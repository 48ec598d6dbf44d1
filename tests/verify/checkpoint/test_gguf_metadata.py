"""The header of a GGUF file: what the gguf package wrote comes back, and damage is refused at once."""

from __future__ import annotations

import random
import struct
from pathlib import Path
from typing import Any

import pytest

from outrider.verify.checkpoint.checkpoint import open_checkpoint
from outrider.verify.checkpoint.config import UnsupportedCheckpoint
from outrider.verify.checkpoint.gguf_metadata import read_header


def test_values_come_back(write_gguf: Any) -> None:
    metadata = {
        "a.int": 7,
        "a.float": 0.5,
        "a.flag": True,
        "a.text": "héllo",
        "a.list": [1, -2, 3],
        "a.words": ["x", "", "é"],
    }
    header = read_header(write_gguf("llama", metadata, {}))
    assert (header.integer("a.int"), header.number("a.float"), header.flag("a.flag")) == (7, 0.5, True)
    assert (header.text("a.text"), header.numbers("a.list")) == ("héllo", (1, -2, 3))
    words = header.strings("a.words")
    assert words is not None and list(words) == ["x", "", "é"] and words[2] == "é" and words[0:1] == ["x"]
    assert header.text("a.absent") is None


def test_a_value_of_the_wrong_kind_is_refused(write_gguf: Any) -> None:
    header = read_header(write_gguf("llama", {"a.text": "x", "a.flag": True}, {}))
    for read, key in ((header.integer, "a.text"), (header.integer, "a.flag"), (header.strings, "a.text")):
        with pytest.raises(UnsupportedCheckpoint, match=key):
            read(key)


def test_every_cut_of_the_header_is_refused(write_gguf: Any, tiny: Any, tmp_path: Path) -> None:
    whole = write_gguf("llama", tiny.metadata("llama") | {"a.words": ["x", "yy"]}, tiny.tensors()).read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, 1200, 7), len(whole) - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(UnsupportedCheckpoint, match=r"empty|not a GGUF|cut off"):
            open_checkpoint(cut)


def entry(key: bytes, type_id: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", type_id) + value


GIANT = 2**63 + 11


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"GGML" + bytes(60), "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "little-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, GIANT, 0), "cut off or damaged"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry(b"k", 9, struct.pack("<IQ", 12, 10**10)), "cut off or damaged"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry(b"k", 9, struct.pack("<IQ", 8, 10**10)), "cut off or damaged"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, GIANT), "cut off or damaged"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, GIANT) + bytes(64), "cut off or damaged"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry(b"k", 9, struct.pack("<IQ", 8, GIANT)), "cut off or damaged"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry(b"k", 9, struct.pack("<IQ", 4, GIANT)), "cut off or damaged"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry(b"k", 9, struct.pack("<IQQ", 8, 1, GIANT)),
            "cut off or damaged",
        ),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry(b"k", 9, struct.pack("<IQ", 9, 1)), "type 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry(b"k", 77, bytes(8)), "type 77"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry(b"\xff", 4, bytes(4)), "not UTF-8"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry(b"general.alignment", 4, bytes(4)),
            "general.alignment is 0",
        ),
        (
            b"GGUF"
            + struct.pack("<IQQ", 3, 1, 0)
            + struct.pack("<Q", 1)
            + b"t"
            + struct.pack("<I", 2**32 - 1)
            + bytes(64),
            "4294967295 dimensions",
        ),
    ],
)
def test_damaged_headers_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    with pytest.raises(UnsupportedCheckpoint, match=message):
        read_header(path)


def test_neither_file_nor_directory(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpoint, match="there is no checkpoint at"):
        open_checkpoint(tmp_path / "absent")
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(UnsupportedCheckpoint, match=r"neither a Hugging Face directory nor a \.gguf file"):
        open_checkpoint(tmp_path / "model.bin")


def test_a_header_with_random_damage_is_refused_or_read_but_never_crashes(
    write_gguf: Any, tiny: Any, tmp_path: Path
) -> None:
    words = ["x", "yy", "zzz"] * 40
    intact = write_gguf("llama", tiny.metadata("llama") | {"a.words": words}, tiny.tensors()).read_bytes()
    header = intact.rindex(b"blk.0.") + 60
    rng = random.Random(5)
    refused = 0
    for number in range(400):
        damaged = bytearray(intact)
        start = rng.randrange(8, header)
        for position in range(start, min(start + rng.choice([1, 8, 60]), header)):
            damaged[position] = rng.randrange(256)
        path = tmp_path / f"damaged{number}.gguf"  # a name of its own: nothing may come from a cache
        path.write_bytes(damaged)
        try:
            open_checkpoint(path)
        except UnsupportedCheckpoint:
            refused += 1
        path.unlink()
    assert refused > 100
