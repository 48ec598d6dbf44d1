"""A draft model in the target's pages: its rows are never lost, and it changes nothing but the number of steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import Answer, greedy, make_engine, run, run_one, sampled
from logit_tap import LogitTap
from tiny_model import byte_tokenizer, save_tiny_model, tiny_llama_config

from outrider.draft.hybrid import PagedHybridDrafter
from outrider.draft.model import ModelDrafter
from outrider.server.engine.engine import Engine
from outrider.verify.checkpoint.config import UnsupportedCheckpoint

EXACT = {"draft_quantize": "none"}
KERNELS: list[dict[str, Any]] = [{"kernels": "reference"}, {"kernels": "cpu", **EXACT}]


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(3, 259, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = [prompt(seed, length) for seed, length in enumerate([5, 16, 33, 64, 100, 7, 130, 48])]


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another shape, with the same tokens, which agrees with the tiny model by chance only."""
    config = tiny_llama_config(hidden_size=32, head_dim=16, num_attention_heads=2, num_key_value_heads=1)
    return save_tiny_model(tmp_path_factory.mktemp("other_model"), config, seed=5)


def self_drafted(path: Path, **settings: Any) -> Engine:
    return make_engine(path, drafter="model", draft_model_path=str(path), **settings)


def drafter_of(engine: Engine) -> ModelDrafter:
    hybrid = engine._drafter._drafter
    assert isinstance(hybrid, PagedHybridDrafter)
    assert isinstance(hybrid._model, ModelDrafter)
    return hybrid._model


def assert_all_accepted(answers: dict[str, Answer], max_draft_tokens: int, max_tokens: int) -> None:
    for answer in answers.values():
        assert answer.num_accepted == answer.num_draft_tokens > 0
        # The prefill's own token, then as many as a draft can give.
        assert answer.num_steps == 1 + -(-(max_tokens - 1) // (max_draft_tokens + 1))


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: kernels["kernels"])
@pytest.mark.parametrize("max_draft_tokens", range(1, 9))
def test_the_target_as_its_own_draft_is_always_right(
    tiny_model: Path, kernels: dict[str, Any], max_draft_tokens: int
) -> None:
    engine = self_drafted(tiny_model, max_draft_tokens=max_draft_tokens, page_size=4, **kernels)
    answers = run(engine, [greedy(PROMPTS[3], max_tokens=120, ignore_eos=True)])
    assert_all_accepted(answers, max_draft_tokens, 120)
    plain = run_one(make_engine(tiny_model, drafter="none", **kernels), greedy(PROMPTS[3], "r", 120, ignore_eos=True))
    assert answers["r"].token_ids == plain.token_ids


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: kernels["kernels"])
@pytest.mark.parametrize("max_step_tokens", [16, 24, 512])
@pytest.mark.parametrize("max_running", [1, 4, 8])
def test_it_stays_right_in_batches_in_chunks_and_after_prefix_hits(
    tiny_model: Path, kernels: dict[str, Any], max_running: int, max_step_tokens: int
) -> None:
    engine = self_drafted(tiny_model, max_running=max_running, max_step_tokens=max_step_tokens, **kernels)
    questions = [greedy(token_ids, str(i), 24, ignore_eos=True) for i, token_ids in enumerate(PROMPTS)]
    first = run(engine, questions)
    second = run(engine, questions)
    assert sum(answer.num_cached_tokens for answer in second.values()) > 200, "no prefix was found: vacuous"
    for answers in (first, second):
        assert sum(answer.num_draft_tokens for answer in answers.values()) > 100
        assert all(answer.num_accepted == answer.num_draft_tokens for answer in answers.values())
    assert [a.token_ids for a in first.values()] == [a.token_ids for a in second.values()]


def test_it_stays_right_on_an_answer_found_as_a_prefix(tiny_model: Path) -> None:
    engine = self_drafted(tiny_model, kernels="reference")
    first = run_one(engine, greedy(PROMPTS[4], max_tokens=40, ignore_eos=True))
    turn = PROMPTS[4] + first.token_ids + [5, 6, 7]
    warm = run_one(engine, greedy(turn, ignore_eos=True))
    assert warm.num_cached_tokens > len(PROMPTS[4])
    assert warm.num_accepted == warm.num_draft_tokens > 0


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: kernels["kernels"])
def test_it_stays_right_after_preemptions(tiny_model: Path, kernels: dict[str, Any]) -> None:
    # 40 sequences that soon need a second page each, and fewer pages than that.
    engine = self_drafted(
        tiny_model,
        kv_cache_mib=1,
        kv_cache_dtype="f32",
        page_size=64,
        max_running=40,
        max_step_tokens=512,
        max_context=512,
        **kernels,
    )
    questions = [greedy(prompt(seed, 60 - seed % 7), str(seed), 20, ignore_eos=True) for seed in range(40)]
    answers = run(engine, questions)
    assert engine.stats.num_preemptions > 0, "the pool was never short: vacuous"
    assert sum(answer.num_draft_tokens for answer in answers.values()) > 200
    assert all(answer.num_accepted == answer.num_draft_tokens for answer in answers.values())


