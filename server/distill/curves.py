"""The training as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outrider.draft.distill.training_state import CurvePoint
from outrider.server.bench.plot import load_matplotlib


def save_curves(points: Sequence[CurvePoint], title: str, path: Path) -> None:
    """Three panels over the steps: the loss, the share of right guesses by position, the acceptance length held out.

    Raises:
        PlotUnavailable: matplotlib is missing.
    """
    pyplot = load_matplotlib()
    training = [point for point in points if point.loss is not None]
    held_out = [point for point in points if point.loss is None]
    picture, (loss, shares, length) = pyplot.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    steps = [point.step for point in training]
    loss.plot(steps, [point.loss for point in training])
    loss.set_title("loss: share of the target's words that is lost")
    for position in range(max((len(point.accepted) for point in training), default=0)):
        trained = [point for point in training if len(point.accepted) > position]
        found = [point.accepted[position] for point in trained]
        shares.plot([point.step for point in trained], found, label=f"guess {position + 1}")
    shares.set_title("guesses that are the target's likeliest token")
    shares.legend()
    length.plot([point.step for point in held_out], [point.acceptance_length for point in held_out], marker="o")
    length.set_title("acceptance length, held out, greedy")
    for panel in (loss, shares, length):
        panel.set_xlabel("training step")
        panel.grid(alpha=0.3)
    picture.suptitle(title, fontsize="medium")
    picture.savefig(path, dpi=120)
    pyplot.close(picture)
