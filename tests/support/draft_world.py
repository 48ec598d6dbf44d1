"""A simulated world to judge draft lengths in: texts whose guesses come true with known probabilities, known costs."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.draft.base import Draft, DraftRequest
from outrider.draft.controller import DraftController, DraftState
from outrider.draft.controller_costs import DraftCosts
from outrider.draft.hybrid import HybridDrafter

# Milliseconds over rows, of the default model on a small machine.
PASS_MS = {1: 4.2, 2: 4.2, 3: 4.3, 4: 4.3, 5: 4.9, 6: 5.4, 8: 6.6, 12: 9.8, 16: 11.7, 32: 22.0}


def pass_ms(num_rows: int) -> float:
    sizes = list(PASS_MS)
    after = bisect_right(sizes, num_rows)
    if after == len(sizes):
        return PASS_MS[32] * num_rows / 32
    left, right = sizes[after - 1], sizes[after]
    return PASS_MS[left] + (num_rows - left) / (right - left) * (PASS_MS[right] - PASS_MS[left])


def draft_ms(num_sequences: int, num_steps: int) -> float:
    return 0.2 + (0.2 + 0.05 * num_sequences) * num_steps if num_steps else 0.0


COSTS = DraftCosts(pass_ms, draft_ms, step_overhead_ms=0.35)


@dataclass(frozen=True)
class Text:
    """A stretch of text: how likely a guess is right on average, and how much that varies from token to token.

    ``spread``: small: every token is alike; large: guesses are nearly all either sure or hopeless.
    """

    rate: float
    spread: float = 0.5


AHEAD = 8  # tokens that are guessed at most
Plan = Callable[[int], Text]  # position -> the text there


def distorted(probability: float) -> float:
    """What a drafter says of a guess that is right with this probability: it is too sure of itself."""
    log_odds = math.log(probability / (1 - probability))
    return 1 / (1 + math.exp(-(1.4 * log_odds + 0.5)))


class World:
    """What every guess at every position is worth: settled once, so that every policy meets the same."""

    def __init__(self, plans: Sequence[Plan], num_tokens: int, seed: int = 0, fade: float = 0.98) -> None:
        """``fade``: how much worse a guess gets with every token it lies ahead."""
        rng = random.Random(seed)
        self.guesses = [
            [[_guess(rng, plan(position), fade**ahead) for ahead in range(AHEAD)] for position in range(num_tokens)]
            for plan in plans
        ]

    def num_right(self, sequence_id: int, position: int, num_tokens: int) -> int:
        """How many of the guesses made at ``position`` come true."""
        guesses = self.guesses[sequence_id][position]
        return next((ahead for ahead in range(num_tokens) if not guesses[ahead][1]), num_tokens)


def _guess(rng: random.Random, text: Text, fade: float) -> tuple[float, bool]:
    """(what the drafter says of it, whether it is right)."""
    mean, strength = text.rate * fade, 1 / text.spread
    probability = min(0.995, max(0.005, rng.betavariate(mean * strength + 1e-3, (1 - mean) * strength + 1e-3)))
    return distorted(probability), rng.random() < probability


class SimulatedDrafter:
    """Guesses as its world says, and ends its chains as it is asked to."""

    def __init__(self, world: World, source: str) -> None:
        self.name = source
        self.world = world
        self.positions = [0] * len(world.guesses)
        self._chains: list[int] = []  # steps of each, since the last ``spent_ms``

    def begin(self, sequence_id: int, prompt_token_ids: Sequence[int]) -> None: ...

    def extend(self, sequence_id: int, token_ids: Sequence[int]) -> None:
        self.positions[sequence_id] += len(token_ids)

    def release(self, sequence_id: int) -> None: ...

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self._propose(request) for request in requests]

    def _propose(self, request: DraftRequest) -> Draft:
        guesses = self.world.guesses[request.sequence_id][self.positions[request.sequence_id]]
        confidences: list[float] = []
        survival, num_steps = 1.0, 0
        for confidence, _ in guesses[: request.max_draft_tokens]:
            num_steps += 1
            survival *= confidence
            if survival < request.min_survival:
                break
            confidences.append(confidence)
        self._chains.append(num_steps)
        return Draft(tuple(range(len(confidences))), None, tuple(confidences), self.name)

    def spent_ms(self) -> float:
        """What the chains since the last call cost: nothing, if they are not a model's."""
        spent = 0.0
        if self.name == "model" and self._chains:
            spent = 0.2
            for step in range(max(self._chains)):
                num_alive = sum(num_steps > step for num_steps in self._chains)
                spent += draft_ms(num_alive, step + 1) - draft_ms(num_alive, step) - 0.2 * (step == 0)
        self._chains.clear()
        return spent


def rate_of_fixed_length(world: World, source: str, length: int, num_tokens: int) -> float:
    """Tokens per millisecond of drafts that always have this length."""
    drafter = SimulatedDrafter(world, source)
    num_sequences, ms = len(drafter.positions), 0.0
    while sum(drafter.positions) < num_tokens:
        if length:
            drafter.propose([DraftRequest(sequence_id, length) for sequence_id in range(num_sequences)])
        ms += drafter.spent_ms() + pass_ms(num_sequences * (1 + length)) + COSTS.step_overhead_ms
        for sequence_id, position in enumerate(drafter.positions):
            drafter.positions[sequence_id] += 1 + world.num_right(sequence_id, position, length)
    return sum(drafter.positions) / ms


def rate_of_controller(world: World, source: str, num_tokens: int) -> float:
    """The same of the controller's."""
    drafter, controller = SimulatedDrafter(world, source), DraftController(COSTS, AHEAD)
    hybrid = HybridDrafter([], drafter, controller) if source == "model" else HybridDrafter([drafter], None, controller)
    sequence_ids, ms = range(len(drafter.positions)), 0.0
    while sum(drafter.positions) < num_tokens:
        limits = controller.plan([DraftState(sequence_id, AHEAD) for sequence_id in sequence_ids])
        proposed = hybrid.propose(
            [DraftRequest(i, limit.limit, limit.min_survival) for i, limit in zip(sequence_ids, limits, strict=True)]
        )
        spent_ms = drafter.spent_ms()
        drafts = controller.trim(proposed, spent_ms)
        num_rows = len(drafts) + sum(len(draft.token_ids) for draft in drafts)
        ms += spent_ms + pass_ms(num_rows) + COSTS.step_overhead_ms
        for sequence_id, draft in enumerate(drafts):
            num_right = world.num_right(sequence_id, drafter.positions[sequence_id], len(draft.token_ids))
            controller.record(sequence_id, draft, num_right)
            drafter.positions[sequence_id] += 1 + num_right
    return sum(drafter.positions) / ms
