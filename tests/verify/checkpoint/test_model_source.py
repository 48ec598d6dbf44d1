"""What a user calls a model, and where that is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outrider.verify.checkpoint.cache import cache_dir
from outrider.verify.checkpoint.config import UnsupportedCheckpoint
from outrider.verify.checkpoint.source import SourceNotFound, model_name, resolve_source


def test_the_cache_directory_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OUTRIDER_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "outrider"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_dir() == Path("/x/outrider")
    monkeypatch.setenv("OUTRIDER_CACHE", "~/own")
    assert cache_dir() == tmp_path / "own"


@pytest.mark.parametrize("name", ["default", "SmolLM2-135M-Instruct"])
def test_the_default_model(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    with pytest.raises(SourceNotFound, match="outrider models pull"):
        resolve_source(name)
    file = tmp_path / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    file.parent.mkdir()
    file.write_bytes(b"GGUF")
    assert resolve_source(name) == file
    assert model_name(name) == "SmolLM2-135M-Instruct"


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "my-model.Q8_0.gguf"
    file.write_bytes(b"GGUF")
    assert resolve_source(str(file)) == file and model_name(str(file)) == "my-model.Q8_0"
    assert resolve_source(str(tmp_path)) == tmp_path and model_name(str(tmp_path)) == tmp_path.name
    monkeypatch.chdir(tmp_path)
    assert model_name(".") == tmp_path.name
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(UnsupportedCheckpoint, match=r"model\.bin is neither"):
        resolve_source(str(tmp_path / "model.bin"))
    for missing in ("nothing", "a/b/c", "models/absent.gguf", "/absent", "../up"):
        with pytest.raises(SourceNotFound, match="there is no model"):
            resolve_source(missing)


def test_a_hub_id_that_cannot_be_reached_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    # Read once at import, so the environment would come too late.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(SourceNotFound, match="some-org/some-model is not in the local Hugging Face cache"):
        resolve_source("some-org/some-model")
    assert model_name("some-org/some-model") == "some-org/some-model"


def test_a_hub_id_in_the_local_cache_needs_no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository: Any = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "0123456789012345678901234567890123456789"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert resolve_source("org/name") == snapshot


def test_an_empty_name_is_not_the_present_directory() -> None:
    for source in ("", "  "):
        with pytest.raises(SourceNotFound, match="the model's name is empty"):
            resolve_source(source)
