"""Who owns which page: reference counts, prefix reuse and eviction. Page ids only, no tensors."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from outrider.kernels.operations import NULL_PAGE
from outrider.kvcache.prefix_index import Digest, Namespace, PrefixIndex, sha256


class OutOfPages(Exception):
    """Fewer pages are free or reusable than were asked for; nothing was changed."""


class PagePool:
    """Pages ``1..num_pages``, each in exactly one state: free, referenced or reusable.

    A reusable page is published and has no owner: it waits to be adopted by a prefix hit, or to be
    evicted, least recently used first, once no page is free.

    Whoever references a published page references all pages before it, and owners give pages back last
    page first. So a page always becomes reusable after its children, and eviction in that order takes
    leaves before their parents without looking for them.
    """

    def __init__(self, num_pages: int, page_size: int, digest: Digest = sha256) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a pool needs at least 1 page of at least 1 token; got {num_pages} of {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self._index = PrefixIndex(digest)
        self._ref_counts = [0] * (num_pages + 1)  # by page; NULL_PAGE stays at 0
        self._free = list(range(num_pages, NULL_PAGE, -1))  # a stack: the page given back last is still warm
        self._reusable: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_reusable(self) -> int:
        return len(self._reusable)

    @property
    def num_available(self) -> int:
        """Pages that ``allocate`` can hand out."""
        return self.num_free + self.num_reusable

    @property
    def num_referenced(self) -> int:
        return self.num_pages - self.num_available

    def allocate(self, count: int) -> list[int]:
        """``count`` pages with one reference each, of unknown content.

        Raises:
            OutOfPages: there are fewer; none was taken.
        """
        if count > self.num_available:
            raise OutOfPages(f"{count} pages wanted, {self.num_available} of {self.num_pages} available")
        return [self._take() for _ in range(count)]

    def acquire(self, page: int) -> None:
        """Add a reference to a page that has an owner or is reusable."""
        if self._ref_counts[page] == 0:
            del self._reusable[page]
        self._ref_counts[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drop one reference of each, the last first: so prefixes stay reusable longer than what follows."""
        for page in reversed(pages):
            assert self._ref_counts[page] > 0, f"page {page} is released without an owner"
            self._ref_counts[page] -= 1
            if self._ref_counts[page] > 0:
                continue
            if page in self._index:
                self._reusable[page] = None
            else:
                self._free.append(page)

    def is_published(self, page: int) -> bool:
        return page in self._index

    def is_shared(self, page: int) -> bool:
        return self._ref_counts[page] > 1

    def find(self, namespace: Namespace, parent: int, token_ids: tuple[int, ...]) -> int | None:
        """The published page that holds ``token_ids`` right after ``parent`` (NULL_PAGE: at the start)."""
        return self._index.find(namespace, parent, token_ids)

    def publish(self, page: int, namespace: Namespace, parent: int, token_ids: tuple[int, ...]) -> int:
        """Let others find a full, verified page, whose content must not change from now on.

        Returns the page now findable: another one, where an equal page was published before.
        """
        assert self._ref_counts[page] > 0, f"page {page} is published without an owner"
        assert len(token_ids) == self.page_size, f"page {page} is published with {len(token_ids)} tokens"
        return self._index.add(page, namespace, parent, token_ids)

    def unpublish(self, page: int) -> None:
        """Hide a page from others, so that its only owner may write to it."""
        assert self._ref_counts[page] == 1, f"page {page} has {self._ref_counts[page]} owners"
        self._index.remove(page)

    def published_tokens(self, page: int) -> tuple[int, ...]:
        return self._index.token_ids(page)

    def check_integrity(self, page_tables: Iterable[Sequence[int]] | None = None) -> None:
        """Every page is in exactly one state and the index agrees; O(num_pages), for tests and idle time.

        ``page_tables``: those of all live sequences, to check the reference counts against.

        Raises:
            AssertionError: with what differs.
        """
        referenced = {page: count for page, count in enumerate(self._ref_counts) if count != 0}
        num_states = Counter([*self._free, *self._reusable, *referenced])
        expected = Counter(range(NULL_PAGE + 1, self.num_pages + 1))
        wrong = {page: num_states[page] for page in num_states | expected if num_states[page] != expected[page]}
        assert not wrong, f"pages that are not in exactly one state, or do not exist -> number of states: {wrong}"
        assert min(self._ref_counts) >= 0, f"negative reference counts: {self._ref_counts}"
        published_free = [page for page in self._free if page in self._index]
        assert not published_free, f"pages free and yet published: {published_free}"
        lost = [page for page in self._reusable if page not in self._index]
        assert not lost, f"pages reusable and not published: {lost}"
        self._index.check_integrity()
        if page_tables is not None:
            owners = Counter(page for table in page_tables for page in table)
            assert owners == referenced, f"page -> references {referenced} differ from page -> owners {dict(owners)}"

    def _take(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._reusable.popitem(last=False)
            self._index.remove(page)
        self._ref_counts[page] = 1
        return page
