"""All that training needs to go on where it was, in one file: weights, optimizers, and how far it is."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Training at some moment. ``accepted``: of each chain position, how often the guess was what the target says.

    In training, that is the mean since the last point over all rows whose next token the draft has a word for; held
    out, over the chains that were right so far.
    """

    step: int
    seconds: float
    done: float  # of the training, 0 to 1
    loss: float | None  # None: held out
    accepted: tuple[float, ...]

    @property
    def acceptance_length(self) -> float:
        """Tokens a step would give with chains of this length."""
        survival, length = 1.0, 1.0
        for share in self.accepted:
            survival *= share
            length += survival
        return length


@dataclass(slots=True)
class TrainingProgress:
    """``seconds``: of training, over all runs; ``is_done``: whether the last step was the last."""

    step: int = 0
    seconds: float = 0.0
    num_tokens: int = 0
    is_done: bool = False
    points: list[CurvePoint] = field(default_factory=list)


def save_training_state(
    path: Path,
    weights: Mapping[str, Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    progress: TrainingProgress,
) -> None:
    """Write the file anew; until it is complete the old one stays.

    Raises:
        OSError: it cannot be written.
    """
    tensors = {f"weights.{name}": weight.detach() for name, weight in weights.items()}
    for number, optimizer in enumerate(optimizers):
        for place, values in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{number}.{place}.{key}": value for key, value in values.items()}
    unfinished = path.with_suffix(".unfinished")
    try:
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            unfinished,
            {"progress": json.dumps(asdict(progress))},
        )
    except SafetensorError as error:
        raise OSError(f"cannot write {unfinished}: {error}") from error
    os.replace(unfinished, path)


def load_weights(path: Path) -> tuple[dict[str, Tensor], TrainingProgress]:
    """The weights in a file of ``save_training_state``, and how far they are trained."""
    tensors, progress = _read(path)
    return {
        name.removeprefix("weights."): tensor for name, tensor in tensors.items() if name.startswith("weights.")
    }, progress


@torch.no_grad()
def load_training_state(
    path: Path, weights: Mapping[str, Tensor], optimizers: Sequence[torch.optim.Optimizer]
) -> TrainingProgress:
    """Bring weights and optimizers to where they were saved. They must be made as those that were saved."""
    tensors, progress = _read(path)
    for name, weight in weights.items():
        weight.copy_(tensors[f"weights.{name}"])
    for number, optimizer in enumerate(optimizers):
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            kind, _, rest = name.partition(".")
            if kind == "optimizer" and rest.startswith(f"{number}."):
                _, place, key = rest.split(".", 2)
                state.setdefault(int(place), {})[key] = tensor
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return progress


def _read(path: Path) -> tuple[dict[str, Tensor], TrainingProgress]:
    with safe_open(path, framework="pt") as file:
        fields: dict[str, Any] = json.loads(file.metadata()["progress"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    points = [CurvePoint(**{**point, "accepted": tuple(point["accepted"])}) for point in fields.pop("points")]
    return tensors, TrainingProgress(**fields, points=points)
