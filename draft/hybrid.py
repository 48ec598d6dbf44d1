"""Several drafters as one: the client's prediction, what the text itself says, and a model where these say little."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.draft.base import (
    NO_DRAFT,
    Draft,
    Drafter,
    DraftRequest,
    InformedDrafter,
    PagedDrafter,
    SequenceFacts,
    VerifiedRows,
)
from outrider.draft.controller import DraftController, DraftLimit
from outrider.kvcache.storage import KVStorage, LayerGroup

SURE_TOKENS = 4.0  # guesses without a model that are this many tokens long leave the model out, without a controller


class HybridDrafter:
    """For each sequence the draft that promises most, of drafters that cost nothing and of a model.

    ``drafters``: in order of precedence, where two promise the same. They are always asked, since looking up costs
    microseconds. The model is asked for the sequences where it has gained more than the others offer, all in one
    call, and then and now for the rest; of the others' draft and its own the better one is taken.
    ``controller``: who knows what drafts are worth. Without one, a draft that is long enough leaves the model out.
    """

    def __init__(
        self, drafters: Sequence[Drafter], model: Drafter | None = None, controller: DraftController | None = None
    ) -> None:
        if not drafters and model is None:
            raise ValueError("a hybrid drafter needs at least one drafter")
        self._free = list(drafters)
        self._model = model
        self._controller = controller
        self._begun: set[int] = set()  # a model that is shown rows may know more sequences than these

    @property
    def name(self) -> str:
        """Of those that guess for every sequence."""
        names = [drafter.name for drafter in self._all]
        return "+".join([name for name in names if name != "prediction"] or names)

    def begin(self, sequence_id: int, prompt_token_ids: Sequence[int]) -> None:
        self._begun.add(sequence_id)
        for drafter in self._all:
            drafter.begin(sequence_id, prompt_token_ids)

    def inform(self, sequence_id: int, facts: SequenceFacts) -> None:
        for drafter in self._all:
            if isinstance(drafter, InformedDrafter):
                drafter.inform(sequence_id, facts)

    def extend(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        for drafter in self._all:
            drafter.extend(sequence_id, token_ids)

    def release(self, sequence_id: int) -> None:
        try:
            if sequence_id in self._begun:
                self._begun.remove(sequence_id)
                for drafter in self._free:
                    drafter.release(sequence_id)
        finally:
            if self._model is not None:
                self._model.release(sequence_id)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft a request, in order, each from one of the drafters."""
        drafts, values = [NO_DRAFT] * len(requests), [0.0] * len(requests)
        for drafter in self._free:
            for index, draft in enumerate(drafter.propose(requests)):
                if not draft.token_ids:
                    continue
                value = self._value(requests[index], draft)
                if value > values[index] or not drafts[index].token_ids:
                    drafts[index], values[index] = draft, value
        if self._model is not None:
            self._ask_model(self._model, requests, drafts, values)
        return drafts

    @property
    def _all(self) -> list[Drafter]:
        return self._free if self._model is None else [*self._free, self._model]

    def _ask_model(
        self, model: Drafter, requests: Sequence[DraftRequest], drafts: list[Draft], values: list[float]
    ) -> None:
        """Replace those drafts that the model's are better than."""
        asked: list[int] = []
        model_requests: list[DraftRequest] = []
        for index, request in enumerate(requests):
            if (model_request := self._model_request(request, values[index])).max_draft_tokens > 0:
                asked.append(index)
                model_requests.append(model_request)
        if not asked:
            return
        for index, request, draft in zip(asked, model_requests, model.propose(model_requests), strict=True):
            better = True
            if self._controller is not None:
                limit = DraftLimit(request.max_draft_tokens, request.min_survival)
                value = self._controller.model_guessed(request.sequence_id, draft, limit)
                better = value > values[index]
            if draft.token_ids and (better or not drafts[index].token_ids):
                drafts[index] = draft

    def _model_request(self, request: DraftRequest, other_value: float) -> DraftRequest:
        """What to ask of the model where there is a draft of this value without it; perhaps no tokens."""
        longest = request.max_draft_tokens
        if self._controller is None:
            return replace(request, max_draft_tokens=longest if other_value < min(SURE_TOKENS, longest) else 0)
        if longest < 1:
            return request
        limit = self._controller.ask_model(request.sequence_id, other_value)
        return replace(request, max_draft_tokens=min(longest, limit.limit), min_survival=limit.min_survival)

    def _value(self, request: DraftRequest, draft: Draft) -> float:
        if self._controller is None:
            return float(len(draft.token_ids))
        return self._controller.value(request.sequence_id, draft)


class PagedHybridDrafter(HybridDrafter):
    """A ``HybridDrafter`` whose model has layers of its own in the target's pages."""

    def __init__(
        self, drafters: Sequence[Drafter], model: PagedDrafter, controller: DraftController | None = None
    ) -> None:
        super().__init__(drafters, model, controller)
        self._paged = model

    @property
    def kv_layers(self) -> LayerGroup:
        return self._paged.kv_layers

    @property
    def taps(self) -> tuple[int, ...]:
        return self._paged.taps

    def attach(self, storage: KVStorage) -> None:
        self._paged.attach(storage)

    def observe(self, rows: Sequence[VerifiedRows]) -> None:
        self._paged.observe(rows)

    @property
    def must_settle(self) -> bool:
        return self._paged.must_settle

    def settle(self) -> None:
        self._paged.settle()
