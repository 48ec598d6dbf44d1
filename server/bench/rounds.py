"""Who runs when. A machine's speed drifts within minutes, so contenders take turns prompt by prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.server.bench.contenders import Contender
from outrider.server.bench.measures import Pass, Summary, summarise
from outrider.server.bench.prompts import Prompt


@dataclass(frozen=True, slots=True)
class Result:
    """All that one contender did at one concurrency: for each round, its passes."""

    contender: str
    concurrency: int
    rounds: tuple[tuple[Pass, ...], ...]

    @property
    def summary(self) -> Summary:
        return summarise(one for passes in self.rounds for one in passes)

    @property
    def round_summaries(self) -> list[Summary]:
        return [summarise(passes) for passes in self.rounds]


async def run_rounds(
    contenders: Sequence[Contender],
    prompts: Sequence[Prompt],
    concurrency: int,
    *,
    num_rounds: int,
    num_warmups: int,
    report: Callable[[str], None],
) -> list[Result]:
    """Every contender answers every prompt once a round; returns a result each, in their order.

    One contender alone is kept busy with ``concurrency`` streams throughout. Several take turns after every
    ``concurrency`` prompts, in the order A B, B A, A B, …, so that neither a drift nor being second favours
    one of them; each turn begins and ends with nothing running.
    """
    size = concurrency if len(contenders) > 1 else len(prompts)
    groups = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    for number in range(num_warmups):
        report(f"warm-up {number + 1}/{num_warmups}")
        for contender in contenders:
            await contender.run(groups[number % len(groups)][:concurrency], concurrency)
    passes: dict[str, list[list[Pass]]] = {contender.name: [] for contender in contenders}
    for number in range(num_rounds):
        for rounds in passes.values():
            rounds.append([])
        for turn, group in enumerate(groups):
            report(f"{concurrency} at a time, round {number + 1}/{num_rounds}, turn {turn + 1}/{len(groups)}")
            order = contenders if (number + turn) % 2 == 0 else contenders[::-1]
            for contender in order:
                passes[contender.name][-1].append(await contender.run(group, concurrency))
    return [Result(name, concurrency, tuple(map(tuple, rounds))) for name, rounds in passes.items()]
