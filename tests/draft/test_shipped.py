"""The drafts that come with Outrider are found by the shape of the target they were made for."""

from __future__ import annotations

import json
from pathlib import Path

from outrider.draft.shipped import shipped_draft, shipped_drafts


def save(folder: Path, name: str, hidden_size: int = 48, vocab_size: int = 259) -> Path:
    """A draft's folder, as the speculators format has it."""
    path = folder / name
    path.mkdir(parents=True)
    config = {
        "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": f"org/{name}"}},
        "transformer_layer_config": {"hidden_size": hidden_size, "vocab_size": vocab_size},
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_bytes(b"x" * 100)
    return path


def test_a_draft_is_found_for_its_target_and_for_no_other(tmp_path: Path) -> None:
    path = save(tmp_path, "a")
    save(tmp_path, "b", hidden_size=64)
    found = shipped_draft(48, 4, 259, tmp_path)
    assert found is not None
    assert (found.path, found.kind, found.target, found.num_bytes) == (path, "eagle3", "org/a", 100)
    for other in ((48, 4, 260), (50, 4, 259), (48, 3, 259)):
        assert shipped_draft(*other, tmp_path) is None, "it would read what this target does not have"
    assert [draft.target for draft in shipped_drafts(tmp_path)] == ["org/a", "org/b"]


def test_no_drafts_are_no_error(tmp_path: Path) -> None:
    assert shipped_drafts(tmp_path / "absent") == []
    assert shipped_draft(48, 4, 259, tmp_path) is None
