"""Which drafter an engine gets, by its settings and its model."""

from __future__ import annotations

from pathlib import Path

from outrider.draft.base import Drafter
from outrider.draft.controller import DraftController
from outrider.draft.controller_costs import DraftCosts
from outrider.draft.eagle3 import Eagle3Head
from outrider.draft.history import TenantHistories
from outrider.draft.hybrid import HybridDrafter, PagedHybridDrafter
from outrider.draft.independent import IndependentDraft
from outrider.draft.model import DraftNetwork, ModelDrafter
from outrider.draft.prediction import PredictionDrafter
from outrider.draft.shipped import shipped_draft
from outrider.draft.speculators import is_speculator
from outrider.draft.suffix import SuffixDrafter, SuffixDrafterConfig
from outrider.kernels.operations import Operations
from outrider.server.engine.cost_table import CostTable
from outrider.server.engine.settings import EngineSettings
from outrider.verify.checkpoint.tokenizer import Tokenizer
from outrider.verify.transformer import Transformer

STEP_OVERHEAD_MS = 0.35  # planning, sampling and text of one sequence, measured on two cores with AVX-512


def load_draft_model(
    settings: EngineSettings, tokenizer: Tokenizer, target: Transformer, operations: Operations, max_context: int
) -> DraftNetwork | None:
    """The draft model that the (resolved) ``settings`` name, or the one that comes with Outrider for ``target``.

    ``operations``: the draft's own, see ``Operations.quantized``.

    Raises:
        ValueError: one is asked for, and there is none for this model.
        UnsupportedCheckpoint: it cannot be used, or not with this target.
    """
    if settings.drafter in ("none", "suffix") or settings.max_draft_tokens == 0:
        return None
    if settings.drafter == "auto" and not settings.draft_model_path:
        return None  # the draft that comes with Outrider was measured to be no faster than the suffix drafter alone
    if settings.draft_model_path:
        path = Path(settings.draft_model_path)
    else:
        config = target.config
        shipped = shipped_draft(config.hidden_size, config.num_layers, config.vocab_size)
        if shipped is None:
            raise ValueError(
                f"the drafter {settings.drafter} needs a draft model, and none comes with Outrider for this one; "
                "name one, or make one with outrider distill"
            )
        path = shipped.path
    if is_speculator(path):
        return Eagle3Head(path, target, operations, max_context)
    return IndependentDraft(path, tokenizer, operations, max_context)


def make_controller(settings: EngineSettings, cost_table: CostTable | None) -> DraftController | None:
    """None where drafts have a fixed length: by the settings' wish, or since nothing was measured."""
    if cost_table is None or not settings.adaptive_drafts or settings.max_draft_tokens == 0:
        return None
    costs = DraftCosts(cost_table.pass_ms, cost_table.draft_ms, cost_table.attention_ms, STEP_OVERHEAD_MS)
    return DraftController(costs, settings.max_draft_tokens)


def make_drafter(
    settings: EngineSettings, network: DraftNetwork | None, operations: Operations, controller: DraftController | None
) -> Drafter | None:
    """The drafter that the (resolved) ``settings`` ask for, over ``network`` where it draws on a draft model.

    What clients predict of their answers is followed by every drafter.
    """
    if settings.drafter == "none" or settings.max_draft_tokens == 0:
        return None
    drafters: list[Drafter] = [PredictionDrafter()]
    if settings.drafter != "model":
        histories = TenantHistories() if settings.suffix_history else None
        drafters.append(SuffixDrafter(SuffixDrafterConfig(min_match_tokens=settings.suffix_min_match), histories))
    if network is None:
        return HybridDrafter(drafters, None, controller)
    return PagedHybridDrafter(drafters, ModelDrafter(network, operations), controller)


def drafter_name(settings: EngineSettings, network: DraftNetwork | None) -> str:
    """What the drafter of ``make_drafter`` is called: as in the settings, with nothing left open."""
    if settings.drafter == "none" or settings.max_draft_tokens == 0:
        return "none"
    if network is None:
        return "suffix"
    return "model" if settings.drafter == "model" else "hybrid"
