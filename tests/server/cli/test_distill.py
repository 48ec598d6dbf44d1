"""``outrider distill`` from end to end on a tiny model, killed where it hurts."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_runs import greedy, make_engine, run_one
from safetensors.torch import load_file
from tiny_model import save_tiny_model, tiny_llama_config

OUTRIDER = str(Path(sysconfig.get_path("scripts")) / "outrider")
SMALL = {
    "--minutes": "0",
    "--tokens": "600",
    "--epochs": "2",
    "--draft-vocab": "64",
    "--batch-tokens": "256",
    "--max-turn-tokens": "12",
    "--max-answer-tokens": "24",
    "--num-threads": "1",
    "--save-every": "0",
    "--dtype": "float32",
}

pytestmark = pytest.mark.timeout(300)  # each start of the command loads torch


def command(model: Path, out: Path, *more: str) -> list[str]:
    options = [word for option in SMALL.items() for word in option]
    return [OUTRIDER, "distill", "--model", str(model), "--out", str(out), *options, *more]


def distill(model: Path, out: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(model, out, *more), capture_output=True, text=True, check=False)


def kill_once(model: Path, out: Path, is_time: Callable[[], bool]) -> None:
    """Start the command and end it without a word when it is time."""
    with subprocess.Popen(command(model, out), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        while not is_time():
            assert process.poll() is None, f"it ended before it was time: {process.stderr and process.stderr.read()!r}"
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("target"), tiny_llama_config(num_hidden_layers=4))


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("questions") / "questions.jsonl"
    lines = [{"category": name, "turns": [f"{name} {number}"]} for number in range(2) for name in ("prose", "code")]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture(scope="module")
def undisturbed(model: Path, questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run makes that nobody kills."""
    out = tmp_path_factory.mktemp("undisturbed")
    done = distill(model, out, "--questions", str(questions))
    assert done.returncode == 0, done.stderr
    return out


def test_it_makes_a_draft_a_card_and_a_plot(undisturbed: Path, model: Path) -> None:
    names = {path.name for path in undisturbed.iterdir()}
    assert names == {"config.json", "model.safetensors", "README.md", "training.png", "work"}
    config = json.loads((undisturbed / "config.json").read_text())
    tensors = load_file(undisturbed / "model.safetensors")
    words = tensors["t2d"].nonzero()[:, 0]
    assert (tensors["d2t"] + words.new_tensor(range(64))).tolist() == words.tolist()
    assert config["draft_vocab_size"] == len(words) == len(tensors["lm_head.weight"]) == 64
    assert config["speculators_model_type"] == "eagle3"
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 2]
    assert config["speculators_config"]["verifier"]["name_or_path"] == model.name

    card = (undisturbed / "README.md").read_text()
    lengths = {name: float(found) for name, found in re.findall(r"^\| (.+?) \| \d+ \| \d+ \| ([\d.]+) \|", card, re.M)}
    assert lengths.keys() == {"held out, self-sampled", "prose", "code", "all of the questions"}
    assert all(1.0 <= length <= 5.0 for length in lengths.values())
    assert str(undisturbed) not in card, "where it was made is nobody's business"
    assert "--tokens 600" in card and "Seed 0" in card


def test_the_draft_it_makes_changes_no_token(undisturbed: Path, model: Path) -> None:
    prompt = [1, 87, 85, 71, 84, 201, 40, 41, 42]
    drafted = make_engine(model, "model", draft_model_path=str(undisturbed), adaptive_drafts=False, max_draft_tokens=4)
    plain = make_engine(model, "none")
    found, wanted = (run_one(engine, greedy(prompt, max_tokens=60)) for engine in (drafted, plain))
    assert found.token_ids == wanted.token_ids
    assert found.num_draft_tokens > 60


def test_a_run_that_is_killed_at_its_worst_moments_makes_the_same_draft(
    undisturbed: Path, model: Path, questions: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    conversations, state = out / "work" / "conversations.jsonl", out / "work" / "training.safetensors"
    kill_once(model, out, lambda: conversations.exists() and conversations.stat().st_size > 2000)
    kill_once(model, out, state.exists)
    done = distill(model, out, "--questions", str(questions))
    assert done.returncode == 0, done.stderr
    assert (out / "model.safetensors").read_bytes() == (undisturbed / "model.safetensors").read_bytes()

    again = distill(model, out, "--questions", str(questions))
    assert again.returncode == 0, again.stderr
    assert (out / "model.safetensors").read_bytes() == (undisturbed / "model.safetensors").read_bytes()


def test_a_full_disk_is_a_sentence_and_what_is_there_is_kept(undisturbed: Path, model: Path, tmp_path: Path) -> None:
    def small_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))

    out = tmp_path / "out"
    full = subprocess.run(command(model, out), capture_output=True, text=True, check=False, preexec_fn=small_disk)
    assert full.returncode == 1
    assert full.stderr.strip().splitlines()[-1].startswith(f"outrider distill: cannot write to {out}: ")
    done = distill(model, out)
    assert done.returncode == 0, done.stderr
    assert (out / "model.safetensors").read_bytes() == (undisturbed / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("more", "code", "problem"),
    [
        (["--model", "/nowhere/model"], 1, "there is no model '/nowhere/model'"),
        (["--questions", "/nowhere/questions.jsonl"], 1, "cannot read /nowhere/questions.jsonl"),
        (["--seed", "1"], 1, "holds a run with seed 0, not 1"),
        (["--epochs", "0"], 2, "--minutes must be more than 0 unless both tokens and epochs are given"),
        (["--layers", "3"], 2, "--layers must be from 1 to 2, not 3"),
        (["--save-every", "-1"], 2, "--save-every must be 0 or more seconds"),
        (["--chain", "0"], 2, "must be a whole number of at least 1"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_sentence(
    more: list[str], code: int, problem: str, undisturbed: Path, model: Path
) -> None:
    before = {path: path.stat().st_mtime_ns for path in undisturbed.rglob("*")}
    failed = distill(model, undisturbed, *more)
    assert failed.returncode == code
    assert problem in failed.stderr.strip().splitlines()[-1]
    assert {path: path.stat().st_mtime_ns for path in undisturbed.rglob("*")} == before


def test_kv_heads_that_do_not_fit_are_refused(model: Path, tmp_path: Path) -> None:
    failed = distill(model, tmp_path / "out", "--kv-heads", "3")
    assert failed.returncode == 1
    assert "kv_heads must divide the model's 4 query heads, not 3" in failed.stderr
    assert not (tmp_path / "out" / "work" / "conversations.jsonl").exists(), "it is said before an hour is spent"


def test_ctrl_c_ends_it_without_a_traceback(model: Path, tmp_path: Path) -> None:
    conversations = tmp_path / "out" / "work" / "conversations.jsonl"
    with subprocess.Popen(command(model, tmp_path / "out"), stderr=subprocess.PIPE, text=True) as process:
        while not (conversations.exists() and conversations.stat().st_size):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in said
    assert os.path.exists(conversations)
