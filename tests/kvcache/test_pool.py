"""Page states: allocation, eviction order, and that the integrity check sees what is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outrider.kvcache.pool import OutOfPages, PagePool
from outrider.kvcache.prefix_index import Namespace

ALICE = Namespace("alice", "model")


def counts(pool: PagePool) -> tuple[int, int, int]:
    return pool.num_free, pool.num_referenced, pool.num_reusable


def publish_chain(pool: PagePool, *token_ids: int) -> list[int]:
    """One referenced, published page of one token for each of ``token_ids``, each after the one before."""
    pages = pool.allocate(len(token_ids))
    for index, token_id in enumerate(token_ids):
        parent = pages[index - 1] if index else 0
        assert pool.publish(pages[index], ALICE, parent, (token_id,)) == pages[index]
    return pages


def test_pages_are_numbered_from_one_and_handed_out_once() -> None:
    pool = PagePool(5, page_size=1)
    assert sorted(pool.allocate(2) + pool.allocate(3)) == [1, 2, 3, 4, 5]
    assert counts(pool) == (0, 5, 0)
    pool.check_integrity()


def test_running_out_takes_nothing() -> None:
    pool = PagePool(3, page_size=1)
    kept = pool.allocate(1)
    pool.release(publish_chain(pool, 7))
    with pytest.raises(OutOfPages, match=r"3 pages wanted, 2 of 3 available"):
        pool.allocate(3)
    assert counts(pool) == (1, 1, 1)
    assert pool.find(ALICE, 0, (7,)) is not None
    pool.check_integrity([kept])


def test_a_shared_page_goes_back_with_its_last_owner() -> None:
    pool = PagePool(1, page_size=1)
    pages = pool.allocate(1)
    pool.acquire(pages[0])
    pool.release(pages)
    assert counts(pool) == (0, 1, 0)
    pool.release(pages)
    assert counts(pool) == (1, 0, 0)


def test_published_pages_are_evicted_only_when_no_page_is_free() -> None:
    pool = PagePool(3, page_size=1)
    pool.release(publish_chain(pool, 7))
    held = pool.allocate(2)
    assert pool.find(ALICE, 0, (7,)) is not None
    held += pool.allocate(1)
    assert pool.find(ALICE, 0, (7,)) is None
    pool.check_integrity([held])


def test_eviction_takes_the_least_recently_used_first() -> None:
    pool = PagePool(3, page_size=1)
    chains = {token_id: publish_chain(pool, token_id) for token_id in (7, 8, 9)}
    for pages in chains.values():
        pool.release(pages)
    pool.acquire(chains[7][0])  # a prefix hit makes it the most recently used
    pool.release(chains[7])
    evicted = []
    for _ in range(3):
        pool.allocate(1)
        evicted += [token_id for token_id in chains if pool.find(ALICE, 0, (token_id,)) is None]
    assert list(dict.fromkeys(evicted)) == [8, 9, 7]


def test_eviction_takes_leaves_before_their_parents() -> None:
    pool = PagePool(4, page_size=1)
    trunk = publish_chain(pool, 1, 2)
    branches = [trunk, trunk]
    for token_id in (3, 4):
        leaf = pool.allocate(1)
        pool.publish(leaf[0], ALICE, trunk[1], (token_id,))
        branches[token_id - 3] = [*trunk, *leaf]
    for page in trunk:
        pool.acquire(page)
    for branch in branches:
        pool.release(branch)
    order = [pool.allocate(1)[0] for _ in range(4)]
    assert order == [branches[0][2], branches[1][2], trunk[1], trunk[0]]
    pool.check_integrity()


def test_releasing_what_nobody_owns_is_caught() -> None:
    pool = PagePool(1, page_size=1)
    pages = pool.allocate(1)
    pool.release(pages)
    with pytest.raises(AssertionError, match="without an owner"):
        pool.release(pages)


def test_only_full_owned_pages_can_be_published() -> None:
    pool = PagePool(1, page_size=2)
    with pytest.raises(AssertionError, match="without an owner"):
        pool.publish(1, ALICE, 0, (1, 2))
    pool.allocate(1)
    with pytest.raises(AssertionError, match="with 1 tokens"):
        pool.publish(1, ALICE, 0, (1,))


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda pool: pool._free.pop(), "exactly one state"),
        (lambda pool: pool._free.append(pool._free[0]), "exactly one state"),
        (lambda pool: pool._free.append(99), "exactly one state"),
        (lambda pool: pool._free.append(0), "exactly one state"),
        (lambda pool: pool._reusable.popitem(), "exactly one state"),
        (lambda pool: pool._index.remove(next(iter(pool._reusable))), "reusable and not published"),
        (lambda pool: pool._index.add(pool._free[0], ALICE, 0, (5,)), "free and yet published"),
        (lambda pool: pool.acquire(1), "differ from page -> owners"),
        (lambda pool: pool._index._buckets.clear(), "differ from indexed pages"),
        (lambda pool: setattr(pool._index._entries[1], "num_children", 0), "counts 0 pages after it"),
        (lambda pool: setattr(pool._index._entries[1], "page", 2), "indexed pages"),
        (lambda pool: setattr(pool._index._entries[2], "parent", 6), "which is not published"),
        (lambda pool: setattr(pool._index._entries[3], "token_ids", (1,)), "same tokens after the same prefix"),
    ],
)
def test_the_integrity_check_sees(corrupt: Callable[[PagePool], object], message: str) -> None:
    pool = PagePool(6, page_size=1)
    held = publish_chain(pool, 1, 2)
    pool.release(publish_chain(pool, 3))
    pool.check_integrity([held])
    corrupt(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity([held])
