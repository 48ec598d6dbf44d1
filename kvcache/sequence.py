"""One sequence's pages: its page table, and the frontier between verified tokens and everything else."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.kernels.operations import NULL_PAGE
from outrider.kvcache.pool import PagePool
from outrider.kvcache.prefix_index import Namespace
from outrider.kvcache.storage import KVStorage


class SequencePages:
    """The pages of one sequence and how many of its tokens they hold, verified.

    A step is ``reserve`` (room for its rows, drafts included), the pass, ``commit`` (the verified ones).
    Rejected drafts need no undo: their slots lie past ``num_cached_tokens`` and are written over. Pages
    reserved and not filled stay for the next step; ``truncate(num_cached_tokens)`` gives them back.

    Every full verified page is published, so these pages are one chain in the pool's prefix index.
    """

    def __init__(self, pool: PagePool, storage: KVStorage, namespace: Namespace) -> None:
        if (pool.num_pages, pool.page_size) != (storage.num_pages - 1, storage.page_size):
            raise ValueError(
                f"a pool of {pool.num_pages} pages of {pool.page_size} tokens does not fit a storage of "
                f"{storage.num_pages} pages of {storage.page_size}: it needs one page less and the same size"
            )
        self._pool = pool
        self._storage = storage
        self._namespace = namespace
        self._page_size = pool.page_size
        self._page_table: list[int] = []
        self._num_cached_tokens = 0
        self._tail: list[int] = []  # the verified tokens of the page at the frontier, while it is not full

    @property
    def page_table(self) -> Sequence[int]:
        """The page of each run of ``page_size`` positions, in order; reserved pages included."""
        return self._page_table

    @property
    def num_cached_tokens(self) -> int:
        """The frontier: verified tokens whose keys and values are in the cache."""
        return self._num_cached_tokens

    def match_prefix(self, token_ids: Sequence[int], max_tokens: int) -> int:
        """Adopt the pages of the longest published prefix; returns ``num_cached_tokens``, at most ``max_tokens``.

        Only for an empty sequence. ``max_tokens = len(prompt) - 1`` leaves the last token to be computed.
        """
        assert not self._page_table, "only an empty sequence can adopt a prefix"
        size = self._page_size
        parent = NULL_PAGE
        for start in range(0, min(max_tokens, len(token_ids) - size + 1), size):
            page = self._pool.find(self._namespace, parent, tuple(token_ids[start : start + size]))
            if page is None:
                break
            self._pool.acquire(page)
            self._page_table.append(page)
            parent = page
        self._num_cached_tokens = max(0, min(len(self._page_table) * size, max_tokens))
        self._tail = list(token_ids[self._num_cached_tokens // size * size : self._num_cached_tokens])
        return self._num_cached_tokens

    def can_reserve(self, num_tokens: int) -> bool:
        """Whether ``reserve(num_tokens)`` would succeed now."""
        if num_tokens <= self._num_cached_tokens:
            return True
        must_copy = self._is_frontier_page_visible() and self._pool.is_shared(self._frontier_page)
        return self._num_missing_pages(num_tokens) + must_copy <= self._pool.num_available

    def reserve(self, num_tokens: int) -> None:
        """Make positions ``num_cached_tokens .. num_tokens - 1`` writable.

        A page at the frontier that others share or could find is replaced by a copy. (Pages past the
        frontier are never visible to others.)

        Raises:
            OutOfPages: the pool has too few pages; nothing was changed.
        """
        if num_tokens <= self._num_cached_tokens:
            return
        num_missing = self._num_missing_pages(num_tokens)
        visible = self._is_frontier_page_visible()
        # Our own published page need not be copied at any price: where no page is left for that, it is hidden
        # instead, or a sequence that fits the pool exactly could not run on a hit of its own prefix.
        copy = visible and (self._pool.is_shared(self._frontier_page) or num_missing < self._pool.num_available)
        new_pages = self._pool.allocate(num_missing + copy)
        if copy:
            self._replace_frontier_page(new_pages.pop())
        elif visible:
            self._pool.unpublish(self._frontier_page)
        self._page_table += new_pages

    def slots(self, start: int, stop: int) -> list[int]:
        """``page * page_size + offset`` of positions ``start .. stop - 1``."""
        assert 0 <= start <= stop <= len(self._page_table) * self._page_size, f"positions {start}..{stop} have no page"
        size, table = self._page_size, self._page_table
        return [table[pos // size] * size + pos % size for pos in range(start, stop)]

    def commit(self, token_ids: Sequence[int]) -> None:
        """Move the frontier over ``token_ids``, which are verified and whose keys and values are written.

        Each page that becomes full is published. Where an equal page already is, that one takes the place
        of ours: one copy is kept, and the pages of a sequence stay one chain, so that none is evicted
        while a page after it is in use. Time: O(len(token_ids)).
        """
        stop = self._num_cached_tokens + len(token_ids)
        assert stop <= len(self._page_table) * self._page_size, f"{stop} tokens committed, but not reserved"
        assert not token_ids or not self._is_frontier_page_visible(), "tokens written to a page others can see"
        done = 0
        while done < len(token_ids):
            fresh = token_ids[done : done + self._page_size - len(self._tail)]
            self._tail += fresh
            self._num_cached_tokens += len(fresh)
            done += len(fresh)
            if len(self._tail) == self._page_size:
                self._publish_page(self._num_cached_tokens // self._page_size - 1)
                self._tail = []

    def truncate(self, num_tokens: int) -> None:
        """Move the frontier back to ``num_tokens`` and give back the pages wholly past it. Nothing is erased."""
        assert 0 <= num_tokens <= self._num_cached_tokens, f"{num_tokens} of {self._num_cached_tokens} tokens"
        num_pages, num_tail_tokens = -(-num_tokens // self._page_size), num_tokens % self._page_size
        self._pool.release(self._page_table[num_pages:])
        del self._page_table[num_pages:]
        self._num_cached_tokens = num_tokens
        if num_tail_tokens and self._pool.is_published(self._frontier_page):
            self._tail = list(self._pool.published_tokens(self._frontier_page))
        del self._tail[num_tail_tokens:]

    def release(self) -> None:
        """Give every page back; published ones stay findable. Leaves an empty sequence; may be repeated."""
        self.truncate(0)

    def fork(self) -> SequencePages:
        """A second sequence with the same verified tokens in the same pages; whoever writes first copies."""
        other = SequencePages(self._pool, self._storage, self._namespace)
        other._page_table = self._page_table[: -(-self._num_cached_tokens // self._page_size)]
        other._num_cached_tokens = self._num_cached_tokens
        other._tail = self._tail.copy()
        for page in other._page_table:
            self._pool.acquire(page)
        return other

    @property
    def _frontier_page(self) -> int:
        return self._page_table[self._num_cached_tokens // self._page_size]

    def _is_frontier_page_visible(self) -> bool:
        """Whether the page the next token goes to holds tokens already, and others share or can find it."""
        return self._num_cached_tokens % self._page_size > 0 and (
            self._pool.is_shared(self._frontier_page) or self._pool.is_published(self._frontier_page)
        )

    def _num_missing_pages(self, num_tokens: int) -> int:
        return max(0, -(-num_tokens // self._page_size) - len(self._page_table))

    def _replace_frontier_page(self, copy: int) -> None:
        original = self._frontier_page
        self._storage.copy_page(original, copy)
        self._page_table[self._num_cached_tokens // self._page_size] = copy
        self._pool.release([original])

    def _publish_page(self, index: int) -> None:
        ours = self._page_table[index]
        parent = self._page_table[index - 1] if index > 0 else NULL_PAGE
        published = self._pool.publish(ours, self._namespace, parent, tuple(self._tail))
        if published != ours:
            self._pool.acquire(published)
            self._page_table[index] = published
            self._pool.release([ours])
