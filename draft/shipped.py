"""The drafts that come with Outrider. No torch here: the command line looks too."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("drafts")  # one folder a draft, in the speculators format


@dataclass(frozen=True, slots=True)
class ShippedDraft:
    """A draft and the target it was made for. ``num_bytes``: of its weights."""

    path: Path
    kind: str  # such as eagle3
    target: str  # what its maker called it
    hidden_size: int  # the target's
    vocab_size: int  # the target's
    taps: tuple[int, ...]  # layers of the target that it reads
    num_bytes: int

    def fits(self, hidden_size: int, num_layers: int, vocab_size: int) -> bool:
        """Whether it can draft for such a target: the same model, in whatever form its weights are, or its kin."""
        return (self.hidden_size, self.vocab_size) == (hidden_size, vocab_size) and max(
            self.taps, default=0
        ) <= num_layers


def shipped_drafts(folder: Path = FOLDER) -> list[ShippedDraft]:
    """All there are, by name."""
    return [_read(config.parent) for config in sorted(folder.glob("*/config.json"))]


def shipped_draft(hidden_size: int, num_layers: int, vocab_size: int, folder: Path = FOLDER) -> ShippedDraft | None:
    """The draft for a target of this shape; None if there is none."""
    return next((draft for draft in shipped_drafts(folder) if draft.fits(hidden_size, num_layers, vocab_size)), None)


def _read(path: Path) -> ShippedDraft:
    config: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
    layer = config["transformer_layer_config"]
    return ShippedDraft(
        path,
        kind=config["speculators_model_type"],
        target=config["speculators_config"]["verifier"]["name_or_path"],
        hidden_size=config.get("target_hidden_size") or layer["hidden_size"],
        vocab_size=layer["vocab_size"],
        taps=tuple(config.get("eagle_aux_hidden_state_layer_ids") or ()),
        num_bytes=sum(file.stat().st_size for file in path.glob("*.safetensors")),
    )
