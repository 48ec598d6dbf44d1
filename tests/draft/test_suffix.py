"""The suffix drafter against a brute-force search, whatever the text and however it arrives."""

from __future__ import annotations

import gc
import itertools
import tracemalloc
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.draft.base import Draft, Drafter, DraftRequest
from outrider.draft.suffix import SuffixDrafter, SuffixDrafterConfig

TEXTS = st.lists(st.integers(0, 2), max_size=60)


def brute_force_match(token_ids: Sequence[int], min_match_tokens: int) -> tuple[int, int] | None:
    """(tokens, end) of the longest suffix that ended earlier too, the most recent of several."""
    last = len(token_ids) - 1
    best: tuple[int, int] | None = None
    for end in range(last):
        num_equal = 0
        while num_equal <= end and token_ids[end - num_equal] == token_ids[last - num_equal]:
            num_equal += 1
        if num_equal >= min_match_tokens and (best is None or num_equal >= best[0]):
            best = (num_equal, end)
    return best


def brute_force_draft(token_ids: Sequence[int], max_draft_tokens: int, config: SuffixDrafterConfig) -> tuple[int, ...]:
    match = brute_force_match(token_ids, config.min_match_tokens)
    if match is None:
        return ()
    num_tokens, end = match
    text = list(token_ids)
    for index in range(min(max_draft_tokens, int(num_tokens * config.draft_per_match))):
        text.append(text[end + 1 + index])
    return tuple(text[len(token_ids) :])


def propose(drafter: Drafter, max_draft_tokens: int, sequence_id: int = 1) -> tuple[int, ...]:
    (draft,) = drafter.propose([DraftRequest(sequence_id, max_draft_tokens)])
    assert draft.draft_probs is None
    return draft.token_ids


def follow(config: SuffixDrafterConfig, token_ids: Sequence[int]) -> SuffixDrafter:
    drafter = SuffixDrafter(config)
    drafter.begin(1, token_ids)
    return drafter


@settings(deadline=None, max_examples=300)
@given(TEXTS, st.integers(1, 4), st.sampled_from([0.3, 1.0, 2.5]), st.integers(0, 9))
def test_drafts_are_what_followed_the_longest_most_recent_match(
    text: list[int], min_match_tokens: int, draft_per_match: float, max_draft_tokens: int
) -> None:
    config = SuffixDrafterConfig(min_match_tokens, draft_per_match)
    assert propose(follow(config, text), max_draft_tokens) == brute_force_draft(text, max_draft_tokens, config)


@settings(deadline=None, max_examples=200)
@given(TEXTS, st.integers(1, 3), st.integers(0, 2**60))
def test_drafts_stay_right_while_tokens_come_and_drafts_are_asked_for_now_and_then(
    text: list[int], min_match_tokens: int, asks: int
) -> None:
    config = SuffixDrafterConfig(min_match_tokens)
    drafter = follow(config, ())
    for index, token_id in enumerate(text):
        drafter.extend(1, [token_id])
        if asks >> index & 1:
            assert propose(drafter, 8) == brute_force_draft(text[: index + 1], 8, config)


@settings(deadline=None, max_examples=200)
@given(TEXTS, st.lists(st.integers(0, 60), max_size=8), st.integers(4, 80))
def test_chunks_make_no_difference(text: list[int], cuts: list[int], max_tokens_indexed: int) -> None:
    config = SuffixDrafterConfig(max_tokens_indexed=max_tokens_indexed)
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    drafter = follow(config, text[: bounds[1]] if len(bounds) > 1 else text)
    for start, stop in itertools.pairwise(bounds[1:]):
        propose(drafter, 8)
        drafter.extend(1, text[start:stop])
    assert propose(drafter, 8) == propose(follow(config, text), 8)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.integers(4, 30))
