"""Text to token ids and back. No torch here: the server process imports this."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import normalizers

from outrider.verify.checkpoint.checkpoint import is_gguf, not_a_checkpoint
from outrider.verify.checkpoint.config import UnsupportedCheckpoint
from outrider.verify.checkpoint.json_files import read_json, token_ids

MASK = "\ufdd0"
"""A Unicode noncharacter, so part of no text: ``encode`` drops it, and control tokens broken up by it stay text."""

_MAX_TOKEN_ID = 2**32


class Tokenizer:
    """One model's vocabulary and the rules around it.

    ``special_tokens``: the control tokens, by name.
    ``eos_token_ids``: the tokens that end an answer. ``leading_space_stripped``: whether ``decode`` drops one
    space at the very start of a text (SentencePiece puts one there when encoding); whoever decodes
    ``token_bytes`` piece by piece does the same for the first piece, and only for it.
    """

    def __init__(self, backend: tokenizers.Tokenizer, eos_token_ids: Iterable[int]) -> None:
        self._backend = _with_mask(backend)
        self._lock = threading.Lock()
        self._added = {i: (token.content, token.special) for i, token in backend.get_added_tokens_decoder().items()}
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.special_tokens = {content: i for i, (content, special) in self._added.items() if special}
        self.vocab_size: int = backend.get_vocab_size()
        self._byte_level, self.leading_space_stripped = _describe_decoder(backend.decoder)

    def encode(self, text: str, *, allow_special: bool = True) -> list[int]:
        """The ids of ``text``; nothing is put before or after it.

        With ``allow_special`` a control token's name stands for the token, as a rendered chat template
        needs it; without, it is text like any other, so that nobody forges a turn by writing it.
        """
        # The switch is the backend's state, hence the lock.
        with self._lock:
            self._backend.encode_special_tokens = not allow_special
            return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of ``token_ids``: their bytes end to end, what is not UTF-8 replaced by U+FFFD."""
        text = b"".join(map(self.token_bytes, token_ids)).decode("utf-8", errors="replace")
        return text[1:] if self.leading_space_stripped and text.startswith(" ") else text

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to a text; nothing for a control token or an id that is no token's.

        A character may be spread over several tokens.
        """
        if token_id in self._added:
            content, special = self._added[token_id]
            return b"" if special else content.encode()
        token = self._backend.id_to_token(token_id) if 0 <= token_id < _MAX_TOKEN_ID else None
        if token is None:
            return b""
        return _from_byte_level(token) if self._byte_level else _from_sentencepiece(token)

    def token_text(self, token_id: int) -> str:
        """One token for a human to read: control tokens by name, halves of characters as U+FFFD."""
        if token_id in self._added:
            return self._added[token_id][0]
        return self.token_bytes(token_id).decode("utf-8", errors="replace")


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face directory (``tokenizer.json``) or of a GGUF file.

    Raises:
        UnsupportedCheckpoint: there is none, or of a kind that is not supported.
    """
    if path.is_dir():
        return _load_huggingface(path)
    if is_gguf(path):
        return _load_gguf(path)
    raise not_a_checkpoint(path)


def _load_huggingface(path: Path) -> Tokenizer:
    file = path / "tokenizer.json"
    if not file.is_file():
        raise UnsupportedCheckpoint(
            f"{path} has no tokenizer.json; make one with transformers: "
            "AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise UnsupportedCheckpoint(f"{file} cannot be read: {error}") from error
    # A checkpoint may carry settings for training batches; they have no place in a prompt.
    backend.no_truncation()
    backend.no_padding()
    eos_token_ids = [
        *token_ids(path / "generation_config.json", "eos_token_id"),
        *token_ids(path / "config.json", "eos_token_id"),
    ]
    eos_token = read_json(path / "tokenizer_config.json").get("eos_token")
    name = eos_token.get("content") if isinstance(eos_token, dict) else eos_token
    declared = backend.token_to_id(name) if isinstance(name, str) else None
    return Tokenizer(backend, eos_token_ids if declared is None else [*eos_token_ids, declared])


def _load_gguf(path: Path) -> Tokenizer:
    from outrider.verify.checkpoint.gguf_metadata import read_header
    from outrider.verify.checkpoint.gguf_tokenizer import build_tokenizer, end_token_ids

    header = read_header(path)
    return Tokenizer(build_tokenizer(header), end_token_ids(header))


def _with_mask(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """``backend``, dropping ``MASK`` after it has looked for control tokens."""
    added = backend.get_added_tokens_decoder().values()
    if any(token.special and token.normalized for token in added):
        # These would be looked for afterwards.
        description = json.loads(backend.to_str())
        for token in description["added_tokens"]:
            token["normalized"] = token["normalized"] and not token["special"]
        backend = tokenizers.Tokenizer.from_str(json.dumps(description))
    drop: Any = normalizers.Replace(MASK, "")
    backend.normalizer = normalizers.Sequence([drop, backend.normalizer]) if backend.normalizer else drop
    return backend


def _describe_decoder(decoder: Any) -> tuple[bool, bool]:
    """Whether tokens are written in byte-level BPE's alphabet, and whether a leading space is stripped."""
    steps = list(_decoder_steps(json.loads(decoder.__getstate__()))) if decoder is not None else []
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return True, False
    if kinds == ["Metaspace"]:
        return False, steps[0].get("prepend_scheme") != "never"
    if "ByteFallback" in kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        strips = any(step["type"] == "Strip" and step["start"] > 0 for step in steps)
        return False, strips or any(step["type"] == "Metaspace" and step["prepend_scheme"] != "never" for step in steps)
    raise UnsupportedCheckpoint(
        f"the tokenizer decodes by {' + '.join(kinds) or 'nothing'}; supported are byte-level BPE and SentencePiece"
    )


def _decoder_steps(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _decoder_steps(step)
    else:
        yield decoder


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's letter for each byte: itself where printable, else the next letter from U+0100 (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def _from_byte_level(token: str) -> bytes:
    try:
        return bytes(_BYTES[letter] for letter in token)
    except KeyError:  # a token outside the alphabet is literal text
        return token.encode()


def _from_sentencepiece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        with contextlib.suppress(ValueError):
            return bytes((int(token[3:5], 16),))
    return token.replace("▁", " ").encode()
