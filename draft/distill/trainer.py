"""Training a head on a corpus: features by the target, chains unrolled, one optimizer step a batch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from outrider.draft.distill.batches import Batch, make_batch, plan_epoch
from outrider.draft.distill.conversations import Conversation
from outrider.draft.distill.dense_target import DenseTarget
from outrider.draft.distill.head import DraftHead, ReadyHead
from outrider.draft.distill.progress import Progress
from outrider.draft.distill.settings import DistillSettings
from outrider.draft.distill.training_state import (
    CurvePoint,
    TrainingProgress,
    load_training_state,
    save_training_state,
)
from outrider.draft.distill.unrolled import acceptance_loss, unroll

WARMUP_STEPS = 40
LAST_RATE = 0.02  # of the learning rate, at the end of the cosine
STEP_DISCOUNT = 0.8  # a later guess of a chain is reached less often
MAX_GRADIENT_NORM = 1.0
NUM_POINTS = 100  # of the training curve
NUM_HELD_OUT_POINTS = 5
MAX_HELD_OUT = 16  # conversations, so that looking at them takes seconds
HELD_OUT_STEPS = 6  # guesses of a chain that are looked at


class TrainingDiverged(Exception):
    """The loss is no number any more; the message says what to do."""


class Trainer:
    """Trains until ``max_seconds`` (over all runs) or the settings' epochs, whichever comes first.

    The state lies in ``path``, written every ``save_seconds`` and at the end: a trainer made with the same arguments
    goes on from there, to the same bits where epochs decide, not time.
    ``token_map`` ``[draft_vocab]`` int64: the target's token for each word of the draft. ``spent_seconds``: on what
    came before the first step, and counts.
    """

    def __init__(
        self,
        head: DraftHead,
        target: DenseTarget,
        token_map: Tensor,
        settings: DistillSettings,
        max_seconds: float,
        path: Path,
        save_seconds: float = 60.0,
        spent_seconds: float = 0.0,
    ) -> None:
        self.head = head
        self._target = target
        self._device, self._dtype = target.embedding.device, target.embedding.dtype
        self.token_map = token_map.to(self._device)
        self._words = torch.full((target.config.vocab_size,), -1, device=self._device)  # [vocab_size], -1: none
        self._words[self.token_map] = torch.arange(len(token_map), device=self._device)
        self._target_words = target.head[self.token_map]  # [draft_vocab, hidden]
        self._settings = settings
        self._max_seconds = max_seconds
        self._path = path
        self._save_seconds = save_seconds
        self._optimizers = _make_optimizers(head, settings.learning_rate)
        self.progress = TrainingProgress(seconds=spent_seconds)
        if path.exists():
            self.progress = load_training_state(path, head.weights, self._optimizers)

    @torch.enable_grad()
    def run(
        self,
        conversations: Sequence[Conversation],
        held_out: Sequence[Conversation],
        report: Callable[[Progress], None],
    ) -> None:
        """Go on to the end.

        Raises:
            TrainingDiverged: the loss is no number.
            OSError: the state cannot be written.
        """
        progress, settings = self.progress, self._settings
        num_steps = math.inf
        if settings.epochs:
            num_steps = math.ceil(settings.epochs * len(plan_epoch(conversations, settings.batch_tokens, 0, 0)))
        means = _Means()
        saved_at = begun_at = time.monotonic()
        seconds_before = progress.seconds
        batches = self._batches(conversations, progress.step)
        while not progress.is_done:
            done = min(max(progress.step / num_steps, progress.seconds / self._max_seconds), 1.0)
            self._set_rate(done)
            num_steps_unrolled = 1 if done < settings.plain_part else settings.unroll
            loss, matches = self._step(make_batch(next(batches), self._device), num_steps_unrolled)
            means.add(loss, *matches)
            progress.step += 1
            progress.seconds = seconds_before + time.monotonic() - begun_at
            done = min(max(progress.step / num_steps, progress.seconds / self._max_seconds), 1.0)
            progress.is_done = done >= 1.0
            self._note(means, done)
            if done * NUM_HELD_OUT_POINTS >= sum(point.loss is None for point in progress.points) + 1:
                self._look_at(held_out[:MAX_HELD_OUT], done)
            progress.seconds = seconds_before + time.monotonic() - begun_at
            if progress.is_done or time.monotonic() - saved_at >= self._save_seconds:
                save_training_state(self._path, self.head.weights, self._optimizers, progress)
                saved_at = time.monotonic()
            report(Progress("training", done, self._detail()))

    def _batches(self, conversations: Sequence[Conversation], skip: int) -> Iterator[list[Conversation]]:
        """Epoch after epoch, without the first ``skip`` batches."""
        epoch = 0
        while True:
            batches = plan_epoch(conversations, self._settings.batch_tokens, self._settings.seed, epoch)
            for places in batches[skip:]:
                yield [conversations[place] for place in places]
            skip = max(skip - len(batches), 0)
            epoch += 1

    def _step(self, batch: Batch, num_unrolled: int) -> tuple[float, list[float]]:
        """One optimizer step: the loss of first guesses, and for each unrolled step how often a guess was right."""
        ready, settings = self.head.ready(self._dtype), self._settings
        target = self._target.forward(batch.token_ids)
        counts = (batch.weights > 0) & (self._words[next_tokens(batch.token_ids)] >= 0)  # [num_seqs, length]
        rows = counts.flatten().nonzero()[:, 0]
        probs = functional.linear(target.hidden.flatten(0, 1)[rows], self._target_words).float().softmax(dim=-1)
        likeliest = probs.argmax(dim=-1)
        total, losses, matches = torch.zeros((), device=self._device), [], []
        for step, residual in enumerate(self._unroll(ready, batch, target.features, num_unrolled)):
            belongs = rows % batch.token_ids.shape[1] >= step  # to a chain
            weights = batch.weights.flatten()[rows[belongs]]
            logits = ready.logits(residual.flatten(0, 1)[rows[belongs]])
            loss = acceptance_loss(logits, probs[belongs], weights, settings.directness)
            loss = loss / weights.sum().clamp(min=1.0)
            total = total + loss * STEP_DISCOUNT**step
            right = logits.detach().argmax(dim=-1) == likeliest[belongs]
            losses.append(loss.item())
            matches.append(right.float().sum().item() / max(len(right), 1))
        self._update(total)
        self.progress.num_tokens += batch.num_tokens
        return losses[0], matches

    def _update(self, loss: Tensor) -> None:
        if not math.isfinite(loss.item()):
            raise TrainingDiverged(
                f"the loss of step {self.progress.step} is no number; "
                f"try a learning rate lower than {self._settings.learning_rate:g}"
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.weights.values(), MAX_GRADIENT_NORM)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def _unroll(self, ready: ReadyHead, batch: Batch, features: Tensor, num_steps: int) -> Iterator[Tensor]:
        embeddings = functional.embedding(batch.token_ids, self._target.embedding)
        return unroll(ready, embeddings, features, self._target.rotary(batch.token_ids.shape[1]), num_steps)

    @torch.no_grad()
    def held_out_acceptance(self, conversations: Sequence[Conversation]) -> tuple[float, ...]:
        """Of each chain position, how often the guess is what the target said at temperature 0.

        Only chains whose guesses so far were right count; 0 where there is none.
        """
        ready = self.head.ready(self._dtype)
        reached, right = [0] * HELD_OUT_STEPS, [0] * HELD_OUT_STEPS
        for places in plan_epoch(conversations, self._settings.batch_tokens, 0, 0):
            batch = make_batch([conversations[place] for place in places], self._device)
            features = self._target.forward(batch.token_ids).features
            said = next_tokens(batch.token_ids)
            alive = batch.is_greedy
            for step, residual in enumerate(self._unroll(ready, batch, features, HELD_OUT_STEPS)):
                places_alive = alive.flatten().nonzero()[:, 0]
                guesses = self.token_map[ready.logits(residual.flatten(0, 1)[places_alive]).argmax(dim=-1)]
                hits = torch.zeros_like(alive)
                hits.flatten()[places_alive] = guesses == said.flatten()[places_alive]
                reached[step] += len(places_alive)
                right[step] += int(hits.sum())
                alive = functional.pad(hits[:, :-1], (1, 0)) & batch.is_greedy
        return tuple(hit / max(of, 1) for hit, of in zip(right, reached, strict=True))

    def _look_at(self, held_out: Sequence[Conversation], done: float) -> None:
        progress, accepted = self.progress, self.held_out_acceptance(held_out)
        progress.points.append(CurvePoint(progress.step, progress.seconds, done, None, accepted))

    def _note(self, means: _Means, done: float) -> None:
        progress = self.progress
        last = max((point.done for point in progress.points if point.loss is not None), default=0.0)
        if done - last >= 1 / NUM_POINTS or progress.is_done:
            loss, *accepted = means.take()
            progress.points.append(CurvePoint(progress.step, progress.seconds, done, loss, tuple(accepted)))

    def _set_rate(self, done: float) -> None:
        warm = min(1.0, (self.progress.step + 1) / WARMUP_STEPS)
        cosine = 0.5 * (1.0 + math.cos(math.pi * done))
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * warm * (LAST_RATE + (1.0 - LAST_RATE) * cosine)

    def _detail(self) -> str:
        points = self.progress.points
        parts = [f"step {self.progress.step:,}"]
        parts += [f"loss {point.loss:.3f}" for point in points[::-1] if point.loss is not None][:1]
        parts += [f"{p.acceptance_length:.2f} tokens a step held out" for p in points[::-1] if p.loss is None][:1]
        return ", ".join(parts)


class _Means:
    """Of what training steps found since it was last asked."""

    def __init__(self) -> None:
        self._found: list[list[float]] = []

    def add(self, *values: float) -> None:
        if self._found and len(self._found[0]) != len(values):  # from here on more is unrolled
            self._found.clear()
        self._found.append(list(values))

    def take(self) -> list[float]:
        means = [sum(column) / len(column) for column in zip(*self._found, strict=True)]
        self._found.clear()
        return means


def next_tokens(token_ids: Tensor) -> Tensor:
    """``[num_seqs, length]``: of each row the token after it, 0 after the last."""
    return functional.pad(token_ids[:, 1:], (0, 1))


def _make_optimizers(head: DraftHead, rate: float) -> list[torch.optim.Optimizer]:
    """Muon for what maps hidden states to hidden states, AdamW for norms and words (Jordan et al. 2024)."""
    matrices = [weight for _, weight in head.matrices()]
    others = [weight for _, weight in head.others()]
    optimizers = [
        torch.optim.Muon(matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate / 2, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return optimizers
