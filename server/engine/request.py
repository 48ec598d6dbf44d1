"""What goes into the engine and what comes out. No torch here: the server process imports this."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from outrider.verify.sampling_params import SamplingParams, TokenLogprob


class FinishReason(StrEnum):
    STOP = "stop"  # an end-of-text token, a stop id or a stop string
    LENGTH = "length"  # max_tokens, or the model's context is full
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Request:
    """One generation asked for by a client.

    ``generate=False`` computes the prompt's keys and values, keeps them for reuse and produces nothing.
    ``tenant`` separates what may share cached pages.
    ``prediction_token_ids``: what the client expects the answer to be; drafts are taken from it where the answer
    follows it. It never changes the answer.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    tenant: str = ""
    generate: bool = True
    prediction_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step adds to one request. Concatenated ``text`` is the whole answer, byte for byte.

    ``token_ids`` holds every verified token up to and including the one that ended the answer;
    ``text`` and ``logprobs`` end before a stop string or an end-of-text token, and may lag behind
    ``token_ids`` while half a character or a possible stop string is held back.
    The last output of a request, and no other, has a ``finish_reason``.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    num_draft_tokens: int = 0  # proposed to this step
    num_accepted: int = 0  # of these, found right and kept
    draft_source: str = ""  # who guessed them: suffix, model or prediction; empty without a draft
    draft_ms: float = 0.0  # of the step, that drafting took, for all its requests together; 0 where none had a draft
    verify_ms: float = 0.0  # of the step, that the target's pass and the sampler took, for all its requests together
    num_cached_tokens: int = 0  # prompt tokens whose KV was reused; the same in every output
    queue_s: float = 0.0  # seconds between reaching the engine and first being given rows; the same in every output
    finish_reason: FinishReason | None = None
    error: str | None = None  # with FinishReason.ERROR: what happened, for the client to read

    @property
    def num_gained(self) -> int:
        """Tokens that the draft brought beside the one that every step gives.

        An accepted draft token that ends the answer is that one, so with steps counted over outputs with tokens
        their tokens are always steps + gained.
        """
        return min(self.num_accepted, max(0, len(self.token_ids) - 1))


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A picture of the engine after a step, for metrics and health."""

    num_running: int
    num_waiting: int
    num_pages: int  # that can be allocated
    num_free_pages: int
    num_reusable_pages: int
    num_preemptions: int
    num_steps: int
    prefix_queries: int  # prompt tokens looked up
    prefix_hits: int  # prompt tokens found
    draft_s: float = 0.0  # spent on drafting since the start, in seconds
    verify_s: float = 0.0  # the same on the target's passes and the sampler


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the engine serves, once it is ready."""

    name: str
    vocab_size: int
    max_context: int  # tokens, prompt and answer together
    kernels: str
    drafter: str
    max_draft_tokens: int
    draft_model: str = ""  # that drafts, by name; empty without one
    weights: str = ""  # forms the target's weights have in memory, such as "Q4_1/Q8_0"
    draft_weights: str = ""  # the same of the draft model
