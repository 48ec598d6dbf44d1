"""``outrider bench quality``: what quantised weights, activations and caches cost in distribution."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from outrider.server.bench import report
from outrider.server.bench.prompts import InvalidWorkload
from outrider.server.bench.quality import Quality, measure
from outrider.server.bench.texts import load_texts
from outrider.server.cli.bench import natural, positive, say
from outrider.server.cli.main import CommandFailed
from outrider.server.cli.options import add_options, make_settings
from outrider.server.cli.serve import ENGINE_OPTIONS, find_model
from outrider.server.engine.settings import KERNELS, KV_CACHE_DTYPES, QUANTIZATIONS, EngineSettings
from outrider.verify.checkpoint.config import UnsupportedCheckpoint

DESCRIPTION = """\
Runs texts through the model as `outrider serve` would, and through plain float32 on the checkpoint's weights, and
compares the distributions of the next token: KL divergence, perplexity, likeliest token. No server is needed.

TEXTS is a text file, or a .jsonl file of JSON lines with "text", or with prompts as `outrider bench` takes them.
"""
EPILOG = """\
examples:
  outrider bench quality questions.jsonl
  outrider bench quality book.txt --kv-cache-dtype int8 --max-tokens 20000
  outrider bench quality book.txt --model Qwen/Qwen3-0.6B --quantize int4

It needs memory for the weights in float32 (1.7 GB for the default model), and some minutes for 20,000 tokens.
"""
LEGEND = """\
KL divergence: of the measured from the float32 distribution, in nats, mean over tokens; 99 % of them are below p99.
same top token: how often both find the same token likeliest."""
OPTIONS = ("kernels", "num_threads", "quantize", "kv_cache_dtype")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("texts", metavar="TEXTS", type=Path, help="text file, or .jsonl file of texts")
    what = parser.add_argument_group("what is measured")
    what.add_argument(
        "--model", default="default", help="'default', a .gguf file, a Hugging Face directory or a hub id"
    )
    choices = {"kernels": KERNELS, "quantize": QUANTIZATIONS, "kv_cache_dtype": KV_CACHE_DTYPES}
    add_options(what, EngineSettings, {name: ENGINE_OPTIONS[name] for name in OPTIONS}, choices)
    how = parser.add_argument_group("workload")
    how.add_argument(
        "--context", metavar="N", type=positive, default=1024, help="tokens of a window; longer texts are cut"
    )
    how.add_argument("--max-tokens", metavar="N", type=natural, default=0, help="stop after N tokens; 0: use all")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures")


def run(args: argparse.Namespace) -> int:
    settings = make_settings(EngineSettings, args, model_path="", model_name="")
    try:
        texts = load_texts(args.texts)
        path, name = find_model(args.model)
        settings = replace(settings.resolved(), model_path=str(path), model_name=name)
        quality = measure(settings, texts, args.context, args.max_tokens, say)
    except (InvalidWorkload, UnsupportedCheckpoint, ValueError) as error:
        raise CommandFailed(str(error)) from error
    finally:
        say("")
    show(args, settings, quality)
    return 0


def show(args: argparse.Namespace, settings: EngineSettings, quality: Quality) -> None:
    machine = report.machine()
    print(f"texts     {args.texts.name}, in windows of at most {args.context} tokens")
    print(f"machine   {machine['processor']}, {machine['num_cores']} cores, outrider {machine['outrider']}")
    print(
        f"model     {settings.model_name}: kernels {settings.kernels}, quantize {settings.quantize}, "
        f"keys and values {settings.kv_cache_dtype}; beside float32\n"
    )
    figures = {
        "tokens": f"{quality.num_tokens:,}",
        "KL divergence": f"{quality.kl_divergence:.5f}, p99 {quality.kl_divergence_p99:.4f}",
        "perplexity": f"{quality.perplexity:.4f}, float32 {quality.reference_perplexity:.4f}, "
        f"ratio {quality.perplexity_ratio:.5f}",
        "same top token": f"{quality.same_top_token:.2%}",
    }
    for name, figure in figures.items():
        print(f"{name:<16}{figure}")
    print("\n" + LEGEND)
    if args.json:
        args.json.write_text(json.dumps(as_json(args, settings, quality, machine), indent=1) + "\n")


def as_json(
    args: argparse.Namespace, settings: EngineSettings, quality: Quality, machine: dict[str, Any]
) -> dict[str, Any]:
    return {
        "workload": {"texts": args.texts.name, "context": args.context, "max_tokens": args.max_tokens},
        "model": {"name": settings.model_name} | {name: getattr(settings, name) for name in OPTIONS},
        "machine": machine,
        "quality": asdict(quality) | {"perplexity_ratio": quality.perplexity_ratio},
    }
