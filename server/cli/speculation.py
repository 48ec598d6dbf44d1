"""The options of ``outrider serve`` that say how to speculate. No torch here."""

from __future__ import annotations

import argparse

from outrider.server.cli.main import WrongUsage
from outrider.server.cli.models import pull
from outrider.server.cli.options import add_options, defaults
from outrider.server.cli.speculative_config import InvalidSpeculativeConfig, parse_speculative_config
from outrider.server.engine.settings import (
    DRAFT_QUANTIZATIONS,
    DRAFT_SAMPLE_METHODS,
    DRAFTERS,
    REJECTION_SAMPLE_METHODS,
    EngineSettings,
)

OPTIONS = {
    "drafter": "who guesses the next tokens: what came before (suffix), a draft model (model), both (hybrid); auto: "
    "hybrid where --draft-model names one, else suffix",
    "max_draft_tokens": "guesses for a sequence and step, at most; 0: none. Answers are the same in any case",
    "adaptive_drafts": "let measured time decide how many of these are worth it, step by step",
    "draft_quantize": "what the weights of a draft model become (cpu kernels); auto: int8, or int4 as the model",
    "draft_sample_method": "how a draft model guesses above temperature 0: drawn as the model draws, or its likeliest",
    "rejection_sample_method": "how drafts with probabilities are verified: token by token, or as a block",
    "suffix_min_match": "tokens that must repeat before what followed them is guessed",
    "suffix_history": "guess from earlier answers of the same tenant too",
}
CHOICES = {
    "drafter": DRAFTERS,
    "draft_quantize": DRAFT_QUANTIZATIONS,
    "draft_sample_method": DRAFT_SAMPLE_METHODS,
    "rejection_sample_method": REJECTION_SAMPLE_METHODS,
}


def add_speculation_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("speculation")
    group.add_argument("--no-speculation", action="store_true", help="guess nothing: as --drafter none")
    group.add_argument(
        "--draft-model",
        metavar="MODEL",
        help="the draft model: a speculators or Hugging Face directory, a .gguf file or a hub id (default, "
        "for --drafter hybrid and model: the one that comes with Outrider for this model)",
    )
    add_options(group, EngineSettings, OPTIONS, CHOICES)
    group.add_argument(
        "--speculative-config",
        metavar="JSON",
        help='all of this in vLLM\'s names, such as \'{"method": "suffix", "num_speculative_tokens": 8}\'; '
        "methods: ngram, suffix, draft_model, eagle3, hybrid",
    )


def read_speculation(args: argparse.Namespace) -> str:
    """Take ``--speculative-config`` and ``--no-speculation`` into the options; returns the draft that is named, or "".

    Raises:
        WrongUsage: one contradicts another, or cannot be honoured.
    """
    draft: str = args.draft_model or ""
    if args.speculative_config is not None:
        try:
            config = parse_speculative_config(args.speculative_config)
        except InvalidSpeculativeConfig as error:
            raise WrongUsage(f"--speculative-config: {error}") from error
        for name, value in config.settings.items():
            _take(args, name, value, "--speculative-config")
        if config.model is not None:
            if draft not in ("", config.model):
                raise WrongUsage("--speculative-config and --draft-model name different models; leave one out")
            draft = config.model
    if args.no_speculation:
        if draft:
            raise WrongUsage("--no-speculation has no use for a draft model; leave one of the two out")
        _take(args, "drafter", "none", "--no-speculation")
    if draft and args.drafter in ("suffix", "none"):
        raise WrongUsage(f"--drafter {args.drafter} has no use for a draft model; leave --draft-model out")
    return draft


def find_draft(source: str) -> str:
    """Where the draft lies that ``source`` names, fetched if need be; "" for none.

    Raises:
        CommandFailed: there is no such draft, or it cannot be fetched.
    """
    return str(pull(source)) if source else ""


def _take(args: argparse.Namespace, name: str, value: object, origin: str) -> None:
    """Set an option that the command line left at its default."""
    asked = getattr(args, name)
    if asked not in (defaults(EngineSettings)[name], value):
        option = "--" + name.replace("_", "-")
        raise WrongUsage(f"{origin} asks for {value}, {option} for {asked}; leave one of them out")
    setattr(args, name, value)
