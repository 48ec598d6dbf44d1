"""What passes cost: read between the measured points, kept in the cache, and of use to the batcher."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_runs import ScriptedDrafter, greedy, make_engine, run, run_one

from outrider.kernels.operations import load_operations
from outrider.server.engine.cost_table import CostTable, Curve, cached_cost_table, smoothed
from outrider.server.engine.profile import Shape, profile, profile_key, row_sizes, shapes_to_measure
from outrider.server.engine.settings import EngineSettings
from outrider.verify.checkpoint.checkpoint import open_checkpoint
from outrider.verify.transformer import Transformer

PROMPT = list(range(3, 103))
KEY: dict[str, str | int] = {"model": "m", "num_threads": 2}
NOTHING = Curve((0,), (0.0,))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, where tables are kept in ``costs``."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "costs"


def table(*ms_of_rows: float) -> CostTable:
    """Passes of 1, 2, ... rows cost so much, and all else nothing."""
    sizes = tuple(range(1, len(ms_of_rows) + 1))
    return CostTable(Curve(sizes, ms_of_rows), NOTHING, NOTHING, NOTHING, chunk_rows=1)


TABLE = CostTable(
    forward=Curve((1, 4, 64), (4.0, 5.5, 40.0)),
    logits=Curve((1, 4), (1.0, 2.0)),
    attention=Curve((0, 1000), (0.0, 3.0)),
    chunk_attention=Curve((0, 1000), (0.0, 18.0)),
    chunk_rows=16,
)


class Measuring:
    """Gives the table, and counts how often it was asked."""

    def __init__(self, result: CostTable = TABLE) -> None:
        self.num_calls = 0
        self._result = result

    def __call__(self) -> CostTable:
        self.num_calls += 1
        return self._result


def test_a_measured_size_costs_what_was_measured_and_one_between_lies_between() -> None:
    curve = Curve((1, 4, 64), (4.0, 5.5, 40.0))
    assert [curve(size) for size in (1, 4, 64)] == [4.0, 5.5, 40.0]
    assert curve(2) == pytest.approx(4.5)
    assert curve(34) == pytest.approx(22.75)


def test_before_the_first_size_a_curve_is_flat_and_beyond_the_last_it_goes_on() -> None:
    curve = Curve((2, 8, 32, 64), (4.0, 5.0, 20.0, 36.0))
    assert curve(0) == curve(1) == 4.0
    assert curve(128) == pytest.approx(36.0 + 64 * 16.0 / 32)  # as from 32 to 64
    assert Curve((10,), (3.0,))(25) == pytest.approx(7.5)
    assert NOTHING(10**6) == 0.0


@pytest.mark.parametrize(
    ("sizes", "ms"),
    [
        ((), ()),
        ((1, 2), (1.0,)),
        ((2, 1), (1.0, 2.0)),
        ((1, 2), (2.0, 1.0)),
        ((1,), (float("nan"),)),
        ((1, 2), (1.0, float("inf"))),
        ((1,), (-1.0,)),
        ((-1,), (1.0,)),
    ],
)
def test_points_that_are_no_curve_are_refused(sizes: tuple[int, ...], ms: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="sizes"):
        Curve(sizes, ms)


def test_smoothing_is_the_nearest_that_never_descends() -> None:
    assert smoothed([1, 2, 5], [1, 1, 1]) == [1, 2, 5]
    assert smoothed([1, 4, 2, 5], [1, 1, 1, 1]) == [1, 3, 3, 5]
    assert smoothed([3, 0], [2, 1]) == [2, 2]  # by their weights
    rng = random.Random(0)
    for _ in range(50):
        values = [rng.random() for _ in range(8)]
        result = smoothed(values, [1.0] * 8)
        assert result == sorted(result)
        distance = sum((a - b) ** 2 for a, b in zip(values, result, strict=True))
        for _ in range(200):  # no other that never descends is nearer
            other = sorted(value + rng.gauss(0, 0.1) for value in result)
            assert distance <= sum((a - b) ** 2 for a, b in zip(values, other, strict=True))


def test_a_curve_is_fitted_through_medians_in_milliseconds_and_never_below_nothing() -> None:
    curve = Curve.fitted({8: [0.004, 0.9, 0.005], 1: [0.002], 0: [-0.5]})
    assert curve == Curve((0, 1, 8), (0.0, 2.0, 5.0))


def test_a_pass_is_the_sum_of_its_layers_its_head_and_its_contexts() -> None:
    assert TABLE.pass_ms(1) == pytest.approx(5.0)
    assert TABLE.pass_ms(64, num_logit_rows=0) == pytest.approx(40.0)
    assert TABLE.pass_ms(64, num_logit_rows=1) == pytest.approx(41.0)
    assert TABLE.pass_ms(1, num_context_tokens=500) == pytest.approx(6.5)
    # One row reads the context; each of the 15 others of a chunk computes with it, 1 ms for a thousand tokens.
    assert TABLE.attention_ms(1, 1000) == pytest.approx(3.0)
    assert TABLE.attention_ms(5, 1000) == pytest.approx(7.0)
    assert TABLE.attention_ms(16, 1000) == pytest.approx(18.0)
    assert TABLE.attention_ms(0, 1000) == TABLE.attention_ms(5, 0) == 0.0


def test_more_rows_or_more_context_never_cost_less() -> None:
    costs = [[TABLE.pass_ms(rows, num_context_tokens=n) for n in range(0, 3000, 100)] for rows in range(1, 100)]
    assert (np.diff(costs, axis=0) >= 0).all()
    assert (np.diff(costs, axis=1) >= 0).all()


def test_a_table_is_measured_once_and_kept(cache: Path) -> None:
    measure = Measuring()
    assert cached_cost_table(KEY, measure) == cached_cost_table(dict(reversed(KEY.items())), measure) == TABLE
    assert measure.num_calls == 1
    assert len(list(cache.iterdir())) == 1, "something is left beside the table"


@pytest.mark.parametrize("change", [{"model": "other"}, {"num_threads": 3}, {"more": 1}])
def test_what_depends_on_something_else_is_measured_anew(change: dict[str, str | int]) -> None:
    measure = Measuring()
    cached_cost_table(KEY, measure)
    cached_cost_table(KEY | change, measure)
    assert measure.num_calls == 2


def test_after_a_week_a_table_is_measured_again(cache: Path) -> None:
    measure = Measuring()
    cached_cost_table(KEY, measure)
    (path,) = cache.iterdir()
    for age_days, num_calls in ((6, 1), (8, 2), (0, 2)):
        then = time.time() - age_days * 24 * 3600
        if age_days:
            os.utime(path, (then, then))
        cached_cost_table(KEY, measure)
        assert measure.num_calls == num_calls


def damage_as(path: Path) -> Iterator[tuple[str, Any]]:
    kept = json.loads(path.read_bytes())
    yield "empty", lambda: path.write_bytes(b"")
    yield "cut", lambda: path.write_bytes(json.dumps(kept).encode()[:-20])
    yield "not text", lambda: path.write_bytes(b"\xff\x00" * 100)
    yield "no object", lambda: path.write_text("[1, 2]")
    yield "deep", lambda: path.write_text("[" * 100_000)
    yield "of another key", lambda: path.write_text(json.dumps(kept | {"key": {}}))
    for name, value in {
        "descending": {"sizes": [1, 2], "ms": [2.0, 1.0]},
        "NaN": {"sizes": [1], "ms": [float("nan")]},
        "beyond floats": {"sizes": [1], "ms": [10**400]},
        "of words": {"sizes": ["one"], "ms": [1.0]},
        "missing": None,
    }.items():
        changed = kept | {"table": kept["table"] | {"forward": value}}
        yield name, lambda changed=changed: path.write_text(json.dumps(changed))
    yield "no chunk", lambda: path.write_text(json.dumps(kept | {"table": kept["table"] | {"chunk_rows": 0}}))

    def directory() -> None:
        path.unlink()
        path.mkdir()

    yield "a directory", directory


def test_a_damaged_file_is_measured_again_and_replaced(cache: Path) -> None:
    measure = Measuring()
    cached_cost_table(KEY, measure)
    (path,) = cache.iterdir()
    for name, damage in damage_as(path):
        damage()
        before = measure.num_calls
        assert cached_cost_table(KEY, measure) == TABLE, name
        assert measure.num_calls == before + 1, name
        if name != "a directory":
            assert cached_cost_table(KEY, measure) == TABLE, name
            assert measure.num_calls == before + 1, f"{name}: not replaced"
    assert [other for other in cache.iterdir() if other != path] == [], "something is left beside the table"


def test_a_cache_that_cannot_be_written_is_done_without(cache: Path) -> None:
    cache.parent.write_text("a file where the cache directory should be")
    measure = Measuring()
    assert cached_cost_table(KEY, measure) == TABLE
    assert cached_cost_table(KEY, measure) == TABLE
    assert measure.num_calls == 2


def test_the_cache_does_not_grow_for_ever(cache: Path) -> None:
    for model in range(60):
        cached_cost_table(KEY | {"model": model}, Measuring())
    assert len(list(cache.iterdir())) <= 32
    latest = Measuring()
    cached_cost_table(KEY | {"model": 59}, latest)
    assert latest.num_calls == 0


def test_the_rows_measured_are_dense_where_drafts_are_and_reach_the_largest_pass() -> None:
    assert row_sizes(128) == [1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128]
    assert row_sizes(1) == [1]
    assert row_sizes(20) == [1, 2, 3, 4, 5, 6, 8, 12, 16, 20]
    for max_rows in range(1, 300):
        sizes = row_sizes(max_rows)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == max_rows


def test_the_shapes_measured_first_are_the_ends_and_all_fit_the_context() -> None:
    shapes = shapes_to_measure(128, 8192)
    assert shapes[:4] == [Shape(1), Shape(16), Shape(1, 8176), Shape(16, 8176)]
    assert {Shape(128), Shape(1, 1024), Shape(16, 4096)} <= set(shapes)
    assert shapes_to_measure(1, 1) == [Shape(1)]
    for max_rows, max_tokens in ((1, 100), (300, 16), (8, 9), (128, 1025)):
        shapes = shapes_to_measure(max_rows, max_tokens)
        assert len(shapes) == len(set(shapes))
        assert all(1 <= s.num_rows <= max_rows and s.num_rows + s.num_context_tokens <= max_tokens for s in shapes)


@pytest.mark.parametrize("budget_s", [0.0, 0.2])
@pytest.mark.parametrize(("max_rows", "max_context"), [(1, 16), (5, 1024), (32, 64), (128, 1024)])
def test_a_profile_is_a_table_however_little_time_there_is(
    tiny_model: Path, max_rows: int, max_context: int, budget_s: float
) -> None:
    with torch.no_grad():
        model = Transformer(open_checkpoint(tiny_model), load_operations("reference"), max_context)
        costs = profile(model, page_size=16, max_rows=max_rows, max_context=max_context, budget_s=budget_s)
    assert costs.forward.sizes[0] == 1
    assert 0 < costs.pass_ms(1) <= costs.pass_ms(max_rows) <= costs.pass_ms(max_rows, num_context_tokens=max_context)
    assert str(costs).startswith("a pass of 1 row ")


def test_a_profile_key_names_all_that_a_cost_depends_on() -> None:
    settings = EngineSettings("m", "m", kernels="reference", num_threads=1).resolved()
    key = profile_key(settings, "fingerprint", 1024)
    others = [
        profile_key(settings, "another", 1024),
        profile_key(settings, "fingerprint", 2048),
        *(
            profile_key(replace(settings, **change), "fingerprint", 1024)
            for change in ({"num_threads": 2}, {"page_size": 32}, {"max_step_tokens": 64})
        ),
        profile_key(replace(settings, max_running=8, max_draft_tokens=2, model_name="n"), "fingerprint", 1024),
    ]
    assert [other == key for other in others] == [False] * 5 + [True]


def test_a_profiled_engine_has_all_its_pages_and_gives_the_same_answers(tiny_model: Path, cache: Path) -> None:
    engine = make_engine(tiny_model, profile=True)
    engine.check_integrity()
    assert engine.stats.num_free_pages == engine.stats.num_pages
    assert not engine._storage.layers("target")[:, :, 0].any(), "the null page was written"
    assert engine.cost_table is not None
    plain = run_one(make_engine(tiny_model, drafter="none"), greedy(PROMPT)).token_ids
    assert run_one(engine, greedy(PROMPT)).token_ids == plain
    # The next start reads what this one measured.
    assert make_engine(tiny_model, profile=True).cost_table == engine.cost_table
    assert len(list(cache.iterdir())) == 1
    assert make_engine(tiny_model, profile=True, page_size=32).cost_table != engine.cost_table


def test_without_a_profile_nothing_is_measured_or_kept(tiny_model: Path, cache: Path) -> None:
    assert make_engine(tiny_model, profile=False).cost_table is None
    assert not cache.exists()


def test_rows_that_cost_nothing_are_all_drafted_and_rows_at_full_price_are_only_tried(tiny_model: Path) -> None:
    plain = run_one(make_engine(tiny_model, drafter="none"), greedy(PROMPT, ignore_eos=True)).token_ids
    # In hundreds of milliseconds, so that what a step costs beside its pass does not matter.
    free, full_price = table(*[100.0] * 100), table(*range(100, 10_100, 100))
    for costs, fewest_steps, most_steps in ((free, 5, 6), (full_price, 25, 32)):
        engine = make_engine(tiny_model, ScriptedDrafter({tuple(PROMPT): plain}), costs)
        answer = run_one(engine, greedy(PROMPT, ignore_eos=True))
        assert answer.token_ids == plain
        assert fewest_steps <= answer.num_steps <= most_steps, costs


def test_many_sequences_share_what_a_pass_may_cost(tiny_model: Path) -> None:
    prompts = [[*PROMPT, 100 + i] for i in range(4)]
    plain_engine = make_engine(tiny_model, drafter="none")
    plain = {str(i): run_one(plain_engine, greedy(p, ignore_eos=True)).token_ids for i, p in enumerate(prompts)}
    drafter = ScriptedDrafter({tuple(prompt): plain[str(i)] for i, prompt in enumerate(prompts)})
    costs = table(*[1.0] * 12, *[3.0] * 100)  # 12 rows: 2 drafted tokens for each of 4
    engine = make_engine(tiny_model, drafter, costs, max_step_tokens=512)
    answers = run(engine, [greedy(prompt, str(i), ignore_eos=True) for i, prompt in enumerate(prompts)])
    assert {name: answer.token_ids for name, answer in answers.items()} == plain
    assert {answer.num_steps for answer in answers.values()} == {1 + -(-31 // 3)}
