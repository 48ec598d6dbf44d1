"""How far a draft model's chain should go: what each choice would have gained with the chains of late."""

from __future__ import annotations

from collections.abc import Sequence

# Products of the drafter's own confidences, under which a chain may be ended.
LEAST_SURVIVALS = (0.03, 0.12, 0.25, 0.4, 0.6)


class ChainChoice:
    """The values of all pairs of a least survival and a limit, smoothed over chains; 0 is the value of no chain.

    A chain that was drafted tells not only of the pair it was drafted with: it would have been the same up to where
    another pair had ended it, and beyond its end it is carried on as it went. So every chain moves every value.
    """

    def __init__(self, max_draft_tokens: int, like: ChainChoice | None = None) -> None:
        self._max = max_draft_tokens
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

    def learn(
        self,
        claims: Sequence[float],
        survivals: Sequence[float],
        row_costs: Sequence[float],
        draft_costs: Sequence[float],
        share: float,
    ) -> None:
        """Move every value by ``share`` towards what its pair had gained with this chain.

        ``claims``: for each of ``max_draft_tokens`` tokens the product of the drafter's confidences so far.
        ``survivals``: the same of calibrated probabilities.
        ``row_costs``: [n]: what n tokens' rows cost; ``draft_costs``: [n]: n steps of the draft; in tokens.
        """
        gains = [0.0]  # [n]: of the best beginning of the first n tokens
        gained = best = 0.0
        for num_tokens, survival in enumerate(survivals, 1):
            gained += survival
            best = max(best, gained - row_costs[num_tokens])
            gains.append(best)
        values, keep, index = self._values, 1.0 - share, 0
        for least in LEAST_SURVIVALS:
            net = 0.0
            ended = False
            for limit in range(1, self._max + 1):
                if not ended:
                    ended = claims[limit - 1] < least  # found out by computing this token, which is left out then
                    net = share * (gains[limit - 1 if ended else limit] - draft_costs[limit])
                values[index] = keep * values[index] + net
                index += 1

    def fade(self, other: ChainChoice, share: float) -> None:
        """Move every value by ``share`` towards the other's."""
        self._values = [
            mine + share * (theirs - mine) for mine, theirs in zip(self._values, other._values, strict=True)
        ]
