"""The sampler: from the logits of one pass to the tokens each sequence gains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.kernels.operations import Operations
from outrider.verify.acceptance import Choice, choose_by_match, choose_by_rejection, num_matching, race
from outrider.verify.distribution import target_distribution
from outrider.verify.logits import LogitsProcessor
from outrider.verify.logprobs import token_logprobs
from outrider.verify.random_numbers import Purpose
from outrider.verify.sampling_params import SamplingParams, TokenLogprob

_NO_CHOICE = -1  # what argmax says of a row that cannot be chosen from


@dataclass(frozen=True, slots=True, eq=False)
class VerifyRequest:
    """One sequence's part of a pass: ``1 + len(draft_token_ids)`` rows of logits.

    Row ``i`` is the model's prediction after prompt, output and the first ``i`` drafted tokens.
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]  # verified so far
    draft_token_ids: tuple[int, ...] = ()
    draft_probs: Tensor | None = None  # [num_draft_tokens, vocab_size]; None: the guesses were not sampled
    eos_token_ids: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        return 1 + len(self.draft_token_ids)

    @property
    def position(self) -> int:
        """Of the token that row 0 predicts."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one pass adds to a sequence: the accepted drafted tokens, then one token more.

    That one is the *bonus token* if all drafted tokens were accepted, the *recovered token* in place of the
    first rejected one otherwise. With an ``error`` it is missing: the tokens before it stand, the sequence
    cannot go on.
    """

    token_ids: tuple[int, ...]
    num_accepted: int
    logprobs: tuple[TokenLogprob, ...] = ()  # one a token, if the request asked for them
    error: str | None = None


class Sampler:
    """Decides, for every sequence of a pass, which drafted tokens are kept and which token follows them."""

    def __init__(self, operations: Operations) -> None:
        self._operations = operations

    def verify(self, logits: Tensor, requests: Sequence[VerifyRequest]) -> list[Verdict]:
        """One verdict a request. ``logits`` ``[sum of num_rows, vocab_size]``, rows in the requests' order.

        A row is looked at only if every drafted token before it was accepted. A row that is looked at and
        holds NaN, or no finite logit, ends its own request with an ``error`` and touches no other.
        """
        rows_of = torch.split(logits, [request.num_rows for request in requests])
        greedy_choices = self._greedy_choices(logits, rows_of, requests)
        verdicts = []
        for request, rows, choices in zip(requests, rows_of, greedy_choices, strict=True):
            if choices is not None:
                verdict = _verify_greedy(request, choices)
            elif request.draft_probs is None and request.params.draws_from_all and not request.params.changes_logits:
                verdict = self._verify_race(request, rows)
            else:
                verdict = _verify_row_by_row(request, rows)
            num_top = request.params.logprobs
            if num_top is not None and verdict.token_ids:
                rows = rows[: len(verdict.token_ids)]
                logprobs = token_logprobs(self._operations, rows, verdict.token_ids, num_top)
                verdict = replace(verdict, logprobs=logprobs)
            verdicts.append(verdict)
        return verdicts

    def _verify_race(self, request: VerifyRequest, rows: Tensor) -> Verdict:
        """Draw, and go on to the next row as long as the token drawn is the drafted one."""
        params, token_ids = request.params, list[int]()
        for index, row in enumerate(rows):
            position = request.position + index
            token_id = race(self._operations, row, params.temperature, params.seed, position, Purpose.TARGET)
            if token_id is None:
                return _no_finite_logit(request, token_ids)
            token_ids.append(token_id)
            if index == len(request.draft_token_ids) or token_id != request.draft_token_ids[index]:
                break
        return Verdict(tuple(token_ids), num_accepted=len(token_ids) - 1)

    def _greedy_choices(
        self, all_logits: Tensor, rows_of: Sequence[Tensor], requests: Sequence[VerifyRequest]
    ) -> list[list[int] | None]:
        """The choice of each row of the requests that take the model's likeliest token as it is; one trip for all."""
        is_plain = [request.params.is_greedy and not request.params.changes_logits for request in requests]
        if not any(is_plain):
            return [None] * len(requests)
        plain_rows = [rows for rows, plain in zip(rows_of, is_plain, strict=True) if plain]
        logits = all_logits if all(is_plain) else torch.cat(plain_rows)
        choices = iter(self._operations.argmax(logits).tolist())
        return [
            list(islice(choices, request.num_rows)) if plain else None
            for request, plain in zip(requests, is_plain, strict=True)
        ]


def _verify_greedy(request: VerifyRequest, choices: Sequence[int]) -> Verdict:
    num_accepted = num_matching(request.draft_token_ids, choices)
    token_ids = tuple(choices[: num_accepted + 1])
    if _NO_CHOICE in token_ids:
        return _no_finite_logit(request, token_ids[: token_ids.index(_NO_CHOICE)])
    return Verdict(token_ids, num_accepted)


def _verify_row_by_row(request: VerifyRequest, rows: Tensor) -> Verdict:
    """Process a row, choose, and go on to the next as long as the choice is the drafted token."""
    processor = LogitsProcessor(
        request.params, request.prompt_token_ids, request.output_token_ids, request.eos_token_ids
    )
    token_ids: list[int] = []
    for index, row in enumerate(rows.cpu().numpy()):
        logits = row.astype(np.float64)
        if not np.isfinite(logits.max()):
            return _no_finite_logit(request, token_ids)
        processor.process(logits)
        if logits.max() == -np.inf:
            return _failed(
                token_ids,
                f"min_tokens bans every token that could stand at position {request.position + index}; "
                "lower min_tokens or name fewer stop_token_ids",
            )
        choice = _choose(request, index, logits)
        token_ids.append(choice.token_id)
        if not choice.accepted:
            break
        processor.append(choice.token_id)
    return Verdict(tuple(token_ids), num_accepted=len(token_ids) - 1)


def _choose(request: VerifyRequest, index: int, logits: npt.NDArray[np.float64]) -> Choice:
    """The token of row ``index``, whose processed ``logits`` are ``[vocab_size]``."""
    target = target_distribution(logits, request.params)
    seed, position = request.params.seed, request.position + index
    if index == len(request.draft_token_ids):
        return choose_by_match(target, None, seed, position)
    draft_token_id, draft_probs = request.draft_token_ids[index], request.draft_probs
    if draft_probs is None or draft_probs.shape != (len(request.draft_token_ids), len(logits)):
        return choose_by_match(target, draft_token_id, seed, position)
    host_probs = draft_probs[index].to("cpu", torch.float64).numpy()
    return choose_by_rejection(target, draft_token_id, host_probs, seed, position)


def _no_finite_logit(request: VerifyRequest, token_ids: Sequence[int]) -> Verdict:
    position = request.position + len(token_ids)
    return _failed(
        token_ids, f"the model gave no usable logits for position {position} (NaN or none finite); try again"
    )


def _failed(token_ids: Sequence[int], error: str) -> Verdict:
    return Verdict(tuple(token_ids), num_accepted=len(token_ids), error=error)
