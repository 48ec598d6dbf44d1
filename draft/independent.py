"""An independent draft model: any small checkpoint with the target's vocabulary."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from outrider.kernels.draft_model import PackedDraft
from outrider.kernels.operations import Operations, RaggedBatch
from outrider.kvcache.storage import KVStorage, LayerGroup
from outrider.verify.checkpoint.checkpoint import open_checkpoint
from outrider.verify.checkpoint.config import UnsupportedCheckpoint
from outrider.verify.checkpoint.tokenizer import Tokenizer, load_tokenizer
from outrider.verify.rope import RotaryTable
from outrider.verify.transformer import Transformer

LAYER_GROUP = "draft"


class IndependentDraft:
    """A ``DraftNetwork`` that reads tokens alone.

    Raises:
        UnsupportedCheckpoint: it cannot be read, or its tokens are not the target's.
    """

    def __init__(self, path: Path, target_tokenizer: Tokenizer, operations: Operations, max_context: int) -> None:
        checkpoint = open_checkpoint(path)
        _check_vocabulary(path, load_tokenizer(path), target_tokenizer)
        self._model = Transformer(checkpoint, operations, max_context, LAYER_GROUP)
        self._packed = operations.pack_draft(self._model.as_draft)
        self._name = path.name.removesuffix(".gguf")
        self._fingerprint = checkpoint.fingerprint

    @property
    def name(self) -> str:
        return self._name

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    @property
    def kv_layers(self) -> LayerGroup:
        return self._model.kv_layers

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    @property
    def feature_size(self) -> int:
        return 0

    @property
    def vocab_size(self) -> int:
        return self._model.config.vocab_size

    @property
    def packed(self) -> PackedDraft:
        return self._packed

    def residual(self, token_ids: Tensor, features: Tensor | None, batch: RaggedBatch, storage: KVStorage) -> Tensor:
        return self._model.residual(token_ids, batch, storage)

    @property
    def rotary(self) -> RotaryTable:
        return self._model.rotary


def _check_vocabulary(path: Path, draft: Tokenizer, target: Tokenizer) -> None:
    """Raise where the same id is another token: guesses would be right by chance only."""
    if draft.vocab_size != target.vocab_size:
        raise UnsupportedCheckpoint(
            f"the draft model {path} has {draft.vocab_size} tokens and the target {target.vocab_size}; "
            "a draft model needs the target's own vocabulary: take a smaller one of the same family"
        )
    for token_id in range(target.vocab_size):
        # Texts tell control tokens apart, which have no bytes, and bytes the parts of characters, which have no text.
        ours, theirs = draft.token_text(token_id), target.token_text(token_id)
        if ours != theirs or draft.token_bytes(token_id) != target.token_bytes(token_id):
            raise UnsupportedCheckpoint(
                f"token {token_id} is {ours!r} in the draft model {path} and {theirs!r} in the target; "
                "a draft model needs the target's own vocabulary: take a smaller one of the same family"
            )