@pytest.mark.parametrize("page_size", [1, 2, 5])
def test_it_stays_right_where_a_preempted_sequence_finds_all_its_pages_again(tiny_model: Path, page_size: int) -> None:
    """Then only the last token is computed anew, whose row the draft had computed in a page that is gone."""
    engine = self_drafted(
        tiny_model,
        kv_cache_mib=1,
        page_size=page_size,
        max_step_tokens=512,
        max_draft_tokens=3,
        kernels="cpu",
        kv_cache_dtype="f32",
        **EXACT,
    )
    questions = [greedy(prompt(seed, 30 - seed), str(seed), 120, ignore_eos=True) for seed in range(16)]
    answers = run(engine, questions)
    assert engine.stats.num_preemptions > 5
    assert all(answer.num_accepted == answer.num_draft_tokens > 0 for answer in answers.values())


def test_pages_count_what_the_draft_keeps_in_them(tiny_model: Path) -> None:
    # 2 layers of 2 KV heads of 12 floats, keys and values, twice; one page is never used.
    engine = self_drafted(tiny_model, kv_cache_mib=1, page_size=16, kernels="reference")
    assert engine.stats.num_pages == 2**20 // (16 * 2 * 2 * 2 * 12 * 4 * 2) - 1
    alone = make_engine(tiny_model, kv_cache_mib=1, page_size=16, kernels="reference")
    assert alone.stats.num_pages == 2**20 // (16 * 2 * 2 * 2 * 12 * 4) - 1


class Altered:
    """The model's own drafts, with the token at ``place`` made wrong in every ``period``-th draft."""

    def __init__(self, drafter: ModelDrafter, place: int, period: int) -> None:
        self._drafter, self._place, self._period, self._num_drafts = drafter, place, period, 0
        self.num_spoilt = 0
        self.num_lost = 0  # tokens that cannot be accepted for it

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def propose(self, requests: Any) -> Any:
        drafts = self._drafter.propose(requests)
        for draft in drafts:
            self._num_drafts += 1
            if self._num_drafts % self._period == 0 and len(draft.token_ids) > self._place:
                wrong = list(draft.token_ids)
                wrong[self._place] = (wrong[self._place] + 1) % 259
                object.__setattr__(draft, "token_ids", tuple(wrong))
                self.num_spoilt += 1
                self.num_lost += len(wrong) - self._place
        return drafts


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: kernels["kernels"])
@pytest.mark.parametrize("place", [0, 1, 5, 7])
def test_after_a_rejection_it_is_right_again(tiny_model: Path, kernels: dict[str, Any], place: int) -> None:
    engine = self_drafted(tiny_model, page_size=4, **kernels)
    altered = Altered(drafter_of(engine), place, period=3)
    engine._drafter._drafter = altered  # type: ignore[assignment]
    answer = run_one(engine, greedy(PROMPTS[2], max_tokens=200, ignore_eos=True))
    plain = run_one(make_engine(tiny_model, drafter="none", **kernels), greedy(PROMPTS[2], "r", 200, ignore_eos=True))
    assert answer.token_ids == plain.token_ids
    assert altered.num_spoilt >= 5
    # Each spoilt draft loses the wrong token and those after it, and no other draft loses any.
    assert answer.num_draft_tokens - answer.num_accepted == altered.num_lost
    assert answer.num_accepted > 120


@pytest.mark.parametrize("page_size", [1, 4])
def test_what_a_preempted_sequence_leaves_behind_is_not_counted_on(tiny_model: Path, page_size: int) -> None:
    engine = self_drafted(tiny_model, page_size=page_size, max_draft_tokens=3, kernels="reference")
    altered = Altered(drafter_of(engine), place=0, period=2)
    engine._drafter._drafter = altered  # type: ignore[assignment]
    engine.add_request(greedy(PROMPTS[2], max_tokens=80, ignore_eos=True))
    step = num_draft_tokens = num_accepted = 0
    while engine.has_work:
        for output in engine.step():
            num_draft_tokens += output.num_draft_tokens
            num_accepted += output.num_accepted
        step += 1
        if step % 3 == 0 and engine._batcher.running:
            engine.rest()
            engine._batcher._preempt(engine._batcher.running[0])
            cache = engine._storage.layers("draft")
            cache[:, :, engine._pool._free] = torch.randn(cache[:, :, engine._pool._free].shape)
    assert engine.stats.num_preemptions > 8
    assert num_draft_tokens - num_accepted == altered.num_lost > 10


