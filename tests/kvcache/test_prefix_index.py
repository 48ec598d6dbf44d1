"""Finding pages by their tokens: only ever the right page, whatever the hash and whoever asks."""

from __future__ import annotations

import random

import pytest

from outrider.kvcache.prefix_index import Digest, Namespace, PrefixIndex, sha256

ALICE = Namespace("alice", "model")


def eight_bits(data: bytes) -> bytes:
    return sha256(data)[:1]


@pytest.mark.parametrize("digest", [sha256, eight_bits, lambda data: b""], ids=["sha256", "8 bits", "0 bits"])
def test_collisions_are_harmless(digest: Digest) -> None:
    index = PrefixIndex(digest)
    numbers = random.Random(1)
    pages: dict[tuple[int, tuple[int, ...]], int] = {}  # (parent, token_ids) -> page
    for page in range(1, 600):
        parent = numbers.choice([0, *pages.values()])
        token_ids = (numbers.randrange(4), numbers.randrange(4))
        assert index.find(ALICE, parent, token_ids) == pages.get((parent, token_ids))
        assert index.add(page, ALICE, parent, token_ids) == pages.setdefault((parent, token_ids), page)
    for (parent, token_ids), page in pages.items():
        assert index.find(ALICE, parent, token_ids) == page
    index.check_integrity()


def test_equal_tokens_after_different_prefixes_are_different_pages() -> None:
    index = PrefixIndex(lambda data: b"same")
    index.add(1, ALICE, 0, (1, 2))
    index.add(2, ALICE, 0, (3, 4))
    index.add(3, ALICE, 1, (9, 9))
    index.add(4, ALICE, 2, (9, 9))
    assert (index.find(ALICE, 1, (9, 9)), index.find(ALICE, 2, (9, 9)), index.find(ALICE, 0, (9, 9))) == (3, 4, None)


def test_adding_an_equal_page_keeps_the_first() -> None:
    index = PrefixIndex()
    assert index.add(1, ALICE, 0, (1, 2)) == 1
    assert index.add(2, ALICE, 0, (1, 2)) == 1
    assert 2 not in index
    assert len(index) == 1


@pytest.mark.parametrize(
    "other",
    [Namespace("bob", "model"), Namespace("alice", "model2"), Namespace("alicem", "odel"), Namespace("", "alicemodel")],
)
@pytest.mark.parametrize("digest", [sha256, lambda data: b"same"], ids=["sha256", "all hashes collide"])
def test_another_tenant_or_model_never_finds_a_page(other: Namespace, digest: Digest) -> None:
    index = PrefixIndex(digest)
    index.add(1, ALICE, 0, (1, 2))
    assert index.find(other, 0, (1, 2)) is None
    assert index.add(2, other, 0, (1, 2)) == 2
    assert (index.find(ALICE, 0, (1, 2)), index.find(other, 0, (1, 2))) == (1, 2)


def test_namespaces_encode_differently_where_their_texts_join_alike() -> None:
    names = [("ab", "c"), ("a", "bc"), ("", "abc"), ("abc", ""), ("\ud800", "c"), ("\ufffd", "c")]
    assert len({Namespace(*name).encode() for name in names}) == len(names)


def test_the_hash_covers_namespace_prefix_and_tokens() -> None:
    seen: list[bytes] = []

    def recording(data: bytes) -> bytes:
        seen.append(data)
        return sha256(data)

    index = PrefixIndex(recording)
    index.add(1, ALICE, 0, (1, 2))
    index.add(2, ALICE, 0, (1, 3))
    index.add(3, ALICE, 1, (1, 2))
    index.add(4, ALICE, 3, (1, 2))
    index.add(5, Namespace("bob", "model"), 0, (1, 2))
    pages = [data for data in seen if data.startswith(b"page")]
    assert len(set(pages)) == 5


def test_a_page_is_not_forgotten_before_the_pages_after_it() -> None:
    index = PrefixIndex()
    index.add(1, ALICE, 0, (1, 2))
    index.add(2, ALICE, 1, (3, 4))
    with pytest.raises(AssertionError, match="before the 1 pages after it"):
        index.remove(1)


def test_a_forgotten_page_is_not_found_and_may_hold_something_else() -> None:
    index = PrefixIndex()
    index.add(1, ALICE, 0, (1, 2))
    index.remove(1)
    assert index.find(ALICE, 0, (1, 2)) is None
    index.add(1, ALICE, 0, (5, 6))
    assert index.find(ALICE, 0, (5, 6)) == 1
    index.check_integrity()
