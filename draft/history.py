"""Earlier answers of a tenant, to find in them how the present one goes on."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

_NGRAM = 3  # tokens by which an answer is found: shorter repetitions across answers say little
_NUM_SEGMENTS = 8


@dataclass(frozen=True, slots=True)
class HistoryConfig:
    """How much of earlier answers is kept; about 150 bytes a token.

    ``max_tokens_per_tenant``: of a tenant's most recent answers; at least three quarters of it are kept.
    ``max_tenants``: those that asked last; the others' answers are forgotten.
    ``max_tokens_per_answer``: an answer's first; they are taken in at once, at half a microsecond a token.
    """

    max_tokens_per_tenant: int = 65_536
    max_tenants: int = 64
    max_tokens_per_answer: int = 2_048

    def __post_init__(self) -> None:
        if self.max_tenants < 1:
            raise ValueError(f"max_tenants is {self.max_tenants}; it must be at least 1")
        if self.max_tokens_per_answer < 1:
            raise ValueError(f"max_tokens_per_answer is {self.max_tokens_per_answer}; it must be at least 1")
        if self.max_tokens_per_tenant < _NUM_SEGMENTS:
            raise ValueError(
                f"max_tokens_per_tenant is {self.max_tokens_per_tenant}; it must be at least {_NUM_SEGMENTS}"
            )


class _Segment:
    """Parts of answers, one after the other, found by their n-grams. Dropped as a whole, which costs nothing."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.latest: dict[tuple[int, ...], int] = {}  # n-gram -> the last position it ends at
        self.previous: list[int] = []  # position -> the position before where its n-gram ended, or -1

    def append(self, answer: Sequence[int]) -> None:
        start, tokens = len(self.tokens), self.tokens
        tokens += answer
        self.previous += [-1] * len(answer)
        for position in range(start + _NGRAM - 1, len(tokens)):
            ngram = tuple(tokens[position - _NGRAM + 1 : position + 1])
            self.previous[position] = self.latest.get(ngram, -1)
            self.latest[ngram] = position
        tokens.append(-1)  # no token: nothing matches across the end of an answer
        self.previous.append(-1)


class HistoryMatch:
    """The last ``num_tokens`` tokens of a text also stand in an earlier answer, and end at ``end`` there."""

    __slots__ = ("_end", "_segment", "num_tokens")

    def __init__(self, segment: _Segment, end: int, num_tokens: int) -> None:
        self._segment = segment
        self._end = end
        self.num_tokens = num_tokens

    def follows(self, token_id: int) -> bool:
        """Go on with the text by one token; False if the answer goes on differently."""
        if self._segment.tokens[self._end + 1] != token_id:
            return False
        self._end += 1
        self.num_tokens += 1
        return True

    def continuation(self, num_tokens: int) -> tuple[int, ...]:
        """What followed there, up to the answer's end."""
        tokens = self._segment.tokens
        followers = tokens[self._end + 1 : self._end + 1 + num_tokens]
        return tuple(followers[: followers.index(-1)] if -1 in followers else followers)


class AnswerHistory:
    """One tenant's earlier answers.

    *Time*: taking in an answer costs a dictionary access a token; a search at most ``max_search_steps`` comparisons
    and eight accesses. *Memory*: the most recent answers, in segments; the oldest segment makes room for a new one.
    """

    def __init__(self, config: HistoryConfig) -> None:
        self._config = config
        self._segments: deque[_Segment] = deque()

    @property
    def num_tokens(self) -> int:
        return sum(len(segment.tokens) for segment in self._segments)

    def add(self, answer: Sequence[int]) -> None:
        room = self._config.max_tokens_per_tenant // _NUM_SEGMENTS
        answer = answer[: min(self._config.max_tokens_per_answer, room - 1)]
        if len(answer) <= _NGRAM:
            return
        if not self._segments or len(self._segments[-1].tokens) >= room:
            self._segments.append(_Segment())
        self._segments[-1].append(answer)
        while self.num_tokens > self._config.max_tokens_per_tenant:
            self._segments.popleft()

    def search(self, text: Sequence[int], max_search_steps: int) -> HistoryMatch | None:
        """The longest match of the text's end, of at least 3 tokens; of equal ones the most recent."""
        if len(text) < _NGRAM:
            return None
        ngram = tuple(text[-_NGRAM:])
        longest: HistoryMatch | None = None
        num_steps = max_search_steps
        for segment in reversed(self._segments):
            tokens = segment.tokens
            end = segment.latest.get(ngram, -1)
            while end >= 0 and num_steps > 0:
                num_equal = _NGRAM
                while num_equal <= end and num_equal < len(text) and tokens[end - num_equal] == text[-1 - num_equal]:
                    num_equal += 1
                num_steps -= 1 + num_equal - _NGRAM
                if longest is None or num_equal > longest.num_tokens:
                    longest = HistoryMatch(segment, end, num_equal)
                end = segment.previous[end]
        return longest


class TenantHistories:
    """Every tenant's earlier answers, each for itself."""

    def __init__(self, config: HistoryConfig | None = None) -> None:
        self._config = config or HistoryConfig()
        self._histories: OrderedDict[str, AnswerHistory] = OrderedDict()  # who asked last is last

    def __len__(self) -> int:
        return len(self._histories)

    @property
    def max_tokens_per_answer(self) -> int:
        return self._config.max_tokens_per_answer

    def of(self, tenant: str) -> AnswerHistory:
        """A tenant's own; who has not asked for longest is forgotten for it, if there are too many."""
        history = self._histories.setdefault(tenant, AnswerHistory(self._config))
        self._histories.move_to_end(tenant)
        if len(self._histories) > self._config.max_tenants:
            self._histories.popitem(last=False)
        return history
