"""A request's state inside the engine."""

from __future__ import annotations

import time

from outrider.draft.base import Draft
from outrider.kvcache.sequence import SequencePages
from outrider.server.engine.request import FinishReason, Request, StepOutput
from outrider.server.engine.text_stream import TextStream
from outrider.verify.sampler import Verdict, VerifyRequest


class Sequence:
    """Prompt, verified answer, pages, and the text that grows from them.

    0                num_cached_tokens        num_tokens
    ├── KV is in the pages ──┼── known, to compute ──┤ (drafts of a step)
    """

    def __init__(
        self,
        request: Request,
        sequence_id: int,
        pages: SequencePages,
        text: TextStream,
        max_tokens: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.request = request
        self.sequence_id = sequence_id
        self.pages = pages
        self.output_token_ids: list[int] = []
        self.num_prefix_tokens: int | None = None  # of the prompt, found cached when first admitted
        self._added_at = time.monotonic()
        self._queue_s = 0.0
        self.is_drafted = False  # whether the drafter is asked about it
        self.is_lost = False  # the drafter failed at it, and is left alone with it
        self._text = text
        self._max_tokens = max_tokens  # the request's own, less what the context cannot hold
        self._eos_token_ids = tuple(sorted(eos_token_ids))

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens known: the prompt and the verified answer."""
        return self.num_prompt_tokens + len(self.output_token_ids)

    @property
    def num_uncached_tokens(self) -> int:
        """Known tokens whose keys and values are still to be computed; 1 while decoding."""
        return self.num_tokens - self.pages.num_cached_tokens

    @property
    def is_decoding(self) -> bool:
        return self.num_uncached_tokens == 1 and self.request.generate

    @property
    def max_useful_draft_tokens(self) -> int:
        """Drafts beyond this could not be kept: one more token always follows them."""
        return self._max_tokens - len(self.output_token_ids) - 1

    def admitted(self, num_prefix_tokens: int) -> None:
        """Note the wait and the prefix found; only the first time counts, not the return from a preemption."""
        if self.num_prefix_tokens is None:
            self.num_prefix_tokens = num_prefix_tokens
            self._queue_s = time.monotonic() - self._added_at

    def token_ids(self, start: int, stop: int) -> list[int]:
        """Known tokens at positions ``start .. stop - 1``."""
        prompt, num_prompt = self.request.prompt_token_ids, self.num_prompt_tokens
        return [
            *prompt[start:stop],
            *self.output_token_ids[max(start - num_prompt, 0) : max(stop - num_prompt, 0)],
        ]

    def verify_request(self, draft: Draft) -> VerifyRequest:
        """What the sampler needs to judge this step's rows."""
        return VerifyRequest(
            params=self.request.params,
            prompt_token_ids=self.request.prompt_token_ids,
            output_token_ids=self.output_token_ids,
            draft_token_ids=draft.token_ids,
            draft_probs=draft.draft_probs,
            eos_token_ids=self._eos_token_ids,
            draft_parents=draft.parents,
        )

    def accept(self, verdict: Verdict, num_draft_tokens: int) -> StepOutput:
        """Take the verdict's tokens one by one, up to the one that ends the answer."""
        reason: FinishReason | None = None
        num_kept = 0
        for index, token_id in enumerate(verdict.token_ids):
            logprob = verdict.logprobs[index] if verdict.logprobs else None
            self.output_token_ids.append(token_id)
            num_kept += 1
            reason = self._text.push(token_id, logprob)
            if reason is not None:
                break
        error = verdict.error if reason is None else None
        if error is not None:
            reason = FinishReason.ERROR
        return self._output(
            verdict.token_ids[:num_kept], num_draft_tokens, min(verdict.num_accepted, num_kept), reason, error
        )

    def end(self, reason: FinishReason, error: str | None = None) -> StepOutput:
        """The terminal output of a sequence that ends between tokens."""
        return self._output((), 0, 0, reason, error)

    def _output(
        self,
        token_ids: tuple[int, ...],
        num_draft_tokens: int,
        num_accepted: int,
        reason: FinishReason | None,
        error: str | None,
    ) -> StepOutput:
        if reason is not None:
            self._text.finish()
        text, logprobs = self._text.take()
        return StepOutput(
            request_id=self.request.request_id,
            token_ids=token_ids,
            text=text,
            logprobs=logprobs,
            num_draft_tokens=num_draft_tokens,
            num_accepted=num_accepted,
            num_cached_tokens=self.num_prefix_tokens or 0,
            queue_s=self._queue_s,
            finish_reason=reason,
            error=error,
        )
