"""What a draft model costs is measured, kept with what a pass costs, and found again for the same draft only."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from engine_runs import make_engine
from tiny_model import save_tiny_model

from outrider.server.engine.cost_table import CostTable


def cost_table(path: Path, draft: Path) -> CostTable:
    engine = make_engine(path, drafter="model", draft_model_path=str(draft), profile=True, max_running=4)
    assert engine.cost_table is not None
    return engine.cost_table


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


def test_a_draft_model_is_measured_and_kept(tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    measured = cost_table(tiny_model, tiny_model)
    assert measured.draft_step is not None
    assert measured.draft_rows is not None
    assert measured.draft_step.sizes == measured.draft_rows.sizes == (1, 2, 4)  # sequences, no more than may run
    assert measured.draft_ms(1, 3) - measured.draft_ms(1, 1) == pytest.approx(2 * measured.draft_step(1))
    assert measured.draft_ms(4, 1) >= measured.draft_ms(1, 1) > 0
    caplog.clear()
    assert cost_table(tiny_model, tiny_model) == measured
    assert "Measured at an earlier start" in caplog.text
    assert "a token of a draft" in caplog.text
    caplog.clear()
    cost_table(tiny_model, save_tiny_model(tmp_path / "other", seed=9))
    assert "earlier start" not in caplog.text


def test_without_a_draft_model_drafts_cost_nothing(tiny_model: Path) -> None:
    table = make_engine(tiny_model, drafter="suffix", profile=True).cost_table
    assert table is not None
    assert table.draft_ms(8, 8) == 0.0
