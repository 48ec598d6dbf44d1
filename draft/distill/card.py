"""The model card: what a draft was made from and how, and what it was measured to do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.draft.distill.conversations import Conversation
from outrider.draft.distill.settings import DistillSettings
from outrider.draft.distill.training_state import TrainingProgress


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What the engine measured on some questions, greedy. ``num_steps``: passes of the target that drafted."""

    name: str
    num_questions: int
    num_tokens: int
    num_steps: int
    num_draft_tokens: int
    num_accepted: int

    @property
    def acceptance_length(self) -> float:
        """Tokens a step gave, 1 + accepted/steps."""
        return 1.0 + self.num_accepted / self.num_steps if self.num_steps else math.nan

    @property
    def accepted_share(self) -> float:
        return self.num_accepted / self.num_draft_tokens if self.num_draft_tokens else math.nan


@dataclass(frozen=True, slots=True)
class Card:
    """Everything the card tells. ``command``: what made the draft; ``seconds``: by phase."""

    target: str
    licence: str | None
    command: str
    machine: str
    settings: DistillSettings
    conversations: Sequence[Conversation]
    progress: TrainingProgress
    num_parameters: int
    num_bytes: int
    draft_vocab_size: int
    coverage: float
    chain: int
    acceptance: Sequence[Acceptance]
    seconds: Mapping[str, float]
    has_plot: bool

    def text(self) -> str:
        """Markdown, with the header that model hubs read."""
        return "\n".join([*self._header(), *self._use(), *self._data(), *self._recipe(), *self._measured()]) + "\n"

    def _header(self) -> list[str]:
        rights = self.licence or "unknown"
        return [
            "---",
            f"license: {rights}",
            f"base_model: {self.target}",
            "tags: [speculative-decoding, eagle3, speculators]",
            "---",
            "",
            f"# A draft for {self.target}",
            "",
            f"An EAGLE-3 head of {self.num_parameters / 1e6:.1f} million weights ({self.num_bytes / 1e6:.1f} MB) that "
            f"guesses the next tokens of {self.target}. It never changes an answer: the target checks every guess.",
            "",
            f"It was trained on nothing but the target's own words. Licence: that of the target, {rights}"
            + ("." if self.licence else " to the command that wrote this; look it up before you pass the draft on."),
            "",
        ]

    def _use(self) -> list[str]:
        return [
            "```sh",
            f"outrider serve --model {self.target} --draft-model THIS_DIRECTORY",
            "```",
            "",
            "The directory is in the `speculators` format: config.json, model.safetensors.",
            "",
        ]

    def _data(self) -> list[str]:
        turns = [turn for conversation in self.conversations for turn in conversation.turns]
        answers = [turn for turn in turns if turn.is_answer]
        num_tokens = sum(turn.stop - turn.start for turn in answers)
        greedy = sum(turn.stop - turn.start for turn in answers if turn.temperature == 0.0)
        return [
            "## Data",
            "",
            f"{len(self.conversations):,} dialogues that the target held with itself: questions sampled from the "
            "user's place of its chat template (Magpie, 2406.08464), most after given first words, without "
            f"repetitions; {len(answers):,} answers of {num_tokens:,} tokens, {greedy / max(num_tokens, 1):.0%} of "
            "them at temperature 0, the rest at 0.3 to 1.0. Beside these, every twentieth dialogue was held out. No "
            "other text was used.",
            "",
        ]

    def _recipe(self) -> list[str]:
        settings, progress = self.settings, self.progress
        num_trained = sum(conversation.num_answer_tokens for conversation in self.conversations)
        spent = ", ".join(f"{phase} {seconds / 60:.1f} min" for phase, seconds in self.seconds.items())
        return [
            "## Recipe",
            "",
            "```sh",
            self.command,
            "```",
            "",
            f"Seed {settings.seed}; {progress.step:,} steps of at most {settings.batch_tokens:,} rows, "
            f"{progress.num_tokens:,} predicted tokens from {num_trained:,} of answers; {settings.layers} layer"
            f"{'s' if settings.layers > 1 else ''}, begun with the best linear guess at the target's hidden state; "
            f"chains of {settings.unroll} unrolled after the first {settings.plain_part:.0%} of the training; "
            f"{self.draft_vocab_size:,} words, which are {self.coverage:.1%} of what the target says; learning rate "
            f"{settings.learning_rate:g} (Muon for matrices; half of it and AdamW for norms and words), warm-up and "
            "cosine; "
            f"directness {settings.directness:g}. Time: {spent}, on {self.machine}.",
            "",
        ]

    def _measured(self) -> list[str]:
        rows = [
            f"| {one.name} | {one.num_questions} | {one.num_tokens:,} | {_figure(one.acceptance_length)} | "
            f"{_figure(one.accepted_share, '.0%')} |"
            for one in self.acceptance
        ]
        plot = ["", "![loss and acceptance over the training](training.png)"] if self.has_plot else []
        return [
            "## Acceptance",
            "",
            f"Measured by the engine, temperature 0, chains of {self.chain} guesses, the draft alone. The acceptance "
            "length is the mean number of tokens that a pass of the target gives.",
            "",
            "| questions | number | tokens | acceptance length | guesses accepted |",
            "|---|---:|---:|---:|---:|",
            *rows,
            *plot,
        ]


def _figure(value: float, form: str = ".2f") -> str:
    return "-" if math.isnan(value) else format(value, form)
