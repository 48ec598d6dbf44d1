"""What the controller remembers: how each source's guesses came true, for all sequences and for each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.draft.base import Draft
from outrider.draft.calibration import UNKNOWN_CONFIDENCE, Calibration, Turn


class SourceOfSequence:
    """What one source's guesses were worth for one sequence, and how long it has gone without any."""

    __slots__ = ("idle", "rest", "turn", "value")

    def __init__(self, value: float) -> None:
        self.turn = Turn()
        self.value = value  # tokens that a draft of it gains a step, smoothed
        self.rest = 1  # steps to go without before it is tried again
        self.idle = 0  # steps gone without

    def is_due(self, longest_rest: int) -> bool:
        """One more step without it: whether it is to be tried in this one. Each time it rests twice as long."""
        self.idle += 1
        if self.idle <= self.rest:
            return False
        self.idle = 0
        self.rest = min(2 * self.rest, longest_rest)
        return True

    def used(self) -> None:
        self.idle = 0
        self.rest = 1


@dataclass(slots=True)
class SharedSource:
    """What one source's guesses were worth for all sequences of one kind.

    ``sharpness``: calibrated probabilities are about the drafter's own confidences to this power.
    """

    calibration: Calibration = field(default_factory=Calibration)
    value: float = 1.0
    sharpness: float = 1.0

    def compare(self, confidences: Sequence[float], survival: float) -> None:
        """Learn ``sharpness`` from a chain and the calibrated survival of its last token."""
        claimed = math.fsum(math.log(min(1.0, max(1e-3, confidence))) for confidence in confidences)
        if claimed < -0.05:
            ratio = min(4.0, max(0.25, math.log(max(1e-9, survival)) / claimed))
            self.sharpness += 0.05 * (ratio - self.sharpness)


@dataclass(slots=True)
class FollowedSequence:
    sampled: bool = False
    step: int = 0
    sources: dict[str, SourceOfSequence] = field(default_factory=dict)


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
            source = sequence.sources[name] = SourceOfSequence(self.shared(sequence_id, name).value)
        source.turn.advance(sequence.step)
        return source

    def survivals(self, sequence_id: int, draft: Draft) -> list[float]:
        """Of each token, the probability that it and all before it in its draft are accepted."""
        calibration = self.shared(sequence_id, draft.source).calibration
        turn = self.source(sequence_id, draft.source).turn
        if not draft.parents:
            return calibration.survivals(confidences_of(draft), turn)
        survivals: list[float] = []
        for confidence, parent, depth in zip(confidences_of(draft), draft.parents, _depths(draft), strict=True):
            before = survivals[parent] if parent >= 0 else 1.0
            survivals.append(before * calibration.probability(confidence, depth, turn))
        return survivals

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
