"""The bits of every row of logits that an engine decides by."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from torch import Tensor

from outrider.server.engine.engine import Engine
from outrider.verify.sampler import Verdict, VerifyRequest

Context = tuple[int, ...]  # all tokens before the one that is predicted


class LogitTap:
    """Stands before an engine's sampler and notes what it is given; changes nothing.

    Logits are a function of the tokens before them, and of nothing else: whenever a context comes again, its bits
    must be those of the first time. Guesses that are rejected are contexts too.
    """

    def __init__(self, engine: Engine) -> None:
        self.bits: dict[Context, bytes] = {}
        self.num_repeats = 0
        self._sampler: Any = engine._sampler
        engine._sampler = self

    def verify(self, logits: Tensor, requests: Sequence[VerifyRequest]) -> list[Verdict]:
        rows = iter(logits.numpy())
        for request in requests:
            known = (*request.prompt_token_ids, *request.output_token_ids)
            for num_drafted in range(request.num_rows):
                context = known + request.draft_token_ids[:num_drafted]
                digest = blake2b(next(rows).tobytes(), digest_size=16).digest()
                self.num_repeats += context in self.bits
                before = self.bits.setdefault(context, digest)
                assert before == digest, f"other logits after the same {len(context)} tokens"
        verdicts: list[Verdict] = self._sampler.verify(logits, requests)
        return verdicts

    def assert_same(self, other: LogitTap) -> None:
        """Contexts that both have seen, and there are some, have the same bits in both."""
        shared = self.bits.keys() & other.bits.keys()
        assert shared, "nothing to compare"
        differing = [context for context in shared if self.bits[context] != other.bits[context]]
        assert not differing, f"other logits in {len(differing)} of {len(shared)} rows"
