"""The tensors: their shapes, and that a page is one thing in every layer of every group."""

from __future__ import annotations

import pytest
import torch

from outrider.kernels.operations import NULL_PAGE
from outrider.kvcache.storage import KVStorage, LayerGroup

TARGET = LayerGroup("target", num_layers=3, num_kv_heads=2, width=4, dtype=torch.float32)
DRAFT = LayerGroup("draft", num_layers=1, num_kv_heads=1, width=8, dtype=torch.bfloat16)


def all_caches(storage: KVStorage) -> list[torch.Tensor]:
    return [
        storage.layers(group.name)[layer, side]
        for group in storage.groups
        for layer in range(group.num_layers)
        for side in (0, 1)  # keys, values
    ]


def test_every_layer_has_contiguous_caches_of_its_groups_shape_and_a_null_page_of_zeros() -> None:
    storage = KVStorage([TARGET, DRAFT], num_pages=5, page_size=16)
    shapes = [(5, 16, 2, 4)] * 6 + [(5, 16, 1, 8)] * 2
    assert [tuple(cache.shape) for cache in all_caches(storage)] == shapes
    assert all(cache.is_contiguous() and not cache[NULL_PAGE].any() for cache in all_caches(storage))
    assert storage.layers("draft")[0, 0].dtype == torch.bfloat16


def test_no_two_caches_overlap_and_views_write_through() -> None:
    storage = KVStorage([TARGET, DRAFT], num_pages=3, page_size=2)
    for number, cache in enumerate(all_caches(storage), start=1):
        cache.fill_(number)
    for number, cache in enumerate(all_caches(storage), start=1):
        assert (cache == number).all()


def test_bytes_per_token_is_what_the_tensors_take() -> None:
    storage = KVStorage([TARGET, DRAFT], num_pages=7, page_size=16)
    num_bytes = sum(cache.numel() * cache.element_size() for cache in all_caches(storage))
    assert num_bytes == 7 * 16 * (TARGET.bytes_per_token + DRAFT.bytes_per_token)


def test_copy_page_copies_all_layers_and_touches_nothing_else() -> None:
    storage = KVStorage([TARGET, DRAFT], num_pages=4, page_size=2)
    for cache in all_caches(storage):
        cache[1:] = torch.randn_like(cache[1:])
    before = [cache.clone() for cache in all_caches(storage)]
    storage.copy_page(2, 3)
    for old, new in zip(before, all_caches(storage), strict=True):
        assert torch.equal(new[3], old[2])
        assert torch.equal(new[:3], old[:3])


def test_the_null_page_cannot_be_copied_to() -> None:
    with pytest.raises(AssertionError, match="null page"):
        KVStorage([TARGET], num_pages=2, page_size=2).copy_page(1, 0)


@pytest.mark.parametrize(
    ("groups", "num_pages", "page_size", "message"),
    [
        ([TARGET], 2, 0, "page_size is 0"),
        ([TARGET], 1, 16, "num_pages is 1"),
        ([TARGET, TARGET], 2, 16, "different names"),
    ],
)
def test_impossible_sizes_are_refused(groups: list[LayerGroup], num_pages: int, page_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVStorage(groups, num_pages, page_size)
