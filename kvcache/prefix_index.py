"""Which published page holds which tokens after which prefix."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from outrider.kernels.operations import NULL_PAGE

Digest = Callable[[bytes], bytes]


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


@dataclass(frozen=True, slots=True)
class Namespace:
    """Who may share pages: one tenant's sequences of one model."""

    tenant: str
    model: str

    def encode(self) -> bytes:
        """Unambiguous bytes: each field behind its length, so ("ab", "c") is not ("a", "bc")."""
        # A client may name a tenant with an unpaired surrogate; it must neither crash nor alias another.
        fields = (field.encode("utf-8", "surrogatepass") for field in (self.tenant, self.model))
        return b"".join(struct.pack("<Q", len(field)) + field for field in fields)


@dataclass(slots=True)
class _Entry:
    """One published page: ``token_ids`` right after everything ``parent`` and its ancestors hold."""

    page: int
    namespace: Namespace
    parent: int  # NULL_PAGE for the first page of a sequence
    token_ids: tuple[int, ...]
    digest: bytes
    num_children: int = 0


class PrefixIndex:
    """Published pages as chains: a page is found by (namespace, parent page, its tokens).

    The key is a chain hash, H(parent's digest, tokens), which later lets pages be named across processes.
    A hit is believed only if namespace, parent page and tokens are equal too; as a parent outlives its
    children here, that makes the whole prefix equal by induction, whatever the hash does.
    """

    def __init__(self, digest: Digest = sha256) -> None:
        self._digest = digest
        self._entries: dict[int, _Entry] = {}  # by page
        self._buckets: dict[bytes, list[_Entry]] = {}  # by digest; more than one entry only on a collision

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, page: int) -> bool:
        return page in self._entries

    def find(self, namespace: Namespace, parent: int, token_ids: tuple[int, ...]) -> int | None:
        """The published page of these tokens after ``parent`` (NULL_PAGE: at the start), if there is one."""
        return self._find(self._chain_digest(namespace, parent, token_ids), namespace, parent, token_ids)

    def add(self, page: int, namespace: Namespace, parent: int, token_ids: tuple[int, ...]) -> int:
        """Publish ``page`` after ``parent``, unless an equal page is; returns the one that is now."""
        assert page not in self._entries, f"page {page} is published already"
        digest = self._chain_digest(namespace, parent, token_ids)
        published = self._find(digest, namespace, parent, token_ids)
        if published is not None:
            return published
        entry = _Entry(page, namespace, parent, token_ids, digest)
        self._entries[page] = entry
        self._buckets.setdefault(digest, []).append(entry)
        if parent != NULL_PAGE:
            self._entries[parent].num_children += 1
        return page

    def remove(self, page: int) -> None:
        """Forget ``page``, which must have no published page after it."""
        entry = self._entries.pop(page)
        assert entry.num_children == 0, f"page {page} is forgotten before the {entry.num_children} pages after it"
        bucket = self._buckets[entry.digest]
        bucket.remove(entry)
        if not bucket:
            del self._buckets[entry.digest]
        if entry.parent != NULL_PAGE:
            self._entries[entry.parent].num_children -= 1

    def token_ids(self, page: int) -> tuple[int, ...]:
        """The tokens of a published page."""
        return self._entries[page].token_ids

    def check_integrity(self) -> None:
        """Pages and digests map one to one, every parent is published, and children are counted right."""
        in_buckets = [entry.page for bucket in self._buckets.values() for entry in bucket]
        assert sorted(in_buckets) == sorted(self._entries), (
            f"published pages {sorted(self._entries)} differ from indexed pages {sorted(in_buckets)}"
        )
        num_children = dict.fromkeys(self._entries, 0)
        keys = set()
        for page, entry in self._entries.items():
            assert entry.page == page, f"page {page} has the entry of page {entry.page}"
            assert entry in self._buckets[entry.digest], f"page {page} is not under its own digest"
            if entry.parent != NULL_PAGE:
                assert entry.parent in self._entries, f"page {page} follows page {entry.parent}, which is not published"
                num_children[entry.parent] += 1
            keys.add((entry.namespace, entry.parent, entry.token_ids))
        assert len(keys) == len(self._entries), "two published pages hold the same tokens after the same prefix"
        for page, entry in self._entries.items():
            assert entry.num_children == num_children[page], (
                f"page {page} counts {entry.num_children} pages after it; there are {num_children[page]}"
            )

    def _chain_digest(self, namespace: Namespace, parent: int, token_ids: tuple[int, ...]) -> bytes:
        if parent == NULL_PAGE:
            prefix = self._digest(b"namespace" + namespace.encode())
        else:
            prefix = self._entries[parent].digest
        return self._digest(b"page" + prefix + array("q", token_ids).tobytes())

    def _find(self, digest: bytes, namespace: Namespace, parent: int, token_ids: tuple[int, ...]) -> int | None:
        for entry in self._buckets.get(digest, ()):
            if entry.token_ids == token_ids and entry.parent == parent and entry.namespace == namespace:
                return entry.page
        return None
