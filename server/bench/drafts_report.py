"""Tables of what speculation gains: by category, by source and position, and against every fixed length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from outrider.server.bench.categories import Part, Speed, best_other, by_category, decode_speed, stream_speed
from outrider.server.bench.measures import Ratio
from outrider.server.bench.prompts import Prompt
from outrider.server.bench.report import aligned, num_streams
from outrider.server.bench.rounds import Result
from outrider.server.bench.speculation import Speculation

LEGEND = """\
tok/s: tokens over the time of all streams, from being sent to the end, the prompt's part included; where it says
decode, after the first text alone. Ratio: of the rounds, the median (lowest to highest). length: mean tokens of a step
that verified a draft, the target's own included. a step: mean tokens of all steps. draft, verify: ms of a step that
go to drafting, and to the target's pass and the sampler. Same text: answers that both gave letter by letter."""

Parts = Mapping[str, Mapping[str, Part]]  # contender: category: part


def parts_of(results: Sequence[Result], prompts: Sequence[Prompt]) -> dict[str, dict[str, Part]]:
    """The parts of results at one concurrency, by contender and category."""
    return {result.contender: by_category(result, prompts) for result in results}


def tables(results: Sequence[Result], prompts: Sequence[Prompt]) -> str:
    """By category, at each concurrency: the first contender beside each other, and its drafts by source."""
    found = []
    for concurrency in dict.fromkeys(result.concurrency for result in results):
        parts = parts_of([result for result in results if result.concurrency == concurrency], prompts)
        first, *others = parts
        texts = [category_table(parts, first, other) for other in others] or [category_table(parts, first, None)]
        found.append("\n\n".join([num_streams(concurrency) + ":", *texts, source_table(parts[first])]))
    return "\n\n".join(found)


def category_table(parts: Parts, first: str, second: str | None) -> str:
    """The first by category, and how it compares with the second."""
    compared = ("ratio", "same text") if second else ()
    names = [name for name in (second, first) if name]
    rows: list[tuple[str, ...]] = [
        ("category", "prompts", *(f"{name} tok/s" for name in names), *compared, *_DRAFT_COLUMNS)
    ]
    for category, ours in parts[first].items():
        cells = [_number(parts[name][category].speed(stream_speed)) for name in names]
        if second:
            theirs = parts[second][category]
            same, total = ours.same_texts(theirs)
            cells += [_ratio(ours.ratio(theirs, stream_speed)), f"{same}/{total}"]
        rows.append((category, str(len(ours.rounds[0])), *cells, *_draft_cells(ours.speculation)))
    return aligned(rows)


_DRAFT_COLUMNS = ("length", "a step", "accepted", "draft", "verify")


def _draft_cells(found: Speculation) -> tuple[str, ...]:
    return (
        _number(found.acceptance_length, 2),
        _number(found.tokens_per_step, 2),
        _percent(found.acceptance_rate),
        _number(found.draft_ms_per_step, 2),
        _number(found.verify_ms_per_step, 2),
    )


def source_table(parts: Mapping[str, Part]) -> str:
    """What each source's drafts came to, and of those that reached a position, how many were accepted there."""
    longest = max((len(part.speculation.drafted_per_position) for part in parts.values()), default=0)
    places = [str(position + 1) for position in range(longest)]
    rows: list[tuple[str, ...]] = [("category", "source", "steps", "drafted", "accepted", "length", *places)]
    for category, part in parts.items():
        for source, found in part.speculation.by_source.items():
            shares = [
                _percent(accepted / drafted if drafted else None)
                for drafted, accepted in zip(found.drafted_per_position, found.accepted_per_position, strict=True)
            ]
            rows.append(
                (
                    category,
                    source,
                    str(found.num_steps),
                    str(found.num_draft_tokens),
                    _percent(found.acceptance_rate),
                    _number(found.acceptance_length, 2),
                    *shares,
                    *["-"] * (longest - len(shares)),
                )
            )
    return aligned(rows, left=(0, 1))


def sweep_table(parts: Parts, controller: str, fixed: Sequence[str]) -> str:
    """The controller beside every fixed length, by decode speed: these share a server, and so prompts in its cache."""
    rows: list[tuple[str, ...]] = [("category", f"{controller} tok/s", *fixed, "best", f"{controller} / best")]
    for category, ours in parts[controller].items():
        others = {name: parts[name][category] for name in fixed}
        best = best_other(others, decode_speed)
        rows.append(
            (
                category,
                _number(ours.speed(decode_speed)),
                *(_number(other.speed(decode_speed)) for other in others.values()),
                best or "-",
                _ratio(ours.ratio(others[best], decode_speed)) if best else "-",
            )
        )
    return aligned(rows)


def as_json(parts: Parts, first: str) -> dict[str, Any]:
    """Every contender's speeds and drafts by category, and the ratios of the first to each other."""
    return {
        contender: {
            category: {
                "num_answers": len(part.measurements),
                "tokens_per_second": part.speed(stream_speed),
                "decode_tokens_per_second": part.speed(decode_speed),
                "ratio_of_first": _asdict(parts[first][category].ratio(part, stream_speed)),
                "decode_ratio_of_first": _asdict(parts[first][category].ratio(part, decode_speed)),
                "same_texts_as_first": parts[first][category].same_texts(part),
                "acceptance_length": part.speculation.acceptance_length,
                "tokens_per_step": part.speculation.tokens_per_step,
                "speculation": asdict(part.speculation),
            }
            for category, part in categories.items()
        }
        for contender, categories in parts.items()
    }


def overall_ratios(parts: Parts, first: str, others: Sequence[str], speed: Speed) -> str:
    """The first against each other over all prompts."""
    ours = list(parts[first].values())[-1]
    found = [(name, _ratio(ours.ratio(list(parts[name].values())[-1], speed))) for name in others]
    return "\n".join(f"  {first} / {name:<12} {text}" for name, text in found)


def _asdict(found: Ratio | None) -> dict[str, float] | None:
    return None if found is None else asdict(found)


def _ratio(found: Ratio | None) -> str:
    return "-" if found is None else f"{found.median:.2f} ({found.lowest:.2f}-{found.highest:.2f})"


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"
