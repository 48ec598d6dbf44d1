"""All of one run: generating, training, writing the draft, measuring it, telling about it."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from outrider.draft.distill.card import Acceptance, Card
from outrider.draft.distill.directory import RunDirectory, write_text
from outrider.draft.distill.distillation import Dialogues, TrainedHead, generate_dialogues, head_shape, train_head
from outrider.draft.distill.export import write_draft
from outrider.draft.distill.progress import Progress
from outrider.draft.distill.settings import GENERATION_SHARE, TRAINING_SHARE, DistillSettings
from outrider.server.bench.plot import PlotUnavailable
from outrider.server.bench.prompts import Prompt
from outrider.server.distill.continuations import FEW_RUNNING, MAX_RUNNING, EngineContinuations, cache_mib
from outrider.server.distill.curves import save_curves
from outrider.server.distill.licence import target_licence
from outrider.server.distill.validation import measure_acceptance, total
from outrider.server.engine.settings import EngineSettings
from outrider.verify.checkpoint.chat_template import load_chat_template
from outrider.verify.checkpoint.checkpoint import open_checkpoint
from outrider.verify.checkpoint.tokenizer import load_tokenizer

PLOT_FILE = "training.png"
ANSWER_TOKENS = 128
SHORT_MINUTES = 20.0
MAX_HELD_OUT_QUESTIONS = 64
HELD_OUT = "held out, self-sampled"
ALL_QUESTIONS = "all of the questions"


@dataclass(frozen=True, slots=True)
class Machinery:
    """What a run is done with, and does not depend on. ``chain``: guesses a step in validation."""

    device: str = "auto"
    num_threads: int = 0
    save_seconds: float = 60.0
    chain: int = 4
    description: str = "an unnamed machine"
    command: str = "outrider distill"


@dataclass(frozen=True, slots=True)
class Watcher:
    """Who hears of a run: sentences, and the progress of one phase at a time."""

    say: Callable[[str], None]
    phase: Callable[[str], AbstractContextManager[Callable[[Progress], None]]]


class Run:
    """One run in ``out``; ``distill`` does what is left of it.

    Raises:
        RunRefused: the directory cannot be used.
        UnsupportedCheckpoint: the model cannot be used.
        ValueError: the settings do not fit it.
        OSError: the directory cannot be written.
    """

    def __init__(
        self, model: tuple[Path, str], out: Path, settings: DistillSettings, machinery: Machinery, watcher: Watcher
    ) -> None:
        self._path, self._name = model
        self._settings, self._machinery, self._watcher = settings, machinery, watcher
        self._checkpoint = open_checkpoint(self._path)
        head_shape(settings, self._checkpoint.config, settings.draft_vocab)  # better refused now than after a night
        target = {"model": self._name, "fingerprint": self._checkpoint.fingerprint}
        self._directory = RunDirectory(out, settings, target)
        tokenizer = load_tokenizer(self._path)
        self._eos_token_ids = tuple(sorted({*self._checkpoint.config.eos_token_ids, *tokenizer.eos_token_ids}))
        if machinery.num_threads:
            torch.set_num_threads(machinery.num_threads)

    def distill(self, questions: list[Prompt]) -> list[Acceptance]:
        """Do what is left to do; what was measured. ``questions``: measured by category, beside those held out.

        Raises:
            CorpusFailed, GenerationFailed: the model cannot be brought to talk.
            TrainingDiverged: the loss is no number.
            ValidationFailed: the engine cannot use the draft.
            ValueError: the settings do not fit the model.
            OSError: a file cannot be written.
        """
        dialogues = self._generate()
        trained = self._train(dialogues)
        write_draft(self._directory.out, trained, self._checkpoint.config, self._name, self._machinery.chain)
        has_plot = self._plot(trained)
        acceptance, seconds = self._validate(dialogues, questions)
        spent = {"generating": dialogues.seconds, "training": trained.progress.seconds, "validating": seconds}
        card = Card(
            target=self._name,
            licence=target_licence(self._path),
            command=self._machinery.command,
            machine=self._machinery.description,
            settings=self._settings,
            conversations=dialogues.learned,
            progress=trained.progress,
            num_parameters=sum(weight.numel() for weight in trained.weights.values()),
            num_bytes=sum(file.stat().st_size for file in self._directory.out.glob("*.safetensors")),
            draft_vocab_size=len(trained.token_map),
            coverage=trained.coverage,
            chain=self._machinery.chain,
            acceptance=acceptance,
            seconds=spent,
            has_plot=has_plot,
        )
        write_text(self._directory.out / "README.md", card.text())
        return acceptance

    def _generate(self) -> Dialogues:
        def make_generate() -> EngineContinuations:
            self._watcher.say(f"{self._name} writes dialogues with itself")
            is_short = 0 < self._settings.minutes < SHORT_MINUTES
            max_running = FEW_RUNNING if is_short else MAX_RUNNING
            return EngineContinuations(self._path, self._name, self._machinery.num_threads, max_running)

        with self._watcher.phase("generating") as report:
            dialogues = generate_dialogues(
                self._directory, self._settings, self._path, self._eos_token_ids, make_generate, report
            )
        gc.collect()  # the engine's keys and values, before the training needs the room
        num_tokens = sum(conversation.num_answer_tokens for conversation in dialogues.learned)
        self._watcher.say(
            f"{len(dialogues.learned):,} dialogues with {num_tokens:,} answer tokens to learn from, "
            f"{len(dialogues.held_out):,} held out, in {dialogues.seconds / 60:.1f} minutes"
        )
        return dialogues

    def _train(self, dialogues: Dialogues) -> TrainedHead:
        name = self._machinery.device
        if name == "auto":
            name = "cuda" if torch.cuda.is_available() else "cpu"
        with self._watcher.phase("training") as report:
            trained = train_head(
                self._directory,
                self._settings,
                self._checkpoint,
                self._eos_token_ids,
                dialogues,
                torch.device(name),
                self._machinery.save_seconds,
                report,
            )
        progress = trained.progress
        self._watcher.say(
            f"trained for {progress.step:,} steps on {progress.num_tokens:,} tokens, "
            f"in {progress.seconds / 60:.1f} minutes"
        )
        return trained

    def _plot(self, trained: TrainedHead) -> bool:
        try:
            title = f"a draft for {self._name}: {trained.shape.num_layers} layer, {len(trained.token_map):,} words"
            save_curves(trained.progress.points, title, self._directory.out / PLOT_FILE)
        except PlotUnavailable as error:
            self._watcher.say(f"no plot of the training: {error}")
            return False
        return True

    def _validate(self, dialogues: Dialogues, questions: list[Prompt]) -> tuple[list[Acceptance], float]:
        asked = {HELD_OUT: [conversation.prompt for conversation in dialogues.held_out[:MAX_HELD_OUT_QUESTIONS]]}
        asked |= self._by_category(questions)
        key = {name: len(prompts) for name, prompts in asked.items()} | {"chain": self._machinery.chain}
        if (found := self._earlier_validation(key)) is not None:
            return found
        minutes = self._settings.minutes
        settings = EngineSettings(
            model_path=str(self._path),
            model_name=self._name,
            num_threads=self._machinery.num_threads,
            drafter="model",
            draft_model_path=str(self._directory.out),
            max_draft_tokens=self._machinery.chain,
            adaptive_drafts=False,
            kv_cache_mib=min(cache_mib(), 512),
        )
        begun_at = time.monotonic()
        with self._watcher.phase("validating") as report:
            share = minutes * 60 * (1.0 - GENERATION_SHARE - TRAINING_SHARE) or float("inf")
            acceptance = measure_acceptance(settings, asked, ANSWER_TOKENS, share, report)
        if len(acceptance) > 2:
            acceptance.append(total(ALL_QUESTIONS, acceptance[1:]))
        seconds = time.monotonic() - begun_at
        kept = {"key": key, "seconds": seconds, "acceptance": [asdict(one) for one in acceptance]}
        write_text(self._directory.validation, json.dumps(kept, indent=1) + "\n")
        return acceptance, seconds

    def _earlier_validation(self, key: dict[str, int]) -> tuple[list[Acceptance], float] | None:
        """What an earlier process measured, if it asked the same."""
        if not self._directory.validation.exists():
            return None
        kept = json.loads(self._directory.validation.read_text(encoding="utf-8"))
        if kept["key"] != key:
            return None
        return [Acceptance(**one) for one in kept["acceptance"]], kept["seconds"]

    def _by_category(self, questions: list[Prompt]) -> dict[str, list[tuple[int, ...]]]:
        template, tokenizer = load_chat_template(self._path), load_tokenizer(self._path)
        found: dict[str, list[tuple[int, ...]]] = {}
        for question in questions:
            category = question.category or "questions"
            found.setdefault(category, []).append(tuple(template.encode(question.messages, tokenizer)))
        return found
