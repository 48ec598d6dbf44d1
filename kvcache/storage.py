"""The tensors behind the pages: keys and values of every layer, addressed by page and offset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.operations import NULL_PAGE


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose keys and values have one shape: the target's, or a draft's."""

    name: str
    num_layers: int
    num_kv_heads: int
    width: int  # elements of one token and KV head: head_dim, or what the kernels make of it
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers of the group."""
        return 2 * self.num_layers * self.num_kv_heads * self.width * self.dtype.itemsize


class KVStorage:
    """Keys and values of ``num_pages`` pages, ``NULL_PAGE`` among them. That one is zero, the others hold anything.

    One page id covers ``page_size`` tokens in every layer of every group, so target and draft share one
    page table.
    """

    def __init__(
        self, groups: Sequence[LayerGroup], num_pages: int, page_size: int, device: torch.device | str = "cpu"
    ) -> None:
        if page_size < 1:
            raise ValueError(f"page_size is {page_size}; it must be at least 1 token")
        if num_pages < 2:
            raise ValueError(f"num_pages is {num_pages}; it must be at least 2, as page {NULL_PAGE} is never used")
        if len({group.name for group in groups}) != len(groups):
            raise ValueError(f"layer groups must have different names; got {[group.name for group in groups]}")
        self.groups = tuple(groups)
        self.num_pages = num_pages
        self.page_size = page_size
        # name -> [num_layers, 2 (key, value), num_pages, page_size, num_kv_heads, width]
        self._caches = {
            group.name: torch.empty(
                (group.num_layers, 2, num_pages, page_size, group.num_kv_heads, group.width),
                dtype=group.dtype,
                device=device,
            )
            for group in groups
        }
        # Only this: filling a cache of gigabytes costs a start its first seconds, and memory before it is used.
        for cache in self._caches.values():
            cache[:, :, NULL_PAGE] = 0

    def layers(self, group: str) -> Tensor:
        """Keys and values of all layers of a group: ``[num_layers, 2, num_pages, page_size, num_kv_heads, width]``."""
        return self._caches[group]

    def copy_page(self, source: int, destination: int) -> None:
        """Copy a page in all layers of all groups."""
        assert destination != NULL_PAGE, "the null page is never written"
        for cache in self._caches.values():
            cache[:, :, destination].copy_(cache[:, :, source])
