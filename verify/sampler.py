"""The sampler: from the logits of one pass to the tokens each sequence gains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.kernels.operations import Operations
from outrider.verify import tree
from outrider.verify.acceptance import (
    choose_by_match,
    choose_by_rejection,
    could_have_drawn,
    race,
)
from outrider.verify.block import verify_block
from outrider.verify.distribution import TokenDistribution
from outrider.verify.logprobs import token_logprobs
from outrider.verify.random_numbers import Purpose
from outrider.verify.rows import ProcessedRows, UnusableRow, no_finite_logit
from outrider.verify.sampling_params import SamplingParams, TokenLogprob
from outrider.verify.typical import choose_typical

RejectionSampleMethod = Literal["block", "standard"]
Acceptance = Literal["lossless", "typical_lossy"]

_NO_CHOICE = -1  # what argmax says of a row that cannot be chosen from


@dataclass(frozen=True, slots=True, eq=False)
class VerifyRequest:
    """One sequence's part of a pass: ``1 + len(draft_token_ids)`` rows of logits.

    Row 0 is the model's prediction after prompt and output, row ``i + 1`` the one after drafted token ``i`` and those
    that lead to it: all before it in a chain, its ancestors in a tree (``draft_parents``, as ``tree`` describes them).
    """

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]  # verified so far
    draft_token_ids: tuple[int, ...] = ()
    draft_probs: Tensor | None = None  # [num_draft_tokens, vocab_size]; None: not drawn, or drawn in the target's race
    eos_token_ids: tuple[int, ...] = ()
    draft_parents: tuple[int, ...] = ()  # empty: a chain

    def __post_init__(self) -> None:
        assert not self.draft_parents or tree.is_tree(self.draft_parents, len(self.draft_token_ids))

    @property
    def num_rows(self) -> int:
        return 1 + len(self.draft_token_ids)

    @property
    def position(self) -> int:
        """Of the token that row 0 predicts."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def candidates(self, row: int) -> Sequence[int]:
        """The drafted tokens that ``row`` decides on, as indices into the draft."""
        return tree.children(self.draft_parents, len(self.draft_token_ids), row)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one pass adds to a sequence: the accepted drafted tokens, then one token more.

    That one is the *bonus token* if the draft was accepted to its end, the *recovered token* in place of the first
    rejected one otherwise. With an ``error`` it is missing: the tokens before it stand, the sequence cannot go on.
    """

    token_ids: tuple[int, ...]
    num_accepted: int
    logprobs: tuple[TokenLogprob, ...] = ()  # one a token, if the request asked for them
    error: str | None = None
    path: tuple[int, ...] = ()  # of a tree: the accepted tokens as indices into the draft, in order

    @property
    def accepted_rows(self) -> tuple[int, ...]:
        """The accepted tokens as indices into the draft, in order; in a chain they are its first."""
        return self.path or tuple(range(self.num_accepted))


class Sampler:
    """Decides, for every sequence of a pass, which drafted tokens are kept and which token follows them.

    ``rejection_sample_method``: how chains with probabilities are verified (vLLM's names), ``block`` by block and
    ``standard`` token by token. Trees with probabilities are always verified token by token. ``acceptance``:
    ``typical_lossy`` gives up losslessness for requests with a temperature above 0 (see ``typical``).
    """

    def __init__(
        self,
        operations: Operations,
        rejection_sample_method: RejectionSampleMethod = "block",
        acceptance: Acceptance = "lossless",
    ) -> None:
        self._operations = operations
        self._rejection_sample_method = rejection_sample_method
        self._is_lossless = acceptance == "lossless"

    def verify(self, logits: Tensor, requests: Sequence[VerifyRequest]) -> list[Verdict]:
        """One verdict a request. ``logits`` ``[sum of num_rows, vocab_size]``, rows in the requests' order.

        A row is looked at only if every drafted token before it was accepted, or in block verification may yet be.
        A row that is looked at and holds NaN, or no finite logit, ends its own request with an ``error``, if what is
        accepted reaches it, and touches no other.
        """
        rows_of = torch.split(logits, [request.num_rows for request in requests])
        greedy_choices = self._greedy_choices(logits, rows_of, requests)
        verdicts = []
        for request, rows, choices in zip(requests, rows_of, greedy_choices, strict=True):
            verdict = self._judge(request, rows, choices)
            num_top = request.params.logprobs
            if num_top is not None and verdict.token_ids:
                taken = [0, *(index + 1 for index in verdict.accepted_rows)][: len(verdict.token_ids)]
                logprobs = token_logprobs(self._operations, rows[taken], verdict.token_ids, num_top)
                verdict = replace(verdict, logprobs=logprobs)
            verdicts.append(verdict)
        return verdicts

    def _judge(self, request: VerifyRequest, rows: Tensor, greedy_choices: Sequence[int] | None) -> Verdict:
        params = request.params
        if greedy_choices is not None:
            return _follow(request, lambda row, position: greedy_choices[row])
        probs = request.draft_probs
        if probs is not None and (
            params.is_greedy or not self._is_lossless or probs.shape != (request.num_rows - 1, rows.shape[1])
        ):
            probs = None
        if probs is None and params.draws_from_all and not params.changes_logits and self._is_lossless:
            return _follow(request, partial(self._race, params, rows))
        processed = ProcessedRows(
            params, request.prompt_token_ids, request.output_token_ids, request.eos_token_ids, rows
        )
        if probs is None:
            return _follow(request, partial(self._choose, request, processed, None))
        draft_probs = probs.to("cpu", torch.float64).numpy()
        if request.draft_parents or self._rejection_sample_method == "standard":
            return _follow(request, partial(self._choose, request, processed, draft_probs))
        num_accepted, recovered_id = _judge_block(request, processed, draft_probs)
        if recovered_id is not None:
            return Verdict((*request.draft_token_ids[:num_accepted], recovered_id), num_accepted)
        return _follow(request, partial(self._choose, request, processed, None), num_accepted)

    def _race(self, params: SamplingParams, rows: Tensor, row: int, position: int) -> int | None:
        return race(self._operations, rows[row], params.temperature, params.seed, position, Purpose.TARGET)

    def _choose(
        self,
        request: VerifyRequest,
        processed: ProcessedRows,
        draft_probs: npt.NDArray[np.float64] | None,
        row: int,
        position: int,
    ) -> int:
        """The token after a row that is processed first, in one of the ways of ``acceptance`` and ``typical``."""
        seed, target = request.params.seed, processed.target(row, position)
        candidates = list(request.candidates(row))
        token_ids = [request.draft_token_ids[index] for index in candidates]
        if not self._is_lossless:
            choice = choose_typical(target, token_ids, seed, position)
        elif draft_probs is None:
            choice = choose_by_match(target, None, seed, position)
        else:
            choice = choose_by_rejection(target, token_ids, draft_probs[candidates], seed, position)
        processed.append(choice.token_id)
        return choice.token_id

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


def _follow(request: VerifyRequest, choose: Callable[[int, int], int | None], num_accepted: int = 0) -> Verdict:
    """Choose, and go on to the row of the drafted token that was chosen, as long as there is one.

    ``choose``: the token that follows a row, given the row and the token's position; None if the row is unusable.
    ``num_accepted``: how many tokens of a chain are accepted already.
    """
    path = list(range(num_accepted))
    while True:
        row = path[-1] + 1 if path else 0
        accepted = tuple(request.draft_token_ids[index] for index in path)
        tree_path = tuple(path) if request.draft_parents else ()
        position = request.position + len(path)
        try:
            token_id = choose(row, position)
        except UnusableRow as problem:
            return Verdict(accepted, len(path), error=str(problem), path=tree_path)
        if token_id is None or token_id == _NO_CHOICE:
            return Verdict(accepted, len(path), error=str(no_finite_logit(position)), path=tree_path)
        matching = (index for index in request.candidates(row) if request.draft_token_ids[index] == token_id)
        found = next(matching, None)
        if found is None:
            return Verdict((*accepted, token_id), len(path), path=tree_path)
        path.append(found)


def _judge_block(
    request: VerifyRequest, processed: ProcessedRows, draft_probs: npt.NDArray[np.float64]
) -> tuple[int, int | None]:
    """As ``verify_block``, of the drafted tokens that can be judged: whose probabilities and rows are usable."""
    targets: list[TokenDistribution] = []
    for index, (token_id, probs) in enumerate(zip(request.draft_token_ids, draft_probs, strict=True)):
        if not could_have_drawn(probs, token_id):
            break
        try:
            targets.append(processed.target(index, request.position + index))
        except UnusableRow:
            break
        processed.append(token_id)
    length = len(targets)
    if length == 0:
        return 0, None
    drafted = request.draft_token_ids[:length]
    return verify_block(targets, drafted, draft_probs[:length], request.params.seed, request.position)
