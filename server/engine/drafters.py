"""Which drafter an engine gets, by its settings and its model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.draft.base import Drafter
from outrider.draft.independent import IndependentDraft
from outrider.draft.model import DraftNetwork, ModelDrafter
from outrider.draft.suffix import SuffixDrafter, SuffixDrafterConfig
from outrider.kernels.operations import Operations
from outrider.server.engine.settings import EngineSettings
from outrider.verify.checkpoint.checkpoint import Checkpoint
from outrider.verify.checkpoint.tokenizer import Tokenizer
from outrider.verify.transformer import Transformer


@dataclass(frozen=True, slots=True)
class ChosenDrafter:
    drafter: Drafter | None
    model: DraftNetwork | None = None  # that the drafter draws on


def choose_drafter(
    settings: EngineSettings,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    target: Transformer,
    operations: Operations,
    max_context: int,
) -> ChosenDrafter:
    """The drafter that the (resolved) ``settings`` ask for.

    Raises:
        ValueError: a draft model is asked for, and there is none for this model.
        UnsupportedCheckpoint: the draft model cannot be used, or not with this target.
    """
    if settings.drafter == "none" or settings.max_draft_tokens == 0:
        return ChosenDrafter(None)
    suffix = SuffixDrafter(SuffixDrafterConfig(min_match_tokens=settings.suffix_min_match))
    if settings.drafter == "suffix":
        return ChosenDrafter(suffix)
    path = Path(settings.draft_model_path) if settings.draft_model_path else None
    if path is None:
        if settings.drafter == "auto":
            return ChosenDrafter(suffix)
        raise ValueError(
            f"the drafter {settings.drafter} needs a draft model, and none comes with Outrider for this one; "
            "name one, or make one with outrider distill"
        )
    draft_operations = operations.quantized(settings.draft_quantize)
    network = IndependentDraft(path, tokenizer, draft_operations, max_context)
    model = ModelDrafter(network, draft_operations)
    return ChosenDrafter(model, network)
