"""``outrider distill``: make a draft for a model, from nothing but the model's own words."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.draft.distill.settings import DTYPES, DistillSettings
from outrider.server.bench import report
from outrider.server.bench.prompts import InvalidWorkload, Prompt, load_prompts
from outrider.server.cli.bench import natural, positive
from outrider.server.cli.main import CommandFailed, WrongUsage
from outrider.server.cli.options import defaults, make_settings
from outrider.server.cli.serve import find_model
from outrider.verify.checkpoint.config import UnsupportedCheckpoint

if TYPE_CHECKING:
    from outrider.draft.distill.progress import Progress

DESCRIPTION = """\
Makes a draft for a model: a small head that guesses the model's next tokens from its hidden states, so that `outrider
serve` streams faster and not a token changes. The model asks itself questions and answers them, at several
temperatures; the head learns from that and from nothing else. It is then measured in the engine.

All time is split between the three. A run that was killed goes on with the same command. When it is done, DIR holds
the draft in the `speculators` format, a model card (README.md) and a plot of the training; what a run needs to go on
lies in DIR/work and may be deleted.
"""
EPILOG = """\
examples:
  outrider distill --out my-draft                          the default model, over night
  outrider distill --model Qwen/Qwen3-0.6B --out my-draft --minutes 600
  outrider distill --out my-draft --minutes 5              to see it work
  outrider distill --out my-draft --minutes 0 --tokens 2000000 --epochs 4
                                                           the same draft on every machine of a kind
  outrider serve --draft-model my-draft                    use it

A draft is worth having from about 300,000 tokens of answers. Of the default model's, two cores generate about 350 a
second, and train on 1,000 to 2,000; a GPU is used for training if torch finds one.
"""
METAVARS = {"minutes": "M", "epochs": "N", "learning_rate": "RATE", "directness": "PART", "plain_part": "PART"}
BUDGET_OPTIONS = {
    "minutes": "time for all; 0: as long as it takes, which needs --tokens and --epochs",
    "tokens": "of answers to learn from; 0: what the time allows",
    "epochs": "times that all of them are learned from; 0: what the time allows",
}
DRAFT_OPTIONS = {
    "layers": "layers of the draft, 1 or 2",
    "draft_vocab": "tokens it can guess, the most frequent ones; most of a draft's cost",
    "intermediate": "width of its MLP; 0: as the model's",
    "kv_heads": "key and value heads of its attention; 0: as the model's",
}
RECIPE_OPTIONS = {
    "seed": "of everything that is left to chance",
    "unroll": "guesses of a chain that are trained, each on what those before it left",
    "plain_part": "first part of the training, in which only the first guess of a chain is trained: it is quick",
    "directness": "part of the gradient that is that of the acceptance itself; the rest is the divergence's",
    "learning_rate": "the highest, after the warm-up",
    "batch_tokens": "rows of a training step",
    "max_turn_tokens": "where a sampled question is cut",
    "max_answer_tokens": "where an answer is cut",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    what = parser.add_argument_group("what is made")
    what.add_argument(
        "--model", "--target", default="default", help="'default', a .gguf file, a Hugging Face directory or a hub id"
    )
    what.add_argument("--out", metavar="DIR", type=Path, required=True, help="where the draft goes; made if need be")
    _add_settings(what, DRAFT_OPTIONS)
    _add_settings(parser.add_argument_group("how much"), BUDGET_OPTIONS)
    _add_settings(parser.add_argument_group("recipe"), RECIPE_OPTIONS)
    how = parser.add_argument_group("validation and machine")
    how.add_argument(
        "--questions",
        metavar="FILE",
        type=Path,
        help="measure the draft on these too, by category: JSON lines as `outrider bench` takes them",
    )
    how.add_argument("--chain", metavar="N", type=positive, default=4, help="guesses a step in validation")
    how.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="where the draft is trained")
    how.add_argument("--num-threads", metavar="N", type=natural, default=0, help="0: one per core")
    how.add_argument(
        "--save-every", metavar="SECONDS", type=float, default=60.0, help="what a kill costs of the training at most"
    )

    how.add_argument(
        "--dtype",
        choices=DTYPES,
        default=defaults(DistillSettings)["dtype"],
        help="what training computes in; auto: whichever is faster here, found out once",
    )


def _add_settings(group: argparse._ArgumentGroup, help_texts: dict[str, str]) -> None:
    for name, text in help_texts.items():
        default = defaults(DistillSettings)[name]
        option, metavar = "--" + name.replace("_", "-"), METAVARS.get(name, "N")
        group.add_argument(option, type=type(default), default=default, metavar=metavar, help=text)


def run(args: argparse.Namespace) -> int:
    settings = make_settings(DistillSettings, args)
    if not (math.isfinite(args.save_every) and args.save_every >= 0.0):
        raise WrongUsage(f"--save-every must be 0 or more seconds, not {args.save_every:g}")
    try:
        questions = load_prompts(args.questions) if args.questions else []  # better missed now than after a night
    except InvalidWorkload as error:
        raise CommandFailed(str(error)) from error
    distill(args, settings, questions)
    return 0


def distill(args: argparse.Namespace, settings: DistillSettings, questions: list[Prompt]) -> None:
    """Do it, and say what came out.

    Raises:
        CommandFailed: it cannot be done, or not to the end.
    """
    model = find_model(args.model)
    from outrider.draft.distill.directory import RunRefused  # all of these bring torch
    from outrider.draft.distill.generation import CorpusFailed
    from outrider.draft.distill.trainer import TrainingDiverged
    from outrider.server.distill.continuations import GenerationFailed
    from outrider.server.distill.run import Machinery, Run, Watcher
    from outrider.server.distill.validation import ValidationFailed

    machinery = Machinery(
        args.device, args.num_threads, args.save_every, args.chain, machine_description(), command_line()
    )
    refusals = (RunRefused, CorpusFailed, TrainingDiverged, GenerationFailed, ValidationFailed, UnsupportedCheckpoint)
    try:
        acceptance = Run(model, args.out, settings, machinery, Watcher(say, bar)).distill(questions)
    except (*refusals, ValueError) as error:
        raise CommandFailed(str(error)) from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise CommandFailed(
            f"cannot write to {args.out}: {reason}; what is there is kept, the same command goes on from it"
        ) from error
    for one in acceptance:
        say(f"{one.name}: {one.acceptance_length:.2f} tokens a step over {one.num_questions} questions")
    say(f"{args.out} holds the draft; use it with: outrider serve --model {args.model} --draft-model {args.out}")


def command_line() -> str:
    """What was typed, for the model card; the directory is nobody else's business."""
    words = sys.argv[1:]
    for place, word in enumerate(words):
        if word == "--out" and place + 1 < len(words):
            words[place + 1] = "DIR"
        elif word.startswith("--out="):
            words[place] = "--out=DIR"
    return shlex.join(["outrider", *words])


def say(sentence: str) -> None:
    """What happened, one line each, for whoever looks in the morning."""
    print(f"{time.strftime('%H:%M:%S')}  {sentence}", flush=True)


class Bar:
    """A progress bar with the time that is left, where somebody watches."""

    def __init__(self, phase: str) -> None:
        from tqdm import tqdm

        layout = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining} {postfix}"
        self._bar = tqdm(total=1.0, desc=phase, bar_format=layout, disable=None, leave=False, file=sys.stderr)

    def show(self, progress: Progress) -> None:
        self._bar.set_postfix_str(progress.detail, refresh=False)
        self._bar.update(max(progress.done - self._bar.n, 0.0))

    def close(self) -> None:
        self._bar.close()


@contextmanager
def bar(phase: str) -> Iterator[Callable[[Progress], None]]:
    """A phase with a bar."""
    shown = Bar(phase)
    try:
        yield shown.show
    finally:
        shown.close()


def machine_description() -> str:
    machine = report.machine()
    return f"{machine['processor']}, {machine['num_cores']} cores, outrider {machine['outrider']}"
