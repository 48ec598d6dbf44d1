from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_model import save_tiny_model, tiny_llama_config
from tiny_training import greedy_conversations

from outrider.draft.distill.conversations import Conversation
from outrider.draft.distill.dense_target import DenseTarget
from outrider.verify.checkpoint.checkpoint import open_checkpoint


@pytest.fixture(autouse=True)
def gradients() -> Iterator[None]:
    """An engine of an earlier test may have turned them off for all of the process."""
    with torch.enable_grad():
        yield


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices of this size gain nothing by two, and lose much where another process takes a core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("target"), tiny_llama_config(num_hidden_layers=4))


@pytest.fixture(scope="session")
def target(target_path: Path) -> DenseTarget:
    return DenseTarget(open_checkpoint(target_path), torch.float32, torch.device("cpu"), max_length=64)


@pytest.fixture(scope="session")
def conversations(target: DenseTarget) -> list[Conversation]:
    return greedy_conversations(target)
