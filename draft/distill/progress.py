"""How far a run is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """``done``: from 0 to 1 of ``phase``; ``detail``: a few figures for the one who watches."""

    phase: str
    done: float
    detail: str = ""
