"""One run, phase by phase. Each takes up what an earlier process left of it, and does nothing where it is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from outrider.draft.distill.batches import frequent_tokens, split, token_weights
from outrider.draft.distill.chat_frame import read_chat_frame
from outrider.draft.distill.continuation import Generate
from outrider.draft.distill.conversations import Conversation, ConversationSampler
from outrider.draft.distill.corpus import Corpus
from outrider.draft.distill.dense_target import DenseTarget, fastest_dtype, tap_layers
from outrider.draft.distill.directory import RunDirectory, write_text
from outrider.draft.distill.generation import Generation
from outrider.draft.distill.head import DraftHead, HeadShape
from outrider.draft.distill.least_squares import begin_with_fit, fit_hidden_states
from outrider.draft.distill.progress import Progress
from outrider.draft.distill.settings import GENERATION_SHARE, TRAINING_SHARE, DistillSettings
from outrider.draft.distill.trainer import Trainer
from outrider.draft.distill.training_state import TrainingProgress, load_weights
from outrider.verify.checkpoint.chat_template import load_chat_template
from outrider.verify.checkpoint.checkpoint import Checkpoint
from outrider.verify.checkpoint.config import ModelConfig
from outrider.verify.checkpoint.tokenizer import load_tokenizer

Report = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Dialogues:
    """What a run learns from, what it is tested on, and the seconds of generating both."""

    learned: list[Conversation]
    held_out: list[Conversation]
    seconds: float


@dataclass(frozen=True, slots=True)
class TrainedHead:
    """``token_map`` ``[draft_vocab]``: the target's token for each word; ``coverage``: the words' part of all that the
    target says; ``taps``: layers of the target before which its residual stream is read."""

    shape: HeadShape
    weights: dict[str, Tensor]
    token_map: Tensor
    coverage: float
    taps: tuple[int, ...]
    progress: TrainingProgress


def generate_dialogues(
    directory: RunDirectory,
    settings: DistillSettings,
    model_path: Path,
    eos_token_ids: Iterable[int],
    make_generate: Callable[[], Generate],
    report: Report,
) -> Dialogues:
    """The run's conversations; ``make_generate``, which may load a model, is called only where some are missing.

    Raises:
        UnsupportedCheckpoint: the target has no chat template that can be used.
        CorpusFailed: it cannot be brought to talk.
        OSError: the conversations cannot be kept.
    """
    with Corpus(directory.conversations) as corpus:
        tokenizer = load_tokenizer(model_path)
        frame = read_chat_frame(load_chat_template(model_path), tokenizer, eos_token_ids)
        sampler = ConversationSampler(frame, tokenizer, settings)
        max_seconds = settings.minutes * 60 * GENERATION_SHARE or float("inf")
        generation = Generation(sampler, corpus, settings.tokens, max_seconds)
        if not generation.is_finished:
            generation.run(make_generate(), report)
        learned, held_out = split(generation.conversations)
        return Dialogues(learned, held_out, corpus.seconds)


def train_head(
    directory: RunDirectory,
    settings: DistillSettings,
    checkpoint: Checkpoint,
    eos_token_ids: Iterable[int],
    dialogues: Dialogues,
    device: torch.device,
    save_seconds: float,
    report: Report,
) -> TrainedHead:
    """The run's head, trained to the end.

    Raises:
        ValueError: the settings do not fit the target.
        TrainingDiverged: the loss is no number.
        OSError: the state cannot be kept.
    """
    config = checkpoint.config
    weights = token_weights(dialogues.learned)
    token_map = frequent_tokens(weights, settings.draft_vocab, config.vocab_size, eos_token_ids)
    coverage = sum(weights.get(token_id, 0.0) for token_id in token_map.tolist()) / sum(weights.values())
    shape = head_shape(settings, config, len(token_map))
    taps = tap_layers(config.num_layers)
    path = directory.training_state
    found, progress = load_weights(path) if path.exists() else ({}, TrainingProgress())
    if progress.is_done:
        return TrainedHead(shape, found, token_map, coverage, taps, progress)
    longest = max(len(conversation.token_ids) for conversation in (*dialogues.learned, *dialogues.held_out))
    target = DenseTarget(checkpoint, _dtype(directory, settings, config, device), device, longest)
    if found:
        head = DraftHead(shape, {name: weight.to(device) for name, weight in found.items()})
    else:
        report(Progress("training", 0.0, "finding where to begin"))
        begun_at = time.monotonic()
        fit = fit_hidden_states(target, dialogues.learned, settings.batch_tokens)
        head = begin_with_fit(shape, target, token_map, fit, settings.seed)
        progress.seconds = time.monotonic() - begun_at
    max_seconds = settings.minutes * 60 * (GENERATION_SHARE + TRAINING_SHARE) - dialogues.seconds
    # Generating may have taken longer than its share, to have two dialogues at least; training gets some time always.
    max_seconds = max(max_seconds, settings.minutes * 60 * TRAINING_SHARE / 2) if settings.minutes else float("inf")
    trainer = Trainer(head, target, token_map, settings, max_seconds, path, save_seconds, progress.seconds)
    trainer.run(dialogues.learned, dialogues.held_out, report)
    found = {name: weight.detach().cpu() for name, weight in head.weights.items()}
    return TrainedHead(shape, found, token_map, coverage, taps, trainer.progress)


def _dtype(
    directory: RunDirectory, settings: DistillSettings, config: ModelConfig, device: torch.device
) -> torch.dtype:
    """What the run computes in: once it is chosen, it stays."""
    name = settings.dtype
    if name == "auto" and directory.dtype.exists():
        name = directory.dtype.read_text(encoding="utf-8")
    found = {"bfloat16": torch.bfloat16, "float32": torch.float32}.get(name) or fastest_dtype(config, device)
    write_text(directory.dtype, str(found).removeprefix("torch."))
    return found


def head_shape(settings: DistillSettings, config: ModelConfig, draft_vocab_size: int) -> HeadShape:
    """The head that the settings ask for, for this target.

    Raises:
        ValueError: its heads do not fit together; the message begins with the setting's name.
    """
    num_kv_heads = settings.kv_heads or config.num_kv_heads
    if config.num_heads % num_kv_heads:
        raise ValueError(f"kv_heads must divide the model's {config.num_heads} query heads, not {num_kv_heads}")
    return HeadShape(
        hidden_size=config.hidden_size,
        intermediate_size=settings.intermediate or config.intermediate_size,
        num_layers=settings.layers,
        num_heads=config.num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=config.head_dim,
        draft_vocab_size=draft_vocab_size,
        rms_norm_eps=config.rms_norm_eps,
    )
