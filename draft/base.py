"""The contract of a drafter: guess the next tokens; be wrong freely, never in the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from outrider.kvcache.sequence import SequencePages
from outrider.kvcache.storage import KVStorage, LayerGroup


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Ask for up to ``max_draft_tokens`` guesses after the tokens of sequence ``sequence_id`` so far.

    ``min_survival``: what a guess must at least be worth. A drafter that knows its confidence ends a chain before the
    first token that is reached and right with less than this probability.
    ``temperature``, ``seed``: how the target will choose. Above 0 a drafter with probabilities draws its guesses in
    the target's own race (``verify/acceptance.py``), with the same random numbers, so both tend to draw the same.
    """

    sequence_id: int
    max_draft_tokens: int
    min_survival: float = 0.0
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Draft:
    """Guessed tokens, the likeliest continuation first to last.

    ``draft_probs`` ``[num_draft_tokens, vocab_size]``: the distributions the guesses were *sampled* from,
    or None where the guesses were not sampled independently of the target (each then counts as certain).
    With them a chain's length must not depend on what was drawn in it, and each number it was drawn with belongs to
    this draft alone (``verify/block.py`` says how); siblings of a tree are tried in their order.
    ``confidences``: of each token, how likely it is right where all before it are; empty where unknown.
    ``source``: who guessed: ``suffix``, ``model`` or ``prediction``.
    ``parents``: for a token tree, of each token the index of the one it follows, -1 for those that follow the
    sequence itself, always less than its own index; empty for a chain.
    """

    token_ids: tuple[int, ...] = ()
    draft_probs: Tensor | None = None
    confidences: tuple[float, ...] = ()
    source: str = ""
    parents: tuple[int, ...] = ()


NO_DRAFT = Draft()


class Drafter(Protocol):
    """Follows sequences token by token and guesses ahead.

    The engine calls ``begin`` once, then ``extend`` with every verified token (never with a rejected
    guess), ``propose`` before a step, ``release`` at the end. Whatever a drafter raises or returns, the
    engine goes on without a draft.
    """

    @property
    def name(self) -> str: ...

    def begin(self, sequence_id: int, prompt_token_ids: Sequence[int]) -> None: ...

    def extend(self, sequence_id: int, token_ids: Sequence[int]) -> None: ...

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft a request, in order, each of at most ``max_draft_tokens`` tokens."""

    def release(self, sequence_id: int) -> None: ...


@dataclass(frozen=True, slots=True)
class SequenceFacts:
    """What is known of a sequence beside its tokens.

    ``tenant``: whose it is; what was learned from one tenant's sequences never serves another's.
    ``num_prompt_tokens``: of the tokens given to ``begin``; those after them are the answer's first.
    ``prediction_token_ids``: what the client expects the answer to be.
    ``sampled``: the target draws at a temperature above 0.
    """

    tenant: str = ""
    num_prompt_tokens: int = 0
    prediction_token_ids: Sequence[int] = ()
    sampled: bool = False


@runtime_checkable
class InformedDrafter(Drafter, Protocol):
    """A drafter that makes use of ``SequenceFacts``. The engine calls ``inform`` right after ``begin``."""

    def inform(self, sequence_id: int, facts: SequenceFacts) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class VerifiedRows:
    """What one pass verified of a sequence: the tokens at ``start`` and after, whose target KV is in its pages now."""

    sequence_id: int
    pages: SequencePages  # another object after a preemption: what was in the pages before is lost
    start: int
    token_ids: Sequence[int]
    next_token_id: int | None  # the token after them, if it is known: the next of the prompt, or the pass's own
    features: Tensor | None  # [len(token_ids), len(taps) * hidden_size], the target's residual stream at the taps


class PagedDrafter(Drafter, Protocol):
    """A drafter with layers of its own in the target's pages.

    Its rows stand one page table with the target's: the row of position ``q`` reads token ``q`` and, where it is
    conditioned on the target, the feature of position ``q - 1``. So what a page holds depends on the page's own
    prefix alone, and a prefix hit serves the draft as it serves the target. The first row of a sequence, and the
    first after a hit, has no feature before it and takes zeros.

    After every pass the engine calls ``observe``, for each sequence of the pass, before ``release`` of those that
    ended. The rows wait until the sequence is drafted for, so that a model which does not pay costs next to nothing;
    or until ``settle``, which the engine calls before a plan that may admit somebody, and where ``must_settle``. So
    no page is ever found without the draft's part. ``observe`` comes before ``begin``
    or without it, as prompts are computed before there is anything to draft for; ``release`` ends both.
    """

    @property
    def kv_layers(self) -> LayerGroup: ...

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers before which the target's residual stream is wanted; ``num_layers`` is what the last one left."""

    def attach(self, storage: KVStorage) -> None:
        """Called once, with the storage that holds ``kv_layers``."""

    def observe(self, rows: Sequence[VerifiedRows]) -> None: ...

    @property
    def must_settle(self) -> bool:
        """Whether rows wait that cannot wait for the sequence's next draft: it ended, or they became many."""

    def settle(self) -> None:
        """Compute all rows that wait and have a slot."""
