"""The engine: requests in, one step after the other, outputs out. Synchronous, one thread, plain state.

One step is ``plan → propose → forward → accept → commit → emit``. The same class runs in the engine process
and in-process, for tests, benchmarks and as a Python API.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from outrider.draft.base import Drafter
from outrider.kernels.operations import load_operations
from outrider.kvcache.pool import PagePool
from outrider.kvcache.prefix_index import Namespace
from outrider.kvcache.sequence import SequencePages
from outrider.kvcache.storage import KVStorage, LayerGroup
from outrider.server.engine.batcher import Batcher, BatcherConfig, ScheduledRows
from outrider.server.engine.cost_table import CostTable, cached_cost_table
from outrider.server.engine.draft_profile import add_draft
from outrider.server.engine.drafters import drafter_name, load_draft_model, make_controller, make_drafter
from outrider.server.engine.drafting import GuardedDrafter
from outrider.server.engine.profile import profile, profile_key
from outrider.server.engine.request import EngineStats, FinishReason, ModelInfo, Request, StepOutput
from outrider.server.engine.sequence import Sequence
from outrider.server.engine.settings import EngineSettings
from outrider.server.engine.step_rows import layout
from outrider.server.engine.text_stream import TextStream
from outrider.server.engine.verified import Outcome, moved_slots
from outrider.verify.checkpoint.checkpoint import Checkpoint, open_checkpoint
from outrider.verify.checkpoint.tokenizer import Tokenizer, load_tokenizer
from outrider.verify.sampler import RejectionSampleMethod, Sampler, Verdict
from outrider.verify.sampling_params import InvalidParameter
from outrider.verify.transformer import Transformer

DEFAULT_MAX_CONTEXT = 8192


class Engine:
    """Generates for many requests at once. Loading takes seconds, one more where its passes were never measured.

    ``drafter`` and ``cost_table``, if given, take the place of the settings' own and of a measured one.

    Raises:
        UnsupportedCheckpoint: the model cannot be served.
        ValueError: the settings do not fit the model or the memory.
    """

    def __init__(
        self, settings: EngineSettings, drafter: Drafter | None = None, cost_table: CostTable | None = None
    ) -> None:
        settings = settings.resolved()
        torch.set_grad_enabled(False)
        if settings.num_threads:
            torch.set_num_threads(settings.num_threads)
        path = Path(settings.model_path)
        checkpoint = open_checkpoint(path)
        self._settings = settings
        self._max_context = _max_context(settings, checkpoint)
        operations = load_operations(
            settings.kernels,
            num_threads=settings.num_threads,
            quantize=settings.quantize,
            kv_cache_dtype=settings.kv_cache_dtype,
        )
        self._tokenizer = load_tokenizer(path)
        self._eos_token_ids = _eos_token_ids(checkpoint, self._tokenizer)
        self._model = Transformer(checkpoint, operations, self._max_context)
        self._draft_operations = operations.quantized(settings.draft_quantize)
        self._draft_model = None
        if drafter is None:
            self._draft_model = load_draft_model(
                settings, self._tokenizer, self._model, self._draft_operations, self._max_context
            )
        draft_layers = getattr(drafter or self._draft_model, "kv_layers", None)  # a paged drafter's, or none
        groups = [self._model.kv_layers, *([draft_layers] if draft_layers is not None else [])]
        self._storage = _make_storage(settings, groups)
        self._pool = PagePool(self._storage.num_pages - 1, settings.page_size)
        self._max_context = min(self._max_context, self._pool.num_pages * settings.page_size)
        self._sampler = Sampler(operations, cast("RejectionSampleMethod", settings.rejection_sample_method))
        self.cost_table = cost_table  # None: not measured, by the settings' wish
        if cost_table is None and settings.profile:
            self.cost_table = self._measure(checkpoint.fingerprint)
        self._controller = make_controller(settings, self.cost_table)
        if drafter is None:
            self._drafter_name = drafter_name(settings, self._draft_model)
            drafter = make_drafter(settings, self._draft_model, self._draft_operations, self._controller)
        else:
            self._drafter_name = drafter.name
        vocab_size = checkpoint.config.vocab_size
        self._drafter = GuardedDrafter(drafter, vocab_size, settings.draft_sample_method == "probabilistic")
        self._drafter.attach(self._storage)
        self._batcher = Batcher(
            BatcherConfig(settings.max_running, settings.max_step_tokens, settings.max_draft_tokens),
            self._drafter,
            self._controller,
        )
        self._namespace_model = checkpoint.fingerprint
        self._sequences: dict[str, Sequence] = {}
        self._sequence_ids = itertools.count()
        self._num_steps = 0
        self._draft_s = 0.0
        self._verify_s = 0.0

    @property
    def info(self) -> ModelInfo:
        return ModelInfo(
            name=self._settings.model_name,
            vocab_size=self._model.config.vocab_size,
            max_context=self._max_context,
            kernels=self._settings.kernels,
            drafter=self._drafter_name,
            max_draft_tokens=self._settings.max_draft_tokens,
            draft_model=self._draft_model.name if self._draft_model is not None else "",
        )

    @property
    def has_work(self) -> bool:
        return self._batcher.has_work

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._batcher.running),
            num_waiting=len(self._batcher.waiting),
            num_pages=self._pool.num_pages,
            num_free_pages=self._pool.num_free,
            num_reusable_pages=self._pool.num_reusable,
            num_preemptions=self._batcher.num_preemptions,
            num_steps=self._num_steps,
            prefix_queries=self._batcher.prefix_queries,
            prefix_hits=self._batcher.prefix_hits,
            draft_s=self._draft_s,
            verify_s=self._verify_s,
        )

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if pages were lost or counted twice."""
        self._pool.check_integrity([sequence.pages.page_table for sequence in self._batcher.running])
        if not self.has_work:
            assert self._pool.num_referenced == 0, f"{self._pool.num_referenced} pages belong to nobody"

    def add_request(self, request: Request) -> list[StepOutput]:
        """Queue a request; the terminal output at once if it can never run, else nothing."""
        if (problem := self._problem(request)) is not None:
            return [StepOutput(request.request_id, finish_reason=FinishReason.ERROR, error=problem)]
        room = self._max_context - len(request.prompt_token_ids)
        max_tokens = min(request.params.max_tokens, room)
        text = TextStream(self._tokenizer, request.params, self._eos_token_ids, max_tokens)
        pages = SequencePages(self._pool, self._storage, Namespace(request.tenant, self._namespace_model))
        ends = frozenset() if request.params.ignore_eos else self._eos_token_ids
        sequence = Sequence(request, next(self._sequence_ids), pages, text, max_tokens, ends)
        self._sequences[request.request_id] = sequence
        self._batcher.add(sequence)
        return []

    def cancel(self, request_id: str) -> list[StepOutput]:
        """End a request wherever it is; its terminal output, or nothing if it is not known (any more)."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return []
        self._forget(sequence)
        return [sequence.end(FinishReason.CANCELLED)]

    def rest(self) -> None:
        """Do what could wait, now that there is nothing to do."""
        self._drafter.settle()

    def step(self) -> list[StepOutput]:
        """One pass for everyone scheduled; at most one output a request."""
        step_started = time.perf_counter()
        # Whoever waits may be admitted by the plan, and find pages that others have filled.
        if self._batcher.waiting or self._drafter.must_settle:
            self._drafter.settle()
        scheduled = self._batcher.plan()
        if not scheduled:
            return []
        self._num_steps += 1
        draft_ms = self._drafter.take_spent_ms()
        started = time.perf_counter()
        verdicts, features = self._forward(scheduled)
        verify_ms = (time.perf_counter() - started) * 1000
        self._draft_s += draft_ms / 1000
        self._verify_s += verify_ms / 1000
        outcomes = [self._commit(rows, verdict) for rows, verdict in zip(scheduled, verdicts, strict=True)]
        self._observe(outcomes, features)  # those that end, too: others may find their pages
        for outcome in outcomes:
            self._follow(outcome)
        draft_ms = draft_ms if any(rows.draft.token_ids for rows in scheduled) else 0.0
        if self._controller is not None:
            self._controller.took((time.perf_counter() - step_started) * 1000)
        return [
            replace(outcome.output, draft_source=rows.draft.source, draft_ms=draft_ms, verify_ms=verify_ms)
            for rows, outcome in zip(scheduled, outcomes, strict=True)
            if outcome.output is not None
        ]

    def _measure(self, fingerprint: str) -> CostTable:
        """What passes cost here: kept from an earlier start, or measured now."""
        settings, max_context, draft = self._settings, self._max_context, self._draft_model

        def measure() -> CostTable:
            table = profile(self._model, settings.page_size, settings.max_step_tokens, max_context)
            if draft is None:
                return table
            return add_draft(table, draft, self._draft_operations, settings.page_size, settings.max_running)

        fingerprint_of_draft = draft.fingerprint if draft is not None else ""
        return cached_cost_table(profile_key(settings, fingerprint, max_context, fingerprint_of_draft), measure)

    def _forward(self, scheduled: list[ScheduledRows]) -> tuple[list[Verdict | None], Tensor | None]:
        """Compute the rows; a verdict for every part that predicts, and the features of all rows if they are wanted.

        Features: ``[num_rows, len(taps) * hidden_size]``.
        """
        rows, features = layout(scheduled), None
        if taps := self._drafter.taps:
            hidden, features = self._model.forward_tapped(rows.token_ids, rows.batch, self._storage, taps)
        else:
            hidden = self._model.forward(rows.token_ids, rows.batch, self._storage)
        predicting = [part for part in scheduled if part.predicts]
        if not predicting:
            return [None] * len(scheduled), features
        logits = self._model.logits(hidden.index_select(0, rows.logit_rows))
        verdicts = iter(self._sampler.verify(logits, [part.sequence.verify_request(part.draft) for part in predicting]))
        return [next(verdicts) if part.predicts else None for part in scheduled], features

    def _commit(self, rows: ScheduledRows, verdict: Verdict | None) -> Outcome:
        """Keep what is verified, let the rest go, and say what the client gets."""
        sequence, draft = rows.sequence, rows.draft
        known = sequence.token_ids(rows.start, rows.start + rows.num_tokens)
        if verdict is None:
            sequence.pages.commit(known)
            return Outcome(rows, (), None if sequence.num_uncached_tokens else sequence.end(FinishReason.STOP))
        if self._controller is not None and draft.token_ids:
            self._controller.record(sequence.sequence_id, draft, verdict.num_accepted, verdict.path)
        output = sequence.accept(verdict, len(draft.token_ids))
        accepted = verdict.accepted_rows[: output.num_accepted]
        if verdict.path:
            self._model.copy_kv(self._storage, *moved_slots(rows, accepted))
        sequence.pages.commit(known + [draft.token_ids[index] for index in accepted])
        return Outcome(rows, accepted, output)

    def _observe(self, outcomes: list[Outcome], features: Tensor | None) -> None:
        """Show a paged drafter what the pass verified. ``features``: of all its rows."""
        if not self._drafter.is_paged:
            return
        verified, first_row = [], 0
        for outcome in outcomes:
            stop = first_row + outcome.rows.num_rows
            part = features[first_row:stop] if features is not None else None
            verified.append((outcome.rows.sequence, outcome.verified_rows(part)))
            first_row = stop
        self._drafter.observe(verified)

    def _follow(self, outcome: Outcome) -> None:
        """Tell the drafter what came of a sequence, or let the sequence go."""
        sequence, output = outcome.rows.sequence, outcome.output
        if output is None:
            return
        if outcome.has_ended:
            self._forget(sequence)
        elif sequence.is_drafted:
            self._drafter.extend(sequence, output.token_ids)
        elif len(sequence.output_token_ids) == len(output.token_ids):
            self._drafter.begin(sequence)  # only now: a prompt that is cancelled in prefill costs the drafter nothing

    def _forget(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request.request_id]
        self._drafter.release(sequence)
        self._batcher.remove(sequence)

    def _problem(self, request: Request) -> str | None:
        """Why a request can never run, as a sentence; None if it can."""
        num_prompt, vocab_size = len(request.prompt_token_ids), self._model.config.vocab_size
        if request.request_id in self._sequences:
            return f"request {request.request_id!r} is already running; use another id"
        if num_prompt == 0:
            return "the prompt is empty; give at least one token"
        if num_prompt >= self._max_context:
            return f"the prompt has {num_prompt} tokens; this server takes at most {self._max_context - 1}"
        bad = next((i for i in request.prompt_token_ids if not 0 <= i < vocab_size), None)
        if bad is not None:
            return f"the prompt holds token {bad}; this model has tokens 0 to {vocab_size - 1}"
        try:
            request.params.check_token_ids(vocab_size)
        except InvalidParameter as error:
            return str(error)
        return None


def _max_context(settings: EngineSettings, checkpoint: Checkpoint) -> int:
    longest = checkpoint.config.max_position_embeddings
    if settings.max_context > longest:
        raise ValueError(f"max_context is {settings.max_context}; this model was made for at most {longest} tokens")
    return settings.max_context or min(longest, DEFAULT_MAX_CONTEXT)


def _eos_token_ids(checkpoint: Checkpoint, tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset(checkpoint.config.eos_token_ids) | frozenset(tokenizer.eos_token_ids)


def _make_storage(settings: EngineSettings, groups: list[LayerGroup]) -> KVStorage:
    page_bytes = settings.page_size * sum(group.bytes_per_token for group in groups)
    num_pages = settings.kv_cache_mib * 2**20 // page_bytes
    if num_pages < 2:
        raise ValueError(
            f"kv_cache_mib is {settings.kv_cache_mib}; it must hold at least 2 pages of {page_bytes} bytes each"
        )
    try:
        return KVStorage(groups, num_pages, settings.page_size)
    except RuntimeError as error:  # what torch raises where memory ends
        raise ValueError(f"kv_cache_mib is {settings.kv_cache_mib}; this machine has not that much memory") from error
