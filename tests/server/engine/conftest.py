"""What the engine's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def number_of_torchs_threads() -> Iterator[None]:
    """An engine sets it for the whole process."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
