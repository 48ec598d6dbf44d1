"""Tokenizers: equal to transformers' and to BPE written out by hand, and exact in bytes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import regex
import tokenizers
from transformers import Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

from outrider.verify.checkpoint.config import UnsupportedCheckpoint
from outrider.verify.checkpoint.gguf_metadata import read_header
from outrider.verify.checkpoint.tokenizer import MASK, Tokenizer, load_tokenizer

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "The year 2024 had 366 days; pi is 3.14159265 and ½ is one half, Ⅷ is eight.",
    "def f(x: int) -> int:\n    return x ** 2  # squared\n\n\nif __name__ == '__main__':\n\tprint(f(12))\r\n",
    "I'm sure they'LL say we've DON'T'd it",
    "你好,世界!今天是2025年。日本語とカタカナ 한국어",
    "naïve café Ünïcödé, ﬁ ligature, ǅ",
    "🦀🦀 family: 👨\u200d👩\u200d👧 flag 🇩🇪 tab\t.",
    "   leading and trailing   ",
    "a\u00a0non-breaking\u3000space",
    "مرحبا بالعالم नमस्ते दुनिया 123\u0664\u0665",
    "x" * 300 + "123456789012345" + "!?" * 40,
]


@pytest.fixture(scope="session")
def smollm(default_model: Path) -> Tokenizer:
    return load_tokenizer(default_model)


@pytest.fixture(scope="session")
def vocabulary(default_model: Path) -> tuple[list[str], list[str]]:
    header = read_header(default_model)
    tokens, merges = header.strings("tokenizer.ggml.tokens"), header.strings("tokenizer.ggml.merges")
    assert tokens is not None and merges is not None
    return list(tokens), list(merges)


def byte_letters() -> list[str]:
    printable = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or b >= 174]
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def bpe(text: str, tokens: list[str], merges: list[str]) -> list[int]:
    """GPT-2's algorithm, over individual digits and GPT-2's words (SmolLM's pre-tokenizer)."""
    words = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    ids = {token: i for i, token in enumerate(tokens)}
    ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(merges)}
    letters = byte_letters()
    result = []
    for piece in regex.findall(r"\p{N}|\P{N}+", text):
        for word in regex.findall(words, piece):
            parts = [letters[b] for b in word.encode()]
            while pairs := [p for p in itertools.pairwise(parts) if p in ranks]:
                best = min(pairs, key=ranks.__getitem__)
                at = next(i for i in range(len(parts)) if tuple(parts[i : i + 2]) == best)
                parts[at : at + 2] = ["".join(best)]
            result += [ids[part] for part in parts]
    return result


@pytest.mark.parametrize("text", TEXTS)
def test_smollm_is_bpe_over_single_digits(
    text: str, smollm: Tokenizer, vocabulary: tuple[list[str], list[str]]
) -> None:
    assert smollm.encode(text) == bpe(text, *vocabulary)


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_end_to_end_are_the_text(text: str, smollm: Tokenizer) -> None:
    ids = smollm.encode(text)
    assert b"".join(map(smollm.token_bytes, ids)) == text.encode()
    assert smollm.decode(ids) == text


def test_every_token_has_the_bytes_tokenizers_decodes(smollm: Tokenizer, vocabulary: Any, tmp_path: Path) -> None:
    tokens, merges = vocabulary
    oracle = Qwen2Tokenizer(vocab={t: i for i, t in enumerate(tokens)}, merges=[tuple(m.split()) for m in merges])
    for token_id in range(17, len(tokens), 7):
        assert smollm.token_text(token_id) == oracle.backend_tokenizer.decode([token_id])


def test_control_tokens(smollm: Tokenizer) -> None:
    assert smollm.vocab_size == 49152
    assert smollm.eos_token_ids == (2, 0)
    assert smollm.special_tokens["<|im_end|>"] == 2
    assert smollm.encode("a<|im_end|>\n") == [*smollm.encode("a"), 2, *smollm.encode("\n")]
    assert (smollm.token_bytes(2), smollm.token_text(2), smollm.decode([2])) == (b"", "<|im_end|>", "")
    plain = smollm.encode("a<|im_end|>\n", allow_special=False)
    assert 2 not in plain and smollm.decode(plain) == "a<|im_end|>\n"
    assert smollm.encode("a<|im_end|>\n")[-2] == 2  # and the switch is back


def test_the_mask_is_dropped_and_keeps_control_tokens_apart(smollm: Tokenizer) -> None:
    ids = smollm.encode(f"a<{MASK}|im_end|>b<|im_end|>")
    assert ids == [*smollm.encode("a<|im_end|>b", allow_special=False), 2]


def test_ids_past_the_vocabulary_are_nothing(smollm: Tokenizer) -> None:
    for token_id in (-1, 49152, 2**31, 2**70):
        assert smollm.token_bytes(token_id) == b"" and smollm.token_text(token_id) == ""


def test_half_a_character_is_a_replacement(smollm: Tokenizer) -> None:
    ids = smollm.encode("🦀")
    assert len(ids) > 1
    assert smollm.decode(ids[:-1]).startswith("�")
    assert smollm.token_text(ids[-1]) == "�"


