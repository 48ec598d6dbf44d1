"""The longest suffix of one token sequence that occurred in it before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_MAX_OTHERS = 6


class Match(NamedTuple):
    """The last ``num_tokens`` tokens also ended at position ``end``."""

    num_tokens: int
    end: int


class SuffixIndex:
    """Finds the longest earlier occurrence of a growing sequence's end; of several, the most recent.

    Positions that end with the same ``min_match_tokens`` tokens are chained, latest first, as LZ77 encoders
    do (RFC 1951, section 4). A new token costs one dictionary access. A match is extended while the tokens
    after its earlier occurrence keep coming true, and searched for along the chain only when they do not.

    *Extending is exact*: if the longest match has L tokens and the most recent occurrence ends at e, and
    token e + 1 is the new one, then the new longest match has L + 1 tokens (one with more would have had
    more than L before), and its most recent occurrence ends at e + 1 (a later one, less its last token,
    would have been an occurrence of the L tokens later than e).

    *Time*: a search compares at most ``max_search_steps`` pairs of candidates and as many of tokens, and there
    is at most one a token. Dropping old tokens costs no more than indexing those that came since the last
    time. So the time per token has a constant bound. A search that reaches its bound returns the longest
    match among the most recent candidates (in 16,384 tokens of English no search needed 64 steps).

    *Memory*: the index holds the most recent tokens, between half of ``max_tokens`` and ``max_tokens``.
    """

    def __init__(self, min_match_tokens: int, max_tokens: int, max_search_steps: int) -> None:
        self._min_match_tokens = min_match_tokens
        self._max_tokens = max_tokens
        self._max_search_steps = max_search_steps
        self._tokens: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}  # n-gram -> the last position it ends at
        self._previous: list[int] = []  # position -> the position before where its n-gram ended, or -1
        self._match: Match | None = None
        self._match_is_known = True

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        num_tokens = len(self._tokens) + len(token_ids)
        if num_tokens > self._max_tokens:
            # Dropping a fixed number of tokens at a time keeps the window independent of how tokens are chunked.
            half = self._max_tokens // 2
            num_dropped = -(-(num_tokens - self._max_tokens) // half) * half
            token_ids = [*self._tokens[num_dropped:], *token_ids[max(0, num_dropped - len(self._tokens)) :]]
            self._tokens, self._previous = [], []
            self._latest.clear()
            self._match = None
        for token_id in token_ids:
            self._append(token_id)

    def longest_match(self) -> Match | None:
        """The longest match of at least ``min_match_tokens`` tokens."""
        if not self._match_is_known:
            self._match = self._search()
            self._match_is_known = True
        return self._match

    def continuation(self, end: int, num_tokens: int) -> tuple[int, ...]:
        """What followed position ``end``, repeated periodically where it runs into the end of the sequence."""
        followers = self._tokens[end + 1 : end + 1 + num_tokens]
        return tuple(followers[index % len(followers)] for index in range(num_tokens))

    def agreement(self, end: int) -> tuple[int, int]:
        """Of the most recent other occurrences of the last ``min_match_tokens`` tokens, at most 6: how many went on
        as the one at ``end`` did, and how many did not."""
        tokens = self._tokens
        follower = tokens[end + 1]
        agree = differ = 0
        other = self._previous[len(tokens) - 1]
        while other >= 0 and agree + differ < _MAX_OTHERS:
            if tokens[other + 1] == follower:
                agree += other != end
            else:
                differ += 1
            other = self._previous[other]
        return agree, differ

    def _append(self, token_id: int) -> None:
        tokens, match = self._tokens, self._match
        if match is not None and tokens[match.end + 1] == token_id:
            self._match = Match(match.num_tokens + 1, match.end + 1)
        else:
            self._match = None
            self._match_is_known = False
        tokens.append(token_id)
        if len(tokens) < self._min_match_tokens:
            self._previous.append(-1)
            return
        ngram = tuple(tokens[-self._min_match_tokens :])
        position = len(tokens) - 1
        self._previous.append(self._latest.get(ngram, -1))
        self._latest[ngram] = position

    def _search(self) -> Match | None:
        tokens, last = self._tokens, len(self._tokens) - 1
        longest, longest_end = 0, -1
        end = self._previous[last]
        num_steps = self._max_search_steps
        while end >= longest and num_steps > 0:
            num_steps -= 1
            # Whatever beats the longest match so far agrees with it and one token further back: look there first.
            if tokens[end - longest] == tokens[last - longest]:
                num_equal = self._min_match_tokens  # as the chain says
                while num_equal <= end and num_steps > 0 and tokens[end - num_equal] == tokens[last - num_equal]:
                    num_equal += 1
                    num_steps -= 1
                if num_equal > longest:
                    longest, longest_end = num_equal, end
            end = self._previous[end]
        return Match(longest, longest_end) if longest > 0 else None
