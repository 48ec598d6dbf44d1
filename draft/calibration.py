"""How likely a guess is right: what its drafter says of it, corrected by what became of earlier guesses."""

from __future__ import annotations

import math
from collections.abc import Sequence

LOWEST_CONFIDENCE = 0.01
HIGHEST_CONFIDENCE = 0.9995
UNKNOWN_CONFIDENCE = 0.6  # stands in for a drafter that gives none

# All in log-odds. Confidences are corrected at knots one apart, and between two of them in proportion.
_LOWEST_KNOT = -5
_NUM_KNOTS = 14
_KNOT_VARIANCE = 0.6  # how far a drafter's own confidence is trusted before anything is known
_KNOT_DRIFT = 0.0005  # by which that variance grows with each observation
_NUM_POSITIONS = 8  # later ones share the last
_POSITION_VARIANCE = 0.05
_POSITION_DRIFT = 0.0002
# A text's own turn: half of it is forgotten in 40 steps, and it can change by about half a unit in five.
_MEMORY = 0.983
_TURN_VARIANCE = 0.9


class Turn:
    """By how much the guesses of one source are better (worse, below 0) for one text now than on average."""

    __slots__ = ("mean", "step", "variance")

    def __init__(self) -> None:
        self.mean = 0.0
        self.variance = 0.5 * _TURN_VARIANCE
        self.step = 0

    def advance(self, step: int) -> None:
        """Grow less certain with every step of the text since the last call: an Ornstein-Uhlenbeck process."""
        if step != self.step:
            kept = _MEMORY ** (step - self.step)
            self.step = step
            self.mean *= kept
            self.variance = _TURN_VARIANCE - (_TURN_VARIANCE - self.variance) * kept * kept


class Calibration:
    """Turns the confidences of one source into measured probabilities of acceptance.

    The log-odds that a token is accepted, where all before it are, are a sum of three parts: a function of the
    drafter's confidence and a function of the position in the draft, both shared by all texts, and the text's own
    ``Turn``. Each part has a mean and a variance; an observation moves each in proportion to its variance and makes
    it more certain, and time makes it less so: a Kalman filter with the logistic's slope for observation noise
    (West, Harrison & Migon 1985, dynamic generalised linear models), with the covariances left out. So what is
    known well moves slowly, what is new fast, and old observations fade.
    """

    def __init__(self) -> None:
        self._knots = [float(_LOWEST_KNOT + index) for index in range(_NUM_KNOTS)]
        self._knot_variances = [_KNOT_VARIANCE] * _NUM_KNOTS
        self._positions = [0.0] * _NUM_POSITIONS
        self._position_variances = [_POSITION_VARIANCE] * _NUM_POSITIONS

    def probability(self, confidence: float, position: int, turn: Turn) -> float:
        """That the token at ``position`` of a draft is accepted, where all before it are."""
        knot, share = _place(confidence)
        knots = self._knots
        log_odds = (1.0 - share) * knots[knot] + share * knots[knot + 1] + turn.mean
        log_odds += self._positions[min(position, _NUM_POSITIONS - 1)]
        # The mean over what the turn may be, nearly (MacKay 1992, the evidence framework applied to classification).
        return _probability(log_odds / math.sqrt(1.0 + math.pi / 8 * turn.variance))

    def survivals(self, confidences: Sequence[float], turn: Turn) -> list[float]:
        """Of each token of a chain, the probability that it and all before it are accepted."""
        knots, positions, mean = self._knots, self._positions, turn.mean
        doubt = 1.0 / math.sqrt(1.0 + math.pi / 8 * turn.variance)
        survival, survivals = 1.0, []
        for position, confidence in enumerate(confidences):  # as ``probability``, without the calls
            knot, share = _place(confidence)
            log_odds = knots[knot] + share * (knots[knot + 1] - knots[knot]) + mean
            log_odds += positions[position] if position < _NUM_POSITIONS else positions[-1]
            survival *= _probability(log_odds * doubt)
            survivals.append(survival)
        return survivals

    def observe(self, confidence: float, position: int, turn: Turn, accepted: bool) -> None:
        """A token was accepted, or was the first that was not: those after it tell nothing, and do not belong here."""
        knot, share = _place(confidence)
        position = min(position, _NUM_POSITIONS - 1)
        knots, variances, positions = self._knots, self._knot_variances, self._position_variances
        left, right = 1.0 - share, share
        left_gain, right_gain = left * variances[knot], right * variances[knot + 1]
        probability = _probability(left * knots[knot] + right * knots[knot + 1] + self._positions[position] + turn.mean)
        slope = probability * (1.0 - probability)
        uncertainty = left * left_gain + right * right_gain + positions[position] + turn.variance
        certainty = 1.0 / (1.0 + slope * uncertainty)
        step = certainty * ((1.0 if accepted else 0.0) - probability)
        shrink = slope * certainty
        knots[knot] += left_gain * step
        knots[knot + 1] += right_gain * step
        variances[knot] = min(_KNOT_VARIANCE, variances[knot] - shrink * left_gain * left_gain + left * _KNOT_DRIFT)
        variances[knot + 1] = min(
            _KNOT_VARIANCE, variances[knot + 1] - shrink * right_gain * right_gain + right * _KNOT_DRIFT
        )
        self._positions[position] += positions[position] * step
        positions[position] = min(
            _POSITION_VARIANCE, positions[position] - shrink * positions[position] ** 2 + _POSITION_DRIFT
        )
        turn.mean += turn.variance * step
        turn.variance -= shrink * turn.variance * turn.variance


def _place(confidence: float) -> tuple[int, float]:
    """The knot before a confidence, and how far towards the next it lies, 0 to 1."""
    if not confidence > LOWEST_CONFIDENCE:  # NaN too
        confidence = LOWEST_CONFIDENCE
    elif confidence > HIGHEST_CONFIDENCE:
        confidence = HIGHEST_CONFIDENCE
    place = math.log(confidence / (1.0 - confidence)) - _LOWEST_KNOT
    knot = int(place)
    return knot, place - knot


def _probability(log_odds: float) -> float:
    if log_odds > 6.0:
        return 0.9975
    return 1.0 / (1.0 + math.exp(-log_odds)) if log_odds > -30.0 else 0.0