def tokenizer_metadata(tokens: list[str], merges: list[str], pre: str) -> dict[str, Any]:
    control = [i for i, token in enumerate(tokens) if token.startswith("<|")]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if i in control else 1 for i in range(len(tokens))],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 0,
    }


@pytest.fixture(scope="session")
def small_vocabulary() -> tuple[list[str], list[str]]:
    """Byte-level BPE trained on the texts above, words of one digit up to three among them."""
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained.train_from_iterator([*TEXTS, *(f" {n} {n}" for n in range(0, 1000, 3))], trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return tokens, [" ".join(merge) for merge in model["merges"]]


def qwen2(ids: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    return Qwen2Tokenizer(vocab=ids, merges=merges).backend_tokenizer


def llama3(ids: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    pattern = TikTokenConverter().pattern
    oracle = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=ids, merges=merges, ignore_merges=True))
    oracle.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return oracle


def gpt2(ids: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    oracle = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=ids, merges=merges))
    oracle.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return oracle


@pytest.mark.parametrize(("pre", "build"), [("qwen2", qwen2), ("llama-bpe", llama3), ("gpt-2", gpt2)])
def test_pre_tokenizers_by_name(
    pre: str, build: Callable[..., Any], small_vocabulary: tuple[list[str], list[str]], write_gguf: Any
) -> None:
    tokens, merges = small_vocabulary
    tokens = [*tokens, "Ġqzx"]  # which no merge leads to
    ours = load_tokenizer(write_gguf("qwen2", tokenizer_metadata(tokens, merges, pre), {}))
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    oracle = build({token: i for i, token in enumerate(tokens)}, pairs)
    for text in [*TEXTS, "e\u0301 decomposed", "a qzx"]:
        assert ours.encode(text) == oracle.encode(text, add_special_tokens=False).ids, text


@pytest.mark.parametrize("pre", ["default", "tekken", "smollm"])
def test_any_pre_tokenizer_keeps_every_byte(pre: str, small_vocabulary: Any, write_gguf: Any) -> None:
    ours = load_tokenizer(write_gguf("llama", tokenizer_metadata(*small_vocabulary, pre), {}))
    for text in TEXTS:
        assert ours.decode(ours.encode(text)) == text


def test_tokenizers_not_supported_are_refused_by_name(small_vocabulary: Any, write_gguf: Any) -> None:
    metadata = tokenizer_metadata(*small_vocabulary, "qwen2")

    def refused(message: str, **changes: Any) -> None:
        named = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
        values = {key: value for key, value in (metadata | named).items() if value is not None}
        with pytest.raises(UnsupportedCheckpoint, match=message):
            load_tokenizer(write_gguf("llama", values, {}))

    refused("pre-tokenizer 'falcon'", pre="falcon")
    refused("of kind 'bert'", model="bert")
    refused("holds no tokenizer", tokens=None)
    refused("types for 2 of them", token_type=[1, 1])
    refused("no score for each token", model="llama")
    refused("damaged tokenizer", merges=["zzzz qqqq"])


def hugging_face_directory(path: Path, oracle: Any, **files: Any) -> Path:
    oracle.save_pretrained(path)
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_a_directory_tokenizes_as_transformers_does(small_vocabulary: Any, tmp_path: Path) -> None:
    tokens, merges = small_vocabulary
    ids = {token: i for i, token in enumerate(tokens)}
    oracle = Qwen2Tokenizer(vocab=ids, merges=[tuple(m.split(" ")) for m in merges], eos_token="<|endoftext|>")
    oracle.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    path = hugging_face_directory(
        tmp_path, oracle, config={"eos_token_id": 5}, generation_config={"eos_token_id": [6, 5]}
    )
    ours = load_tokenizer(path)
    assert ours.eos_token_ids == (6, 5, ids["<|endoftext|>"])
    for text in [*TEXTS, "a<|im_end|>b"]:
        expected = oracle.encode(text, add_special_tokens=False)
        assert ours.encode(text) == expected
        assert ours.decode(expected) == oracle.decode(expected, skip_special_tokens=True)


def test_control_tokens_matched_after_normalising_are_still_masked(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "<": 1, "x": 2, ">": 3}, merges=[]))
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken("<x>", special=True, normalized=True)])
    backend.save(str(tmp_path / "tokenizer.json"))
    ours = load_tokenizer(tmp_path)
    assert ours.encode("a<x>") == [0, 4]
    assert ours.encode(f"a<{MASK}x>") == [0, 1, 2, 3]


def test_directories_without_a_usable_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=r"has no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UnsupportedCheckpoint, match="cannot be read"):
        load_tokenizer(tmp_path)
    word = tokenizers.Tokenizer(tokenizers.models.WordPiece({"a": 0}, unk_token="a"))
    word.decoder = tokenizers.decoders.WordPiece()
    word.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedCheckpoint, match="decodes by WordPiece"):
        load_tokenizer(tmp_path)
    with pytest.raises(UnsupportedCheckpoint, match="there is no checkpoint"):
        load_tokenizer(tmp_path / "absent")
