"""One sequence at a time: what is shared, copied, published and given back, and when."""

from __future__ import annotations

import pytest
import torch

from outrider.kvcache.pool import OutOfPages, PagePool
from outrider.kvcache.prefix_index import Namespace, sha256
from outrider.kvcache.sequence import SequencePages
from outrider.kvcache.storage import KVStorage, LayerGroup

ALICE = Namespace("alice", "model")
SIZE = 4


class Cache:
    """A pool of pages of 4 tokens with its tensors; each slot holds the token written to it."""

    def __init__(self, num_pages: int) -> None:
        group = LayerGroup("target", num_layers=1, num_kv_heads=1, width=1, dtype=torch.int64)
        self.pool = PagePool(num_pages, SIZE)
        self.storage = KVStorage([group], num_pages + 1, SIZE)

    def sequence(self, namespace: Namespace = ALICE) -> SequencePages:
        return SequencePages(self.pool, self.storage, namespace)

    def step(self, pages: SequencePages, token_ids: list[int], num_rejected: int = 0) -> None:
        """Write ``token_ids`` and commit all but the last ``num_rejected``."""
        start, stop = pages.num_cached_tokens, pages.num_cached_tokens + len(token_ids)
        pages.reserve(stop)
        self.storage.layers("target")[0, 0].view(-1)[pages.slots(start, stop)] = torch.tensor(token_ids)
        pages.commit(token_ids[: len(token_ids) - num_rejected])

    def read(self, pages: SequencePages) -> list[int]:
        keys = self.storage.layers("target")[0, 0].view(-1)
        values: list[int] = keys[pages.slots(0, pages.num_cached_tokens)].tolist()
        return values

    def counts(self) -> tuple[int, int, int]:
        return self.pool.num_free, self.pool.num_referenced, self.pool.num_reusable


def test_slots_follow_the_page_table() -> None:
    cache = Cache(8)
    other, pages = cache.sequence(), cache.sequence()
    for num_tokens in (3, 5, 9):
        other.reserve(num_tokens)
        pages.reserve(num_tokens)
    a, b, c = pages.page_table
    assert pages.slots(2, 10) == [a * 4 + 2, a * 4 + 3, b * 4, b * 4 + 1, b * 4 + 2, b * 4 + 3, c * 4, c * 4 + 1]
    with pytest.raises(AssertionError, match="have no page"):
        pages.slots(0, 13)


def test_a_prompt_seen_before_is_adopted_without_its_last_token() -> None:
    cache = Cache(8)
    first, second = cache.sequence(), cache.sequence()
    prompt = list(range(10))
    cache.step(first, prompt)
    assert second.match_prefix(prompt, len(prompt) - 1) == 8
    assert list(second.page_table) == list(first.page_table[:2])
    cache.step(second, [8, 9])
    assert cache.read(second) == prompt