def test_at_least_half_and_at_most_all_of_the_bound_is_remembered(text: list[int], max_tokens_indexed: int) -> None:
    config = SuffixDrafterConfig(max_tokens_indexed=max_tokens_indexed)
    shortest = min(len(text), max_tokens_indexed - max_tokens_indexed // 2 + 1)
    windows = [text[-size:] for size in range(shortest, min(len(text), max_tokens_indexed) + 1)]
    assert propose(follow(config, text), 8) in [brute_force_draft(window, 8, config) for window in windows]


def test_a_period_is_carried_on_past_the_end() -> None:
    drafter = follow(SuffixDrafterConfig(), [9, 1, 2, 3, 1, 2, 3, 1, 2])
    assert propose(drafter, 8) == (3, 1, 2, 3, 1)


def test_the_longest_match_wins_over_a_more_recent_one() -> None:
    drafter = follow(SuffixDrafterConfig(), [5, 1, 2, 7, 8, 1, 2, 6, 5, 1, 2])
    assert propose(drafter, 2) == (7, 8)


def test_of_equal_matches_the_most_recent_wins() -> None:
    drafter = follow(SuffixDrafterConfig(), [5, 1, 2, 7, 8, 1, 2, 6, 9, 1, 2])
    assert propose(drafter, 2) == (6, 9)


def test_longer_matches_draft_further() -> None:
    text = list(range(100, 120))
    config = SuffixDrafterConfig(min_match_tokens=2, draft_per_match=1.5)
    lengths = [len(propose(follow(config, [*text, *text[:matched]]), 8)) for matched in range(1, 8)]
    assert lengths == [0, 3, 4, 6, 7, 8, 8]


def confidences(token_ids: Sequence[int]) -> tuple[float, ...]:
    (draft,) = follow(SuffixDrafterConfig(), token_ids).propose([DraftRequest(1, 8)])
    assert len(draft.confidences) == len(draft.token_ids)
    return draft.confidences


def test_longer_matches_are_surer_and_a_guess_is_surer_the_more_came_true_before_it() -> None:
    text = list(range(100, 120))
    firsts = [confidences([*text, *text[:matched]])[0] for matched in range(1, 12)]
    assert firsts == sorted(firsts)
    assert 0.1 < firsts[0] < 0.3 < 0.75 < firsts[-1] < 1
    along = confidences([*text, *text[:8]])
    assert list(along) == sorted(along)


def test_what_followed_more_often_is_surer() -> None:
    agreeing = confidences([1, 7, 2, 1, 7, 3, 1, 7, 4, 1])[0]
    alone = confidences([5, 7, 2, 6, 7, 3, 1, 7, 4, 1])[0]
    differing = confidences([1, 8, 2, 1, 9, 3, 1, 7, 4, 1])[0]
    assert differing < alone < agreeing


def test_sequences_do_not_see_each_other() -> None:
    drafter = SuffixDrafter()
    drafter.begin(1, [1, 2, 3, 4])
    drafter.begin(2, [1, 2])
    assert drafter.propose([DraftRequest(2, 4), DraftRequest(1, 4)]) == [Draft(), Draft()]
    drafter.extend(1, [1, 2])
    nothing, found = drafter.propose([DraftRequest(2, 4), DraftRequest(1, 4)])
    assert nothing == Draft()
    assert (found.token_ids, found.source) == ((3, 4), "suffix")


class CountedToken(int):
    """A token id that counts how often it is looked at."""

    num_uses = 0

    def __eq__(self, other: object) -> bool:
        CountedToken.num_uses += 1
        return int(self) == other

    def __hash__(self) -> int:
        CountedToken.num_uses += 1
        return int.__hash__(self)


def fibonacci_word(num_tokens: int) -> list[int]:
    short, long = [0], [0, 1]
    while len(long) < num_tokens:
        short, long = long, long + short
    return long[:num_tokens]


NUM_TOKENS = 6000
HARD_TEXTS = {
    "one token": [0] * NUM_TOKENS,
    "a period": [0, 1, 0, 2] * (NUM_TOKENS // 4),
    "a period that breaks": ([0] * 59 + [1]) * (NUM_TOKENS // 60),
    "long runs that break": ([0] * 999 + [1]) * (NUM_TOKENS // 1000),
    "fibonacci": fibonacci_word(NUM_TOKENS),
    "pseudo-random bits": [int.bit_count(n * 2654435761 & 0x5A5A5) & 1 for n in range(NUM_TOKENS)],
    "runs, then the other": [0] * (NUM_TOKENS // 2) + [1, 0, 0] * (NUM_TOKENS // 6),
}


@pytest.mark.parametrize("text", HARD_TEXTS.values(), ids=HARD_TEXTS.keys())
def test_no_token_costs_more_than_a_constant(text: list[int]) -> None:
    config = SuffixDrafterConfig(max_tokens_indexed=1000, max_search_steps=50)
    drafter = follow(config, ())
    CountedToken.num_uses = 0
    for token_id in text:
        drafter.extend(1, [CountedToken(token_id)])
        propose(drafter, 8)
    # A search looks at no more than 50 pairs, twice with the look ahead; hashing an n-gram, dropping the oldest and
    # asking six other occurrences cost a few each.
    assert CountedToken.num_uses <= (2 * 50 + 36) * len(text)


def test_a_search_along_a_long_match_is_cut_short_and_uses_it() -> None:
    text = [CountedToken(token_id) for token_id in range(500)]
    drafter = follow(SuffixDrafterConfig(max_search_steps=50), text * 2)
    CountedToken.num_uses = 0
    draft = propose(drafter, 4)
    assert CountedToken.num_uses <= 2 * 50 + 7  # and the six others that are asked
    assert draft == (0, 1, 2, 3)


def test_a_search_that_is_cut_short_still_finds_a_match() -> None:
    text = [0, 1, 2, 3, *[9, 2, 3, 4] * 100, 0, 1, 2, 3]
    assert propose(follow(SuffixDrafterConfig(), text), 1) == (9,)
    assert propose(follow(SuffixDrafterConfig(max_search_steps=20), text), 1) == (4,)


def test_memory_is_bounded_and_given_back() -> None:
    config = SuffixDrafterConfig(max_tokens_indexed=2000)
    drafter = follow(config, ())
    tracemalloc.start()
    try:
        drafter.extend(1, range(2000))
        at_bound, _ = tracemalloc.get_traced_memory()
        for start in range(2000, 40_000, 100):
            drafter.extend(1, range(start, start + 100))
        later, _ = tracemalloc.get_traced_memory()
        drafter.release(1)
        gc.collect()
        released, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert later <= 1.2 * at_bound
    assert released <= 0.05 * at_bound


def test_what_is_not_followed_is_refused() -> None:
    drafter = SuffixDrafter()
    drafter.begin(1, [1])
    drafter.release(1)
    for call in (
        lambda: drafter.extend(1, [1]),
        lambda: drafter.propose([DraftRequest(1, 4)]),
        lambda: drafter.release(1),
    ):
        with pytest.raises(LookupError, match="sequence 1 is not followed"):
            call()
    drafter.begin(1, [1])
    with pytest.raises(ValueError, match="sequence 1 is followed already"):
        drafter.begin(1, [1])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"min_match_tokens": 0}, "min_match_tokens is 0"),
        ({"draft_per_match": 0.0}, "draft_per_match is 0"),
        ({"draft_per_match": float("nan")}, "draft_per_match is nan"),
        ({"min_match_tokens": 2, "max_tokens_indexed": 3}, "max_tokens_indexed is 3"),
        ({"max_search_steps": 0}, "max_search_steps is 0"),
    ],
)
def test_impossible_configurations_are_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SuffixDrafterConfig(**values)  # type: ignore[arg-type]
