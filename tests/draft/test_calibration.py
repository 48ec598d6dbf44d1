"""Calibrated confidences against worlds whose probabilities are known."""

from __future__ import annotations

import math
import random

import pytest

from outrider.draft.calibration import Calibration, Turn


def distorted(probability: float, sharpness: float, shift: float) -> float:
    return 1 / (1 + math.exp(-(sharpness * math.log(probability / (1 - probability)) + shift)))


@pytest.mark.parametrize(("sharpness", "shift"), [(1.0, 0.0), (2.0, 0.5), (0.5, -0.5), (1.0, 1.5)])
def test_what_a_drafter_claims_becomes_what_it_keeps(sharpness: float, shift: float) -> None:
    rng, calibration, turn = random.Random(0), Calibration(), Turn()
    for step in range(6000):
        truth = rng.uniform(0.05, 0.95)
        turn.advance(step)
        calibration.observe(distorted(truth, sharpness, shift), 0, turn, rng.random() < truth)
    # The mean over turns: where this one stands at the end is chance.
    for truth in (0.15, 0.3, 0.5, 0.7, 0.85):
        average = calibration.probability(distorted(truth, sharpness, shift), 0, Turn())
        assert average == pytest.approx(truth, abs=0.1)


def test_later_positions_are_told_apart() -> None:
    rng, calibration, turn = random.Random(1), Calibration(), Turn()
    for step in range(4000):
        turn.advance(step)
        for position, truth in enumerate((0.9, 0.6)):
            calibration.observe(0.75, position, turn, rng.random() < truth)
    first, second = (calibration.probability(0.75, position, Turn()) for position in range(2))
    assert first > second + 0.15


def test_a_text_of_its_own_kind_is_noticed_within_ten_tokens_and_forgotten_in_time() -> None:
    calibration, turn = Calibration(), Turn()
    usual = calibration.probability(0.8, 0, turn)
    for step in range(10):
        turn.advance(step)
        calibration.observe(0.8, 0, turn, accepted=False)
    noticed = calibration.probability(0.8, 0, turn)
    assert noticed < 0.5 * usual
    turn.advance(400)
    assert noticed + 0.1 < calibration.probability(0.8, 0, turn) < usual + 0.05
    assert calibration.probability(0.8, 0, Turn()) > noticed  # others are told less


@pytest.mark.parametrize("confidence", [0.0, 1.0, -1.0, 2.0, math.nan, math.inf, -math.inf])
def test_any_confidence_gives_a_probability(confidence: float) -> None:
    calibration, turn = Calibration(), Turn()
    for step in range(50):
        turn.advance(step)
        calibration.observe(confidence, step % 12, turn, accepted=step % 2 == 0)
    assert 0 < calibration.probability(confidence, 3, turn) < 1


def test_survivals_are_the_running_products() -> None:
    calibration, turn = Calibration(), Turn()
    confidences = [0.9, 0.2, 0.99, 0.6, 0.5, 0.7, 0.8, 0.9, 0.3, 0.95]
    expected = math.prod(
        calibration.probability(confidence, position, turn) for position, confidence in enumerate(confidences)
    )
    survivals = calibration.survivals(confidences, turn)
    assert survivals[-1] == pytest.approx(expected, rel=1e-9)
    assert survivals == sorted(survivals, reverse=True)
