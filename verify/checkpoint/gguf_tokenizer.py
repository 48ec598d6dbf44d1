"""A ``tokenizers.Tokenizer`` from the vocabulary in a GGUF file's metadata.

GGUF keeps tokens, types, merges or scores, but of the text processing around them only a name: ``gpt2``
(byte-level BPE, with ``tokenizer.ggml.pre`` naming the pre-tokeniser) or ``llama`` (SentencePiece BPE).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from outrider.verify.checkpoint.config import UnsupportedCheckpoint
from outrider.verify.checkpoint.gguf_metadata import GGUFHeader

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # values of tokenizer.ggml.token_type
SPACE = "▁"  # how SentencePiece writes a space

_END_TOKENS = frozenset(
    ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "</s>")
)
"""Names of control tokens that end a turn or a text; older files declare only one of several by its id."""

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """Regular expressions that split a text, each the pieces of the one before, and how BPE treats a piece."""

    splits: tuple[str, ...]
    ignore_merges: bool = False  # a piece that is a token is taken whole
    nfc: bool = False


_GPT2 = _PreTokenizer((_GPT2_WORDS,))
_DIGITS_GPT2 = _PreTokenizer((r"\p{N}", _GPT2_WORDS))
_LLAMA3 = _PreTokenizer((_CL100K_WORDS % 3,), ignore_merges=True)
_QWEN2 = _PreTokenizer((_CL100K_WORDS % 1,), nfc=True)
_PRE_TOKENIZERS = {
    # llama.cpp's own fallback, which files without a name were made for.
    "default": _PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _GPT2,
    "smollm": _DIGITS_GPT2,
    "starcoder": _DIGITS_GPT2,
    "refact": _DIGITS_GPT2,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _PreTokenizer((_TEKKEN_WORDS,), ignore_merges=True),
}


def end_token_ids(header: GGUFHeader) -> tuple[int, ...]:
    """The tokens that end an answer: those declared by id, then control tokens known by name."""
    declared = (header.integer(f"tokenizer.ggml.{role}_token_id") for role in ("eos", "eot", "eom"))
    ids = [token_id for token_id in declared if token_id is not None]
    tokens = header.strings("tokenizer.ggml.tokens") or ()
    for token_id, token_type in enumerate(header.numbers("tokenizer.ggml.token_type") or ()):
        if token_type in (CONTROL, USER_DEFINED) and token_id < len(tokens) and tokens[token_id] in _END_TOKENS:
            ids.append(token_id)
    return tuple(dict.fromkeys(ids))


def build_tokenizer(header: GGUFHeader) -> Tokenizer:
    """The tokenizer whose vocabulary ``header`` holds.

    About 0.15 s for 50,000 tokens; reading a ``tokenizer.json`` of that size takes 0.1 s, so no copy is cached.

    Raises:
        UnsupportedCheckpoint: the vocabulary is incomplete, or of a kind that is not supported.
    """
    vocabulary = _Vocabulary.read(header)
    kind = header.text("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level_bpe(header, vocabulary)
    elif kind == "llama":
        tokenizer = _sentencepiece_bpe(header, vocabulary)
    else:
        raise UnsupportedCheckpoint(
            f"{header.path} has a tokenizer of kind {kind!r}; "
            "supported are gpt2 (byte-level BPE) and llama (SentencePiece)"
        )
    added = [
        AddedToken(token, special=token_type != USER_DEFINED, normalized=False)
        for token, token_type in zip(vocabulary.tokens, vocabulary.types, strict=True)
        if token and token_type in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    return tokenizer


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    tokens: list[str]
    types: Sequence[float]

    @classmethod
    def read(cls, header: GGUFHeader) -> _Vocabulary:
        tokens = header.strings("tokenizer.ggml.tokens")
        if not tokens:
            raise UnsupportedCheckpoint(f"{header.path} holds no tokenizer (tokenizer.ggml.tokens)")
        types = header.numbers("tokenizer.ggml.token_type") or (NORMAL,) * len(tokens)
        if len(types) != len(tokens):
            raise UnsupportedCheckpoint(f"{header.path} has {len(tokens)} tokens and types for {len(types)} of them")
        return cls(list(tokens), types)

    def ids(self) -> dict[str, int]:
        return {token: token_id for token_id, token in enumerate(self.tokens)}


def _byte_level_bpe(header: GGUFHeader, vocabulary: _Vocabulary) -> Tokenizer:
    name = header.text("tokenizer.ggml.pre") or "default"
    pre_tokenizer = _PRE_TOKENIZERS.get(name)
    if pre_tokenizer is None:
        raise UnsupportedCheckpoint(
            f"{header.path} splits text by the pre-tokenizer {name!r}; supported are {', '.join(_PRE_TOKENIZERS)}"
        )
    merges = [_pair(merge) for merge in header.strings("tokenizer.ggml.merges") or ()]
    tokenizer = Tokenizer(_bpe(header, vocabulary, merges, ignore_merges=pre_tokenizer.ignore_merges))
    if pre_tokenizer.nfc:
        tokenizer.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre_tokenizer.splits]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _sentencepiece_bpe(header: GGUFHeader, vocabulary: _Vocabulary) -> Tokenizer:
    scores = header.numbers("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(vocabulary.tokens):
        raise UnsupportedCheckpoint(f"{header.path} has no score for each token (tokenizer.ggml.scores)")
    merges = sorted(_scored_merges(vocabulary, scores), key=lambda merge: -merge[0])
    unknown = header.integer("tokenizer.ggml.unknown_token_id") or 0
    if not 0 <= unknown < len(vocabulary.tokens):
        raise UnsupportedCheckpoint(f"{header.path} names token {unknown} as unknown_token_id, which it does not have")
    tokenizer = Tokenizer(
        _bpe(
            header,
            vocabulary,
            [(left, right) for _, left, right in merges],
            unk_token=vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", SPACE)
    to_text = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if header.flag("tokenizer.ggml.add_space_prefix") is False:
        tokenizer.normalizer = spaces
        tokenizer.decoder = decoders.Sequence(to_text)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        tokenizer.decoder = decoders.Sequence([*to_text, decoders.Strip(" ", 1, 0)])
    return tokenizer


def _scored_merges(vocabulary: _Vocabulary, scores: Sequence[float]) -> Iterator[tuple[float, str, str]]:
    """Every way to join two tokens into a third. SentencePiece joins the best-scored pair first (Kudo 2018)."""
    known = {token for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == NORMAL}
    for token, score in zip(vocabulary.tokens, scores, strict=True):
        if token in known:
            for cut in range(1, len(token)):
                left, right = token[:cut], token[cut:]
                if left in known and right in known:
                    yield score, left, right


def _bpe(header: GGUFHeader, vocabulary: _Vocabulary, merges: list[tuple[str, str]], **options: object) -> models.BPE:
    try:
        return models.BPE(vocab=vocabulary.ids(), merges=merges, **options)
    except Exception as error:  # the library raises nothing narrower
        raise UnsupportedCheckpoint(f"{header.path} has a damaged tokenizer: {error}") from error
