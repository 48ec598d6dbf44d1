"""The hybrid: the best of several drafts, and the model only where it is expected to win."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from draft_world import AHEAD, COSTS

from outrider.draft.base import NO_DRAFT, Draft, DraftRequest, PagedDrafter, SequenceFacts, VerifiedRows
from outrider.draft.controller import DraftController, DraftState
from outrider.draft.hybrid import HybridDrafter, PagedHybridDrafter
from outrider.draft.prediction import PredictionDrafter
from outrider.draft.suffix import SuffixDrafter
from outrider.kvcache.storage import KVStorage, LayerGroup


class ChainDrafter:
    """Guesses a fixed chain for every sequence, and notes what it is asked."""

    def __init__(self, source: str, confidences: Sequence[float], first_token_id: int = 500) -> None:
        self.name = source
        self.confidences = tuple(confidences)
        self.first_token_id = first_token_id
        self.calls: list[list[DraftRequest]] = []
        self.followed: set[int] = set()

    def begin(self, sequence_id: int, prompt_token_ids: Sequence[int]) -> None:
        self.followed.add(sequence_id)

    def extend(self, sequence_id: int, token_ids: Sequence[int]) -> None: ...

    def release(self, sequence_id: int) -> None:
        self.followed.discard(sequence_id)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self.calls.append(list(requests))
        return [self._chain(request.max_draft_tokens) for request in requests]

    def _chain(self, length: int) -> Draft:
        confidences = self.confidences[:length]
        tokens = tuple(range(self.first_token_id, self.first_token_id + len(confidences)))
        return Draft(tokens, None, confidences, self.name) if tokens else NO_DRAFT


class PagedChainDrafter(ChainDrafter):
    """The same with layers of its own."""

    kv_layers = LayerGroup("draft", 1, 2, 8, torch.float32)
    taps = (0, 2)

    def __init__(self) -> None:
        super().__init__("model", [0.5])
        self.heard: list[object] = []

    def attach(self, storage: KVStorage) -> None:
        self.heard.append(storage)

    def observe(self, rows: Sequence[VerifiedRows]) -> None:
        self.heard.append(rows)

    def settle(self) -> None:
        self.heard.append("settle")


def ask(hybrid: HybridDrafter, controller: DraftController | None, *sequence_ids: int) -> list[Draft]:
    if controller is not None:
        controller.plan([DraftState(sequence_id, AHEAD) for sequence_id in sequence_ids])
    return hybrid.propose([DraftRequest(sequence_id, AHEAD) for sequence_id in sequence_ids])


def begin(hybrid: HybridDrafter, sequence_id: int, token_ids: Sequence[int], prediction: Sequence[int] = ()) -> None:
    hybrid.begin(sequence_id, token_ids)
    hybrid.inform(sequence_id, SequenceFacts("", len(token_ids), prediction))


REPEATED = [*range(10, 40), *range(10, 30)]  # ends on a match of 20 tokens


@pytest.mark.parametrize("adaptive", [True, False])
def test_a_long_repetition_leaves_the_model_out_and_all_others_go_to_it_in_one_call(adaptive: bool) -> None:
    model = ChainDrafter("model", [0.7] * AHEAD)
    controller = DraftController(COSTS, AHEAD) if adaptive else None
    hybrid = HybridDrafter([SuffixDrafter()], model, controller)
    begin(hybrid, 1, [1, 2, 3])
    begin(hybrid, 2, REPEATED)
    begin(hybrid, 3, [4, 5, 6])
    drafts = ask(hybrid, controller, 1, 2, 3)
    assert [draft.source for draft in drafts] == ["model", "suffix", "model"]
    assert drafts[1].token_ids == tuple(REPEATED[20:28])
    assert [[request.sequence_id for request in call] for call in model.calls] == [[1, 3]]


def test_a_model_that_is_surer_takes_the_place_of_a_short_repetition() -> None:
    text = [7, 1, 2, 3, 7]  # ends on a match of one token
    for confidence, source in ((0.95, "model"), (0.05, "suffix")):
        controller = DraftController(COSTS, AHEAD)
        hybrid = HybridDrafter([SuffixDrafter()], ChainDrafter("model", [confidence] * AHEAD), controller)
        begin(hybrid, 1, text)
        assert ask(hybrid, controller, 1)[0].source == source


def test_a_prediction_comes_before_a_repetition_that_promises_the_same() -> None:
    same = [0.8] * 3
    for names in (["prediction", "suffix"], ["suffix", "prediction"]):
        controller = DraftController(COSTS, AHEAD)
        drafters = [ChainDrafter(name, same) for name in names]
        assert ask(HybridDrafter(drafters, None, controller), controller, 1)[0].source == names[0]
        assert ask(HybridDrafter(drafters), None, 1)[0].source == names[0]


def test_sources_are_weighed_by_what_became_of_them() -> None:
    controller = DraftController(COSTS, AHEAD)
    hybrid = HybridDrafter([ChainDrafter("prediction", [0.9] * 4), ChainDrafter("suffix", [0.6] * 4)], None, controller)
    sources = []
    for _ in range(30):
        (draft,) = controller.trim(ask(hybrid, controller, 1))
        sources.append(draft.source)
        controller.record(1, draft, 0 if draft.source == "prediction" else len(draft.token_ids))
    assert sources[0] == "prediction"
    assert sources[-10:] == ["suffix"] * 10


def test_a_model_that_turns_out_wrong_gives_way_and_is_tried_again() -> None:
    controller = DraftController(COSTS, AHEAD)
    model = ChainDrafter("model", [0.8] * AHEAD)
    hybrid = HybridDrafter([], model, controller)
    for _ in range(200):
        (draft,) = controller.trim(ask(hybrid, controller, 1), 1.0)
        controller.record(1, draft, 0)
    num_calls = len(model.calls)
    for _ in range(100):
        (draft,) = controller.trim(ask(hybrid, controller, 1), 1.0)
        controller.record(1, draft, 0)
    assert 3 <= len(model.calls) - num_calls <= 30


def test_predictions_reach_their_drafter() -> None:
    hybrid = HybridDrafter([PredictionDrafter(), SuffixDrafter()])
    begin(hybrid, 1, [1, 2, 3], prediction=range(50, 60))
    (draft,) = ask(hybrid, None, 1)
    assert (draft.source, draft.token_ids) == ("prediction", tuple(range(50, 58)))
    hybrid.extend(1, [50, 51])
    assert ask(hybrid, None, 1)[0].token_ids == tuple(range(52, 60))


def test_what_may_not_be_drafted_is_not_asked_of_the_model() -> None:
    model = ChainDrafter("model", [0.9])
    controller = DraftController(COSTS, AHEAD)
    hybrid = HybridDrafter([], model, controller)
    controller.plan([DraftState(1, 0)])
    assert hybrid.propose([DraftRequest(1, 0)]) == [NO_DRAFT]
    assert model.calls == []


def test_all_drafters_begin_and_end_with_the_sequence() -> None:
    drafters = [ChainDrafter("prediction", [0.5]), ChainDrafter("suffix", [0.5])]
    model = ChainDrafter("model", [0.5])
    hybrid = HybridDrafter(drafters, model)
    begin(hybrid, 1, [1])
    assert all(drafter.followed == {1} for drafter in (*drafters, model))
    hybrid.release(1)
    assert all(drafter.followed == set() for drafter in (*drafters, model))
    assert hybrid.name == "suffix+model"
    with pytest.raises(ValueError, match="at least one drafter"):
        HybridDrafter([])


def test_layers_in_the_pages_are_the_models() -> None:
    model = PagedChainDrafter()
    hybrid: PagedDrafter = PagedHybridDrafter([SuffixDrafter()], model)
    assert (hybrid.kv_layers, hybrid.taps) == (model.kv_layers, model.taps)
    storage = KVStorage([model.kv_layers], 2, 4)
    hybrid.attach(storage)
    hybrid.observe([])
    hybrid.settle()
    assert model.heard == [storage, [], "settle"]
