"""Random operations on many sequences, against a naive model and against what the pages hold.

Every slot is filled with a number derived from the namespace and *all* tokens up to its position, as real
keys and values are. So a page that is shared wrongly, reused stale or written over shows as wrong content.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from outrider.kvcache.pool import OutOfPages, PagePool
from outrider.kvcache.prefix_index import Digest, Namespace, sha256
from outrider.kvcache.sequence import SequencePages
from outrider.kvcache.storage import KVStorage, LayerGroup

GROUPS = (
    LayerGroup("target", num_layers=2, num_kv_heads=1, width=2, dtype=torch.float64),
    LayerGroup("draft", num_layers=1, num_kv_heads=2, width=1, dtype=torch.float64),
)
NAMESPACES = (Namespace("a", "bc"), Namespace("ab", "c"), Namespace("", "abc"))
TOKENS = st.lists(st.integers(0, 1), max_size=14)

Prefix = tuple[Namespace, tuple[int, ...]]


def content(namespace: Namespace, token_ids: tuple[int, ...]) -> float:
    """What the slot of the last of ``token_ids`` must hold."""
    digest = hashlib.md5(repr((namespace, token_ids)).encode()).digest()
    return float(int.from_bytes(digest[:6], "little"))


def caches(storage: KVStorage) -> list[torch.Tensor]:
    return [
        storage.layers(group.name)[layer, side]
        for group in GROUPS
        for layer in range(group.num_layers)
        for side in (0, 1)  # keys, values
    ]


@dataclass(eq=False)
class Live:
    """A sequence and what the model knows of it."""

    pages: SequencePages
    namespace: Namespace
    prompt: list[int]
    token_ids: list[int] = field(default_factory=list)  # verified
    held: list[Prefix] = field(default_factory=list)  # published prefixes whose last page it references


class KVCacheMachine(RuleBasedStateMachine):
    digest: Digest = staticmethod(sha256)

    @initialize(num_pages=st.integers(3, 12), page_size=st.integers(1, 4))
    def build(self, num_pages: int, page_size: int) -> None:
        self.size = page_size
        self.pool = PagePool(num_pages, page_size, self.digest)
        self.storage = KVStorage(GROUPS, num_pages + 1, page_size)
        for cache in caches(self.storage):
            cache[1:] = torch.nan
        self.live: list[Live] = []
        self.published: set[Prefix] = set()
        self.reusable: list[Prefix] = []  # least recently used first

    # -- the naive model ------------------------------------------------------------------------------

    def chain(self, namespace: Namespace, token_ids: list[int]) -> list[Prefix]:
        return [(namespace, tuple(token_ids[:n])) for n in range(self.size, len(token_ids) + 1, self.size)]

    def update_reusable(self) -> None:
        referenced = {prefix for live in self.live for prefix in live.held}
        self.reusable = [prefix for prefix in self.reusable if prefix not in referenced]
        fresh = self.published - referenced - set(self.reusable)
        self.reusable += sorted(fresh, key=lambda prefix: -len(prefix[1]))

    def evict(self, count: int) -> None:
        for prefix in self.reusable[:count]:
            self.published.remove(prefix)
        del self.reusable[:count]

    def num_owners(self, page: int) -> int:
        return sum(page in live.pages.page_table for live in self.live)

    def reserve(self, live: Live, num_tokens: int) -> bool:
        """Reserve in the pool and in the model; False where both agree that there are too few pages."""
        cached, table = len(live.token_ids), list(live.pages.page_table)
        missing = max(0, -(-num_tokens // self.size) - len(table))
        partial = cached % self.size > 0 and num_tokens > cached
        shared = partial and self.num_owners(table[cached // self.size]) > 1
        published = partial and len(live.held) > cached // self.size
        available, free = self.pool.num_available, self.pool.num_free
        fits = missing + shared <= available
        assert live.pages.can_reserve(num_tokens) == fits
        if not fits:
            with pytest.raises(OutOfPages):
                live.pages.reserve(num_tokens)
            assert list(live.pages.page_table) == table
            assert (self.pool.num_available, self.pool.num_free) == (available, free)
            return False
        live.pages.reserve(num_tokens)
        copied = shared or (published and missing < available)
        self.evict(max(0, missing + copied - free))
        if published:
            prefix = live.held.pop()
            if not copied:
                self.published.remove(prefix)
        self.update_reusable()
        return True

    def write(self, live: Live, token_ids: list[int]) -> None:
        """Fill the slots of the tokens that follow the verified ones."""
        start = len(live.token_ids)
        prefix = (*live.token_ids, *token_ids)
        slots = live.pages.slots(start, len(prefix))
        numbers = [content(live.namespace, prefix[: pos + 1]) for pos in range(start, len(prefix))]
        for index, cache in enumerate(caches(self.storage)):
            values = torch.tensor(numbers, dtype=torch.float64) + index
            cache.view(-1, *cache.shape[2:])[slots] = values[:, None, None].expand(-1, *cache.shape[2:])

    def commit(self, live: Live, token_ids: list[int]) -> None:
        live.pages.commit(token_ids)
        if not token_ids:
            return
        live.token_ids += token_ids
        live.held = self.chain(live.namespace, live.token_ids)
        self.published.update(live.held)
        self.update_reusable()

    # -- operations -----------------------------------------------------------------------------------

    @rule(namespace=st.sampled_from(NAMESPACES), prompt=TOKENS, all_but=st.integers(0, 2))
    def start(self, namespace: Namespace, prompt: list[int], all_but: int) -> None:
        live = Live(SequencePages(self.pool, self.storage, namespace), namespace, prompt)
        self.match(live, max_tokens=len(prompt) - all_but)
        self.live.append(live)
        self.update_reusable()

    def match(self, live: Live, max_tokens: int) -> None:
        live.held = []
        for prefix in self.chain(live.namespace, live.prompt):
            if prefix not in self.published or len(prefix[1]) - self.size >= max_tokens:
                break
            live.held.append(prefix)
        expected = max(0, min(len(live.held) * self.size, max_tokens))
        assert live.pages.match_prefix(live.prompt, max_tokens) == expected
        live.token_ids = live.prompt[:expected]

    @precondition(lambda self: self.live)
    @rule(data=st.data(), chunk=st.integers(1, 9))
    def prefill(self, data: st.DataObject, chunk: int) -> None:
        live = data.draw(st.sampled_from(self.live))
        chunk_ids = live.prompt[len(live.token_ids) :][:chunk]
        if self.reserve(live, len(live.token_ids) + len(chunk_ids)):
            self.write(live, chunk_ids)
            self.commit(live, chunk_ids)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), rows=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def decode(self, data: st.DataObject, rows: list[int]) -> None:
        live = data.draw(st.sampled_from(self.live))
        num_verified = data.draw(st.integers(0, len(rows)))
        if self.reserve(live, len(live.token_ids) + len(rows)):
            self.write(live, rows)
            self.commit(live, rows[:num_verified])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        live = data.draw(st.sampled_from(self.live))
        num_tokens = data.draw(st.integers(0, len(live.token_ids)))
        live.pages.truncate(num_tokens)
        assert len(live.pages.page_table) == -(-num_tokens // self.size)
        live.token_ids = live.token_ids[:num_tokens]
        live.held = live.held[: -(-num_tokens // self.size)]
        self.update_reusable()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        live = data.draw(st.sampled_from(self.live))
        self.live.append(
            Live(live.pages.fork(), live.namespace, live.prompt.copy(), live.token_ids.copy(), live.held.copy())
        )

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        live = data.draw(st.sampled_from(self.live))
        live.pages.release()
        live.pages.release()
        self.live.remove(live)
        self.update_reusable()

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def preempt_and_resume(self, data: st.DataObject) -> None:
        live = data.draw(st.sampled_from(self.live))
        live.prompt = live.token_ids
        live.pages.release()
        live.token_ids, live.held = [], []
        self.update_reusable()
        self.match(live, max_tokens=len(live.prompt) - 1)
        self.update_reusable()

    # -- what must hold after each ---------------------------------------------------------------------

    @invariant()
    def pool_balances(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_integrity([live.pages.page_table for live in self.live])
            owned = {page for live in self.live for page in live.pages.page_table}
            assert self.pool.num_referenced == len(owned)
            assert self.pool.num_reusable == len(self.reusable)

    @invariant()
    def sequences_read_their_own_tokens(self) -> None:
        if hasattr(self, "pool"):
            slots = [cache.flatten(2).view(-1, 2).tolist() for cache in caches(self.storage)]
            for live in self.live:
                assert live.pages.num_cached_tokens == len(live.token_ids)
                self.check_content(slots, live.namespace, tuple(live.token_ids), live.pages.page_table)

    @invariant()
    def exactly_the_expected_prefixes_are_published(self) -> None:
        if hasattr(self, "pool"):
            slots = [cache.flatten(2).view(-1, 2).tolist() for cache in caches(self.storage)]
            for namespace, token_ids in self.published:
                pages = [0]
                for start in range(0, len(token_ids), self.size):
                    page = self.pool.find(namespace, pages[-1], token_ids[start : start + self.size])
                    assert page is not None, f"{token_ids} is not published"
                    pages.append(page)
                self.check_content(slots, namespace, token_ids, pages[1:])
            num_published = sum(self.pool.is_published(page) for page in range(self.pool.num_pages + 1))
            assert num_published == len(self.published)

    def check_content(
        self, slots: list[list[list[float]]], namespace: Namespace, token_ids: tuple[int, ...], pages: object
    ) -> None:
        for pos in range(len(token_ids)):
            slot = pages[pos // self.size] * self.size + pos % self.size  # type: ignore[index]
            expected = content(namespace, token_ids[: pos + 1])
            for index, cache in enumerate(slots):
                assert cache[slot] == [expected + index] * 2

    @invariant()
    def null_page_stays_zero(self) -> None:
        if hasattr(self, "pool"):
            assert all(not cache[0].any() for cache in caches(self.storage))

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            for live in self.live:
                live.pages.release()
            self.pool.check_integrity([])
            assert self.pool.num_available == self.pool.num_pages


class CollidingMachine(KVCacheMachine):
    """The same with a hash that tells nothing apart."""

    digest: Digest = staticmethod(lambda data: b"same")


@pytest.mark.parametrize("machine", [KVCacheMachine, CollidingMachine], ids=["sha256", "all hashes collide"])
def test_pages_hold_what_their_sequences_wrote_whatever_happens(machine: type[KVCacheMachine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=40,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