@pytest.mark.parametrize("kernels", KERNELS, ids=lambda kernels: kernels["kernels"])
def test_sampled_drafts_of_the_target_itself_are_always_right(tiny_model: Path, kernels: dict[str, Any]) -> None:
    engine = self_drafted(tiny_model, **kernels)
    questions = [
        sampled(token_ids, str(i), 40, seed=i, temperature=0.9, ignore_eos=True) for i, token_ids in enumerate(PROMPTS)
    ]
    answers = run(engine, questions)
    plain = run(make_engine(tiny_model, drafter="none", **kernels), questions)
    assert [a.token_ids for a in answers.values()] == [a.token_ids for a in plain.values()]
    assert sum(a.num_draft_tokens for a in answers.values()) > 100
    assert all(a.num_accepted == a.num_draft_tokens for a in answers.values())


def test_rows_of_draft_and_target_are_counted_apart(tiny_model: Path) -> None:
    engine = self_drafted(tiny_model, kernels="reference", max_draft_tokens=4)
    run_one(engine, greedy(PROMPTS[3], max_tokens=41, ignore_eos=True))
    engine.rest()
    counts = drafter_of(engine).counts
    # The last token of an answer is never computed, by neither.
    assert counts.num_settled == len(PROMPTS[3]) + 40
    # 8 drafts of 4 tokens, the last of which is not computed.
    assert counts.num_chained == 8 * 3


@pytest.mark.parametrize("kernels", [*KERNELS, {"kernels": "cpu", "draft_quantize": "int8"}], ids=str)
@pytest.mark.parametrize("settings", [{"max_running": 1}, {"max_running": 8, "max_step_tokens": 24, "page_size": 5}])
def test_a_draft_model_that_is_mostly_wrong_changes_no_bit(
    tiny_model: Path, other_model: Path, kernels: dict[str, Any], settings: dict[str, Any]
) -> None:
    plain = make_engine(tiny_model, drafter="none", **kernels)
    drafted = make_engine(
        tiny_model, drafter="model", draft_model_path=str(other_model), max_draft_tokens=5, **kernels, **settings
    )
    taps = LogitTap(plain), LogitTap(drafted)
    questions = [greedy(token_ids, str(i), 24) for i, token_ids in enumerate(PROMPTS)]
    questions += [sampled(token_ids, f"s{i}", 24, seed=i) for i, token_ids in enumerate(PROMPTS)]
    expected = run(plain, questions)
    for _ in range(2):  # the second time with prefixes
        answers = run(drafted, questions)
        assert {i: a.token_ids for i, a in answers.items()} == {i: a.token_ids for i, a in expected.items()}
        assert sum(a.num_draft_tokens for a in answers.values()) > 0
    taps[1].assert_same(taps[0])


@pytest.mark.parametrize("fails_in", ["observe", "settle", "begin", "extend", "propose", "release"])
def test_a_draft_model_that_fails_is_done_without(tiny_model: Path, fails_in: str) -> None:
    questions = [greedy(token_ids, str(i)) for i, token_ids in enumerate(PROMPTS)]
    engine = self_drafted(tiny_model, kernels="reference")

    class Failing(Altered):
        pass

    def fail(*_: object) -> None:
        raise RuntimeError("the draft model is broken")

    failing = Failing(drafter_of(engine), 0, 10**9)
    setattr(failing, fails_in, fail)
    engine._drafter._drafter = engine._drafter._paged = failing  # type: ignore[assignment]
    answers = run(engine, questions)
    expected = run(make_engine(tiny_model, drafter="none", kernels="reference"), questions)
    assert [a.token_ids for a in answers.values()] == [a.token_ids for a in expected.values()]


def test_a_draft_model_with_other_tokens_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    fewer = save_tiny_model(tmp_path / "fewer", tiny_llama_config(vocab_size=258))
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["abc"])
    tokenizer.save(str(fewer / "tokenizer.json"))
    with pytest.raises(UnsupportedCheckpoint, match="has 260 tokens and the target 259"):
        make_engine(tiny_model, drafter="model", draft_model_path=str(fewer), kernels="reference")


def test_a_draft_model_that_orders_its_tokens_otherwise_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    a, b = [name for name, i in vocab.items() if i in (100, 101)]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UnsupportedCheckpoint, match=r"token 100 is .* a smaller one of the same family"):
        make_engine(tiny_model, drafter="model", draft_model_path=str(other), kernels="reference")


def test_a_draft_model_must_be_named_where_none_comes_along(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match="none comes with Outrider"):
        make_engine(tiny_model, drafter="model", kernels="reference")
