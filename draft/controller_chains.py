"""How far a draft model's chain should go: what each choice would have gained with the chains of late."""

from __future__ import annotations

from collections.abc import Sequence

# Products of the drafter's own confidences, under which a chain may be ended.
LEAST_SURVIVALS = (0.03, 0.15, 0.35, 0.6)


class ChainChoice:
    """The values of all pairs of a least survival and a limit, smoothed over chains; 0 is the value of no chain.

    A chain that was drafted tells not only of the pair it was drafted with: it would have been the same up to where
    another pair had ended it, and beyond its end it is carried on as it went. So every chain moves every value.
    """

    def __init__(self, max_draft_tokens: int, like: ChainChoice | None = None) -> None:
        self._max = max_draft_tokens
        self.num_chains = 0  # learned from
        self._values: list[float] = [0.0] * (len(LEAST_SURVIVALS) * max_draft_tokens)
        if like is not None:
            self._values = list(like._values)

    @property
    def value(self) -> float:
        """Tokens that the best pair gains a step."""
        return max(self._values, default=0.0)

    def best(self) -> tuple[int, float]:
        """(limit, least survival)."""
        index = self._values.index(max(self._values))
        return index % self._max + 1, LEAST_SURVIVALS[index // self._max]

    def gains(
        self,
        claims: Sequence[float],
        survivals: Sequence[float],
        row_costs: Sequence[float],
        draft_costs: Sequence[float],
    ) -> list[float]:
        """What every pair had gained with one chain, in tokens, all costs taken off.

        ``claims``: for each of ``max_draft_tokens`` tokens the product of the drafter's confidences so far.
        ``survivals``: the same of calibrated probabilities.
        ``row_costs``: [n]: what n tokens' rows cost; ``draft_costs``: [n]: n steps of the draft; in tokens.
        """
        best_beginnings = [0.0]  # [n]: of the first n tokens
        gained = best = 0.0
        for num_tokens, survival in enumerate(survivals, 1):
            gained += survival
            if gained - row_costs[num_tokens] > best:
                best = gained - row_costs[num_tokens]
            best_beginnings.append(best)
        whole = [best - cost for best, cost in zip(best_beginnings, draft_costs, strict=True)]
        gains: list[float] = []
        for least in LEAST_SURVIVALS:
            length = 0
            while length < self._max and claims[length] >= least:
                length += 1
            gains += whole[1 : length + 1]
            if length < self._max:  # found out by computing one more, which is left out
                gains += [best_beginnings[length] - draft_costs[length + 1]] * (self._max - length)
        return gains

    def learn(self, gains: Sequence[float], share: float) -> None:
        """Move every value by ``share`` towards what its pair had gained."""
        self.num_chains += 1
        self._values = [value + share * (gain - value) for value, gain in zip(self._values, gains, strict=True)]
