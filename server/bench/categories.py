"""Results by the category of their prompts: speeds beside each other, and what became of drafts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from outrider.server.bench.measures import Measurement, Ratio, ratio
from outrider.server.bench.prompts import Prompt
from outrider.server.bench.rounds import Result
from outrider.server.bench.speculation import Speculation, merged

ALL = "all"

Speed = Callable[[Iterable[Measurement]], float | None]


def stream_speed(measurements: Iterable[Measurement]) -> float | None:
    """Tokens a second of a stream, from being sent to the end, over all streams' time together."""
    known = [(m.num_output_tokens, m.e2e_s) for m in measurements if m.num_output_tokens and m.e2e_s]
    return sum(n for n, _ in known) / sum(s for _, s in known) if known else None


def decode_speed(measurements: Iterable[Measurement]) -> float | None:
    """The same after the first text: 1/TPOT, with no part of the prompt's time in it."""
    known = [
        (m.num_output_tokens - 1, m.e2e_s - m.ttft_s)
        for m in measurements
        if m.num_output_tokens and m.num_output_tokens > 1 and m.e2e_s and m.ttft_s and m.e2e_s > m.ttft_s
    ]
    return sum(n for n, _ in known) / sum(s for _, s in known) if known else None


@dataclass(frozen=True, slots=True)
class Part:
    """One contender's answers to the prompts of one category, round by round."""

    rounds: tuple[tuple[Measurement, ...], ...]

    @property
    def measurements(self) -> list[Measurement]:
        return [measurement for measurements in self.rounds for measurement in measurements]

    def speed(self, speed: Speed) -> float | None:
        return speed(self.measurements)

    def ratio(self, other: Part, speed: Speed) -> Ratio | None:
        """How many times the other's speed, over the rounds."""
        return ratio([speed(one) for one in self.rounds], [speed(one) for one in other.rounds])

    @property
    def speculation(self) -> Speculation:
        return merged(measurement.speculation for measurement in self.measurements)

    def same_texts(self, other: Part) -> tuple[int, int]:
        """Answers with the same text, and all that neither failed."""
        pairs = [
            (a.text_digest, b.text_digest)
            for a, b in zip(self.measurements, other.measurements, strict=True)
            if a.text_digest and b.text_digest
        ]
        return sum(a == b for a, b in pairs), len(pairs)


def by_category(result: Result, prompts: Sequence[Prompt]) -> dict[str, Part]:
    """The parts of a result by category, in the order of the prompts, and at last all of it."""
    categories = {prompt.line: prompt.category for prompt in prompts}
    names = [name for name in dict.fromkeys(categories.values()) if name]
    parts = {name: _part(result, lambda line, name=name: categories[line] == name) for name in names}  # type: ignore[misc]
    return {**parts, ALL: _part(result, lambda line: True)}


def _part(result: Result, takes: Callable[[int], bool]) -> Part:
    return Part(
        tuple(
            tuple(sorted((m for one in passes for m in one.measurements if takes(m.line)), key=lambda m: m.line))
            for passes in result.rounds
        )
    )


def best_other(parts: Mapping[str, Part], speed: Speed) -> str | None:
    """The contender with the highest speed."""
    speeds = {name: found for name, part in parts.items() if (found := part.speed(speed)) is not None}
    return max(speeds, key=lambda name: speeds[name], default=None)
