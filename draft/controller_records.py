"""What the controller remembers: how each source's guesses came true, for all sequences and for each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from outrider.draft.base import NO_DRAFT, Draft
from outrider.draft.calibration import UNKNOWN_CONFIDENCE, Calibration, Turn
from outrider.draft.controller_chains import ChainChoice

_WEAK_END = 0.6  # a chain's end was about this share of what it had to reach


class Rest:
    """When to try again what is done without: after 1, 2, 4, ... steps, while that does not help."""

    __slots__ = ("_idle", "length")

    def __init__(self, length: int = 1) -> None:
        self._idle = 0  # steps gone without
        self.length = length  # steps to go without before the next trial

    def is_due(self, longest: int) -> bool:
        """One more step without it: whether it is to be tried in this one."""
        self._idle += 1
        if self._idle <= self.length:
            return False
        self._idle = 0
        self.length = min(2 * self.length, longest)
        return True

    def used(self) -> None:
        """A step with it. That it is worth it now and then does not say that it is worth trying in between."""
        self._idle = 0
        self.length -= self.length >> 3


class SourceOfSequence:
    """What one source's guesses were worth for one sequence."""

    __slots__ = ("chains", "rest", "turn")

    def __init__(self, rest_length: int) -> None:
        self.turn = Turn()
        self.rest = Rest(rest_length)
        self.chains: ChainChoice | None = None  # of a draft model, once it was asked for


@dataclass(slots=True)
class SharedSource:
    """What one source's guesses were worth for all sequences of one kind."""

    calibration: Calibration = field(default_factory=Calibration)
    chains: ChainChoice | None = None
    rest_length: int = 1  # of a new sequence: where this did not pay for the last, it is not tried as often at first


@dataclass(slots=True)
class FollowedSequence:
    sampled: bool = False
    step: int = 0
    sources: dict[str, SourceOfSequence] = field(default_factory=dict)
    last_survivals: tuple[tuple[Draft, int], list[float]] = field(default_factory=lambda: ((NO_DRAFT, -1), []))


class DraftRecords:
    """Sequences from their first mention to ``release``; sources for ever, since there are few."""

    def __init__(self) -> None:
        self._shared: dict[tuple[str, bool], SharedSource] = {}
        self._sequences: dict[int, FollowedSequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def begin(self, sequence_id: int, sampled: bool) -> None:
        self._sequences[sequence_id] = FollowedSequence(sampled)

    def release(self, sequence_id: int) -> None:
        self._sequences.pop(sequence_id, None)

    def sequence(self, sequence_id: int) -> FollowedSequence:
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            sequence = self._sequences[sequence_id] = FollowedSequence()
        return sequence

    def shared(self, sequence_id: int, name: str) -> SharedSource:
        """Apart for sampled sequences: their guesses come true less often."""
        key = (name, self.sequence(sequence_id).sampled)
        shared = self._shared.get(key)
        if shared is None:
            shared = self._shared[key] = SharedSource()
        return shared

    def source(self, sequence_id: int, name: str) -> SourceOfSequence:
        sequence = self.sequence(sequence_id)
        source = sequence.sources.get(name)
        if source is None:
            source = sequence.sources[name] = SourceOfSequence(self.shared(sequence_id, name).rest_length)
        source.turn.advance(sequence.step)
        return source

    def survivals(self, sequence_id: int, draft: Draft) -> list[float]:
        """Of each token, the probability that it and all before it in its draft are accepted."""
        sequence = self.sequence(sequence_id)
        draft_and_step, survivals = sequence.last_survivals
        if draft_and_step[0] is draft and draft_and_step[1] == sequence.step:  # asked for again in the same step
            return survivals
        survivals = self._survivals(sequence_id, draft)
        sequence.last_survivals = ((draft, sequence.step), survivals)
        return survivals

    def _survivals(self, sequence_id: int, draft: Draft) -> list[float]:
        calibration = self.shared(sequence_id, draft.source).calibration
        turn = self.source(sequence_id, draft.source).turn
        if not draft.parents:
            return calibration.survivals(confidences_of(draft), turn)
        survivals: list[float] = []
        for confidence, parent, depth in zip(confidences_of(draft), draft.parents, _depths(draft), strict=True):
            before = survivals[parent] if parent >= 0 else 1.0
            survivals.append(before * calibration.probability(confidence, depth, turn))
        return survivals

    def carried_on(
        self, sequence_id: int, draft: Draft, min_survival: float, max_tokens: int, ended: bool
    ) -> tuple[list[float], list[float]]:
        """A chain as it might have gone on to ``max_tokens``: the products of its confidences, claimed and calibrated.

        ``ended``: whether it was ended by a token that brought the first product under ``min_survival``.
        """
        confidences = list(confidences_of(draft))[:max_tokens]
        claimed = math.prod(confidences)
        typical = claimed ** (1 / len(confidences)) if confidences else 0.5
        if ended and len(confidences) < max_tokens:
            confidences.append(_WEAK_END * min_survival / max(claimed, 1e-9))
        confidences += [typical] * (max_tokens - len(confidences))
        calibration = self.shared(sequence_id, draft.source).calibration
        survivals = calibration.survivals(confidences, self.source(sequence_id, draft.source).turn)
        return list(accumulate(confidences, mul)), survivals

    def observe(self, sequence_id: int, draft: Draft, num_accepted: int, path: Sequence[int] = ()) -> None:
        """Learn from those tokens of a draft that stood after accepted ones alone; the rest was never tried."""
        calibration = self.shared(sequence_id, draft.source).calibration
        turn = self.source(sequence_id, draft.source).turn
        confidences = confidences_of(draft)
        if not draft.parents:
            for position in range(min(num_accepted + 1, len(confidences))):
                calibration.observe(confidences[position], position, turn, position < num_accepted)
            return
        accepted, depths = set(path), _depths(draft)
        for index, parent in enumerate(draft.parents):
            if parent < 0 or parent in accepted:
                calibration.observe(confidences[index], depths[index], turn, index in accepted)


def confidences_of(draft: Draft) -> Sequence[float]:
    """One for each token, a middling one where the drafter gives none."""
    if len(draft.confidences) == len(draft.token_ids):
        return draft.confidences
    return (UNKNOWN_CONFIDENCE,) * len(draft.token_ids)


def _depths(draft: Draft) -> list[int]:
    """Of each token of a tree, how many of its draft come before it."""
    depths: list[int] = []
    for parent in draft.parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths
