"""What quantisation costs: figures worked out by hand, and the whole way beside transformers."""

from __future__ import annotations

import json
import math
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch
from tiny_model import byte_tokenizer, save_tiny_model, tiny_llama_config
from transformers import AutoModelForCausalLM

from outrider.kernels.operations import load_operations
from outrider.server.bench.quality import Quality, QualityMeter, Scorer, cut, measure
from outrider.server.engine.settings import EngineSettings
from outrider.verify.checkpoint.checkpoint import open_checkpoint
from outrider.verify.checkpoint.tokenizer import Tokenizer

TEXTS = ["It was a bright cold day in April, and the clocks were striking thirteen. " * 3, "A", "So be it."]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 inputs, so that there are groups of 32 to quantise."""
    config = tiny_llama_config(hidden_size=64, intermediate_size=128, head_dim=16)
    return save_tiny_model(tmp_path_factory.mktemp("model"), config)


def logits(*rows: list[float]) -> torch.Tensor:
    """Logits of which the softmax is these probabilities, moved by a number that must not matter."""
    return torch.tensor(rows).log() + 3.0


def test_the_figures_of_two_positions() -> None:
    meter = QualityMeter()
    reference = logits([0.5, 0.25, 0.25], [0.1, 0.2, 0.7])
    meter.add(reference, logits([0.25, 0.5, 0.25], [0.1, 0.2, 0.7]), torch.tensor([0, 1]))
    quality = meter.result()
    assert quality.num_tokens == 2
    # 0.5 ln(0.5/0.25) + 0.25 ln(0.25/0.5) = 0.25 ln 2 at the first position, 0 at the second
    assert quality.kl_divergence == pytest.approx(0.125 * math.log(2), rel=1e-5)
    assert quality.kl_divergence_p99 == pytest.approx(0.99 * 0.25 * math.log(2), rel=1e-5)
    assert quality.reference_perplexity == pytest.approx((0.5 * 0.2) ** -0.5, rel=1e-5)
    assert quality.perplexity == pytest.approx((0.25 * 0.2) ** -0.5, rel=1e-5)
    assert quality.perplexity_ratio == pytest.approx(2**0.5, rel=1e-5)
    assert quality.same_top_token == 0.5


def test_the_divergence_is_of_the_measured_from_the_reference_and_not_the_reverse() -> None:
    meter = QualityMeter()
    meter.add(logits([0.9, 0.1]), logits([0.5, 0.5]), torch.tensor([0]))
    assert meter.result().kl_divergence == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2), rel=1e-5)


def test_every_position_weighs_the_same_however_they_came() -> None:
    torch.manual_seed(0)
    reference, measured, next_ids = torch.randn(7, 50), torch.randn(7, 50), torch.randint(50, (7,))
    together, apart = QualityMeter(), QualityMeter()
    together.add(reference, measured, next_ids)
    for part in (slice(0, 1), slice(1, 6), slice(6, 7)):
        apart.add(reference[part], measured[part], next_ids[part])
    assert apart.result().kl_divergence == pytest.approx(together.result().kl_divergence)
    assert apart.result().perplexity == pytest.approx(together.result().perplexity)
    wanted = torch.nn.functional.kl_div(measured.log_softmax(-1), reference.softmax(-1), reduction="batchmean")
    assert together.result().kl_divergence == pytest.approx(wanted.item(), rel=1e-5)


def test_a_token_the_reference_rules_out_adds_nothing() -> None:
    meter = QualityMeter()
    meter.add(logits([0.5, 0.5, 0.0]), logits([0.4, 0.4, 0.2]), torch.tensor([0]))
    assert meter.result().kl_divergence == pytest.approx(math.log(1.25), rel=1e-5)


@pytest.mark.parametrize(
    ("max_tokens", "windows"),
    [
        (0, ["abcd", "efgh", "ij", "klm"]),
        (100, ["abcd", "efgh", "ij", "klm"]),
        (8, ["abcd", "efgh", "ij", "kl"]),
        (7, ["abcd", "efgh", "ij"]),
        (4, ["abcd", "ef"]),
    ],
)
def test_texts_are_cut_into_windows_until_enough_tokens_are_predicted(max_tokens: int, windows: list[str]) -> None:
    tokenizer = Tokenizer(byte_tokenizer(), [])
    found = cut(tokenizer, ["abcdefghij", "klm", "", "x"], 4, max_tokens)
    assert [tokenizer.decode(window) for window in found] == windows
    assert [tokenizer.decode(window) for window in cut(tokenizer, ["abcde"], 4, 0)] == ["abcd"], "e predicts nothing"


def test_control_tokens_in_a_text_are_text() -> None:
    tokenizer = Tokenizer(byte_tokenizer(), [])
    assert [len(window) for window in cut(tokenizer, ["<|im_end|>"], 100, 0)] == [10]


def test_a_scorer_reads_window_after_window_as_transformers_does(model: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(model)
    scorer = Scorer(open_checkpoint(model), load_operations("reference"), 50)
    torch.manual_seed(1)
    with torch.inference_mode():
        for num_tokens in (50, 3, 37):  # what an earlier window left in the pages must not be seen
            ids = torch.randint(3, 259, (num_tokens,))
            ours = torch.cat([scorer.logits(part, start) for start, part in zip((0, 20), ids.split(20), strict=False)])
            if num_tokens > 40:
                ours = torch.cat([ours, scorer.logits(ids[40:], 40)])
            torch.testing.assert_close(ours, theirs(ids[None]).logits[0], atol=1e-4, rtol=1e-4)


def test_the_reference_beside_itself_differs_in_nothing_and_has_transformers_perplexity(model: Path) -> None:
    reports: list[str] = []
    settings = EngineSettings(str(model), "tiny", kernels="reference")
    quality = measure(settings, TEXTS, 200, 0, reports.append)
    theirs = AutoModelForCausalLM.from_pretrained(model)
    log_likelihood, num_tokens = 0.0, 0
    for window in cut(Tokenizer(byte_tokenizer(), []), TEXTS, 200, 0):
        ids = torch.tensor(window)
        with torch.inference_mode():
            scores = theirs(ids[None]).logits[0, :-1].log_softmax(-1)
        log_likelihood += scores.gather(1, ids[1:, None]).sum().item()
        num_tokens += len(window) - 1
    assert num_tokens == 199 + 21 + 8, "the text of one token has nothing to predict"
    perplexity = pytest.approx(math.exp(-log_likelihood / num_tokens), rel=1e-4)
    assert quality == Quality(num_tokens, 0.0, 0.0, perplexity, perplexity, 1.0)
    assert quality.perplexity == quality.reference_perplexity
    assert f"{num_tokens} of {num_tokens} tokens" in reports[-1]


def test_coarser_weights_and_caches_cost_more(model: Path) -> None:
    def divergence(quantize: str, kv_cache_dtype: str) -> float:
        settings = EngineSettings(str(model), "t", kernels="cpu", quantize=quantize, kv_cache_dtype=kv_cache_dtype)
        return measure(settings, TEXTS, 64, 0, lambda _: None).kl_divergence

    exact, half, cache = divergence("none", "f32"), divergence("none", "f16"), divergence("none", "int8")
    int8, int4 = divergence("int8", "f32"), divergence("int4", "f32")
    assert 0 <= exact < 1e-9 < half < cache < 1e-3
    assert exact < int8 < int4 < 0.1


@pytest.mark.parametrize(
    ("context", "texts", "message"),
    [
        (1, TEXTS, "the context must be from 2 to 1024, what the model was made for, not 1"),
        (1025, TEXTS, "the context must be from 2 to 1024"),
        (64, ["A"], "the texts are too short: nothing follows a first token"),
    ],
)
def test_what_cannot_be_measured_is_said(model: Path, context: int, texts: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure(EngineSettings(str(model), "tiny"), texts, context, 0, lambda _: None)


def outrider(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = Path(sysconfig.get_path("scripts")) / "outrider"
    return subprocess.run([command, *arguments], capture_output=True, text=True, timeout=120)


def test_the_command_prints_the_figures_and_writes_them(model: Path, tmp_path: Path) -> None:
    texts, figures = tmp_path / "texts.txt", tmp_path / "figures.json"
    texts.write_text(TEXTS[0])
    options = ("--kernels", "reference", "--context", "100", "--max-tokens", "150")
    shown = outrider("bench", "quality", texts, "--model", model, *options, "--json", figures)
    assert shown.returncode == 0, shown.stderr
    assert "150" in shown.stdout
    assert "ratio 1.00000" in shown.stdout
    assert "100.00%" in shown.stdout
    written = json.loads(figures.read_text())
    assert written["workload"] == {"texts": "texts.txt", "context": 100, "max_tokens": 150}
    assert written["model"]["kernels"] == "reference"
    assert written["model"]["kv_cache_dtype"] == "f32"
    assert written["quality"]["num_tokens"] == 150
    assert written["quality"]["kl_divergence"] == 0


def test_a_mistake_is_a_sentence(model: Path, tmp_path: Path) -> None:
    failed = outrider("bench", "quality", tmp_path / "none.txt", "--model", model)
    assert failed.returncode == 1
    assert failed.stderr.startswith("outrider bench quality: cannot read")
    (tmp_path / "a.txt").write_text("some text")
    failed = outrider("bench", "quality", tmp_path / "a.txt", "--model", model, "--context", "5000")
    assert failed.returncode == 1
    assert "the context must be from 2 to 1024" in failed.stderr
    failed = outrider("bench", "quality", tmp_path / "a.txt", "--kernels", "reference", "--quantize", "int4")
    assert failed.returncode == 2
    assert "--quantize must be none with the reference kernels" in failed.stderr