@pytest.mark.parametrize("max_tokens", [0, 1, 3, 4, 5, 7, 8, 11, 12, 13])
def test_no_more_is_adopted_than_asked_for(max_tokens: int) -> None:
    cache = Cache(8)
    first, second = cache.sequence(), cache.sequence()
    cache.step(first, list(range(12)))
    assert second.match_prefix(list(range(12)), max_tokens) == min(max_tokens, 12)
    assert len(second.page_table) == -(-min(max_tokens, 12) // SIZE)
    assert cache.read(second) == list(range(12))[:max_tokens]


def test_a_hit_ends_at_the_first_page_that_differs() -> None:
    cache = Cache(8)
    first = cache.sequence()
    cache.step(first, list(range(12)))
    assert cache.sequence().match_prefix([0, 1, 2, 99, 4, 5, 6, 7], 7) == 0
    assert cache.sequence().match_prefix([0, 1, 2, 3, 4, 5, 6, 99, 8, 9, 10, 11], 11) == 4


def test_tenants_share_nothing() -> None:
    cache = Cache(8)
    cache.step(cache.sequence(), list(range(8)))
    for namespace in (Namespace("bob", "model"), Namespace("alice", "other")):
        assert cache.sequence(namespace).match_prefix(list(range(8)), 8) == 0
    assert cache.sequence().match_prefix(list(range(8)), 8) == 8


def test_rejected_drafts_are_never_found_and_are_written_over() -> None:
    cache = Cache(8)
    pages = cache.sequence()
    cache.step(pages, [1, 2, 3, 66, 67, 68, 69, 70, 71], num_rejected=6)
    assert cache.pool.find(ALICE, 0, (1, 2, 3, 66)) is None
    assert cache.sequence().match_prefix([1, 2, 3, 66, 67, 68, 69], 7) == 0
    cache.step(pages, [4, 5])
    assert cache.read(pages) == [1, 2, 3, 4, 5]
    assert cache.sequence().match_prefix([1, 2, 3, 4, 67, 68, 69, 70], 8) == 4


def test_reserved_pages_serve_the_next_step_without_new_ones() -> None:
    cache = Cache(8)
    pages = cache.sequence()
    cache.step(pages, list(range(9)), num_rejected=6)
    table = list(pages.page_table)
    assert len(table) == 3
    cache.step(pages, list(range(3, 12)), num_rejected=8)
    assert list(pages.page_table) == table
    pages.truncate(pages.num_cached_tokens)
    assert list(pages.page_table) == table[:1]
    assert cache.counts() == (7, 1, 0)


def test_truncating_and_going_on_differently_leaves_the_published_page_as_it_was() -> None:
    cache = Cache(8)
    pages, reader = cache.sequence(), cache.sequence()
    cache.step(pages, list(range(8)))
    pages.truncate(6)
    cache.step(pages, [60, 70])
    assert cache.read(pages) == [0, 1, 2, 3, 4, 5, 60, 70]
    assert reader.match_prefix(list(range(8)), 8) == 8
    assert cache.read(reader) == list(range(8))


def test_forks_write_apart() -> None:
    cache = Cache(8)
    left = cache.sequence()
    cache.step(left, [1, 2, 3, 4, 5, 6])
    right = left.fork()
    assert cache.counts() == (6, 2, 0)
    cache.step(left, [7, 8, 9])
    cache.step(right, [70, 80, 90])
    assert cache.read(left) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert cache.read(right) == [1, 2, 3, 4, 5, 6, 70, 80, 90]
    assert left.page_table[0] == right.page_table[0]


def test_the_last_holder_of_a_forked_page_writes_without_a_copy() -> None:
    cache = Cache(2)
    left = cache.sequence()
    cache.step(left, [1, 2])
    right = left.fork()
    left.release()
    table = list(right.page_table)
    cache.step(right, [3])
    assert list(right.page_table) == table
    assert cache.read(right) == [1, 2, 3]


def test_a_prompt_computed_twice_at_once_is_kept_once() -> None:
    cache = Cache(8)
    first, second = cache.sequence(), cache.sequence()
    cache.step(first, list(range(9)))
    cache.step(second, list(range(9)))
    assert list(first.page_table[:2]) == list(second.page_table[:2])
    assert cache.counts() == (4, 4, 0)
    first.release()
    assert cache.read(second) == list(range(9))
    cache.pool.check_integrity([second.page_table])


def test_a_sequence_that_fills_the_pool_can_run_again_on_its_own_prefix() -> None:
    cache = Cache(2)
    pages = cache.sequence()
    cache.step(pages, list(range(8)))
    pages.release()
    assert pages.match_prefix(list(range(8)), 7) == 7
    assert pages.can_reserve(8)
    cache.step(pages, [7])
    assert cache.read(pages) == list(range(8))
    pages.release()
    assert cache.counts() == (0, 0, 2)


def test_a_shared_page_is_never_written_even_if_no_page_is_left_to_copy_it() -> None:
    cache = Cache(1)
    left = cache.sequence()
    cache.step(left, [1, 2])
    right = left.fork()
    assert not right.can_reserve(3)
    with pytest.raises(OutOfPages):
        right.reserve(3)
    assert list(right.page_table) == list(left.page_table)
    left.release()
    cache.step(right, [3])
    assert cache.read(right) == [1, 2, 3]


def test_running_out_of_pages_changes_nothing() -> None:
    cache = Cache(4)
    pages, other = cache.sequence(), cache.sequence()
    cache.step(pages, [1, 2, 3, 4, 5])
    other.reserve(1)
    table, counts = list(pages.page_table), cache.counts()
    assert not pages.can_reserve(13)
    with pytest.raises(OutOfPages, match="2 pages wanted, 1 of 4 available"):
        pages.reserve(13)
    assert (list(pages.page_table), cache.counts(), pages.num_cached_tokens) == (table, counts, 5)
    cache.step(pages, [6])
    assert cache.read(pages) == [1, 2, 3, 4, 5, 6]


def test_release_keeps_published_pages_findable_and_may_be_repeated() -> None:
    cache = Cache(4)
    pages = cache.sequence()
    cache.step(pages, list(range(9)))
    pages.release()
    pages.release()
    assert (list(pages.page_table), pages.num_cached_tokens) == ([], 0)
    assert cache.counts() == (2, 0, 2)
    assert pages.match_prefix(list(range(9)), 8) == 8


def test_only_reserved_positions_can_be_committed() -> None:
    cache = Cache(4)
    pages = cache.sequence()
    pages.reserve(3)
    with pytest.raises(AssertionError, match="not reserved"):
        pages.commit([1, 2, 3, 4, 5])


def test_nothing_can_be_committed_to_a_page_that_others_see() -> None:
    cache = Cache(4)
    pages = cache.sequence()
    cache.step(pages, [1, 2])
    pages.fork()
    with pytest.raises(AssertionError, match="others can see"):
        pages.commit([3])


def test_commit_hashes_each_page_once_however_the_tokens_come() -> None:
    hashed: list[int] = []

    def counting(data: bytes) -> bytes:
        hashed.append(len(data))
        return sha256(data)

    group = LayerGroup("target", num_layers=1, num_kv_heads=1, width=1, dtype=torch.int64)
    pool, storage = PagePool(301, SIZE, counting), KVStorage([group], 302, SIZE)
    pages = SequencePages(pool, storage, ALICE)
    for token_id in range(1200):
        pages.reserve(token_id + 2)
        pages.commit([token_id])
    assert len(hashed) == 300 + 1  # and the namespace, for the first page
    assert max(hashed) <= 4 + 32 + 8 * SIZE


def test_a_storage_of_another_size_is_refused() -> None:
    cache = Cache(4)
    with pytest.raises(ValueError, match="one page less"):
        SequencePages(PagePool(5, SIZE), cache.storage, ALICE)
