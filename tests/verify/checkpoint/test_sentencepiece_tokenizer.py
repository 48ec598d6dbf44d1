"""SentencePiece vocabularies: joined by score, bytes for the unknown, and one space in front."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from transformers import LlamaTokenizer

from outrider.verify.checkpoint.tokenizer import load_tokenizer

PIECES = ["▁", "a", "b", "c", "n", "▁a", "▁b", "an", "ana", "na", "▁an", "▁ban", "ba", "ban", "▁▁", "▁▁▁▁", "cc", "▁c"]


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, "<tool>"]
    types = [2, 3, 3, *[6] * 256, *[1] * len(PIECES), 4]
    scores = [0.0] * 259 + [-float(i) for i in (9, 30, 31, 32, 33, 2, 5, 1, 7, 4, 3, 6, 8, 10, 11, 12, 13, 14)] + [0.0]
    values = {
        "model": "llama",
        "tokens": tokens,
        "token_type": types,
        "scores": scores,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (values | changes).items()}


def sentencepiece(text: str, metadata: dict[str, Any]) -> list[int]:
    """The best-scored neighbours first, the left of equals, bytes for what is in no piece."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    types = metadata["tokenizer.ggml.token_type"]
    known = {token: i for i, token in enumerate(tokens) if types[i] == 1}
    parts = list(text.replace(" ", "▁"))
    while joins := [i for i in range(len(parts) - 1) if parts[i] + parts[i + 1] in known]:
        at = max(joins, key=lambda i: (scores[known[parts[i] + parts[i + 1]]], -i))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    ids = []
    for part in parts:
        ids += [known[part]] if part in known else [3 + byte for byte in part.encode()]
    return ids


def test_sentencepiece_joins_the_best_pair_first(write_gguf: Any) -> None:
    metadata = sentencepiece_metadata()
    ours = load_tokenizer(write_gguf("llama", metadata, {}))
    chooser = random.Random(5)
    for _ in range(300):
        text = "".join(chooser.choice("aabbncc   é\n") for _ in range(chooser.randint(1, 20)))
        ids = ours.encode(text)
        assert ids == sentencepiece(" " + text, metadata), text
        assert ours.decode(ids) == text
        assert b"".join(map(ours.token_bytes, ids)).decode() == " " + text
    assert ours.leading_space_stripped
    assert ours.encode("<s>a</s>")[0] == 1 and ours.encode("<s>a</s>")[-1] == 2
    assert ours.token_bytes(3 + 10) == b"\n"
    assert ours.decode([len(PIECES) + 259]) == "<tool>"  # user-defined, so text
    assert ours.decode(ours.encode(" a")) == " a"


def test_sentencepiece_without_a_space_in_front(write_gguf: Any) -> None:
    metadata = sentencepiece_metadata(add_space_prefix=False)
    ours = load_tokenizer(write_gguf("llama", metadata, {}))
    assert not ours.leading_space_stripped
    assert ours.encode("banana an") == sentencepiece("banana an", metadata)
    assert ours.decode(ours.encode(" ban")) == " ban"


def test_a_sentencepiece_directory_decodes_as_transformers_does(tmp_path: Path) -> None:
    tokens = sentencepiece_metadata()["tokenizer.ggml.tokens"]
    oracle = LlamaTokenizer(vocab={t: i for i, t in enumerate(tokens)}, merges=[("▁", "a"), ("a", "n")])
    oracle.save_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    assert ours.eos_token_ids == (2,)
    for text in ("a ban é\n", " an", "<s>an</s> a"):
        expected = oracle.encode(text, add_special_tokens=False)
        assert ours.encode(text) == expected
        assert ours.decode(expected) == oracle.decode(expected, skip_special_tokens=True)
