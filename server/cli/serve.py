"""``outrider serve``: one model, over WebSocket and HTTP."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import logging
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from pathlib import Path

from outrider.kernels.cpu.availability import native_problem, selected_instruction_set, usable_cpus
from outrider.server.cli.main import CommandFailed
from outrider.server.cli.models import pull
from outrider.server.cli.options import add_options, make_settings
from outrider.server.cli.speculation import add_speculation_options, find_draft, read_speculation
from outrider.server.engine.launch import EngineWorker, launch
from outrider.server.engine.request import ModelInfo
from outrider.server.engine.settings import KERNELS, KV_CACHE_DTYPES, QUANTIZATIONS, EngineSettings
from outrider.server.protocol.prompt import PromptBuilder
from outrider.server.protocol.surroundings import ConnectionLimits
from outrider.server.ws.settings import ServerSettings

DESCRIPTION = """\
Serves a model at ws://HOST:PORT/v1/responses in the dialect of OpenAI's Responses WebSocket mode, so that
the stock openai client can talk to it. GET /health, /v1/models and /metrics tell how it is.
The default model is fetched if it is not here (93 MB, once).
"""

EPILOG = """\
examples:
  outrider serve
  outrider serve --model ~/models/qwen2.5-0.5b-instruct-q8_0.gguf --port 9000
  outrider serve --model Qwen/Qwen3-0.6B --kv-cache-mib 4096
  outrider serve --no-speculation         the same answers, later
  outrider serve --speculative-config '{"method": "eagle3", "model": "org/name", "num_speculative_tokens": 5}'

environment variables:
  OUTRIDER_CACHE              where the default model and what passes cost here are kept
                              (else XDG_CACHE_HOME/outrider, else ~/.cache/outrider)
  OUTRIDER_CPU_ISA            the instruction set of the cpu kernels, such as scalar; else the best (outrider doctor)

signals:
  SIGTERM, SIGINT (Ctrl-C)    finish what runs, for at most --drain-timeout-s; a second one ends at once

exit codes:
  0  stopped by a signal      1  cannot serve; the last line says why      2  wrong usage
"""

ENGINE_OPTIONS = {
    "kernels": "who computes: cpu (native), reference (plain torch, slow), auto: cpu where it is built",
    "num_threads": "threads of the kernels; 0: one per core that this process may use",
    "quantize": "what the weights of a Hugging Face model become (cpu kernels); those of a GGUF file stay as they are",
    "kv_cache_dtype": "form of keys and values in memory; auto: f16 with the cpu kernels, f32 with the reference",
    "max_context": "tokens of prompt and answer together; 0: what the model was made for, at most 8192",
    "kv_cache_mib": "memory for keys and values, in MiB",
    "page_size": "tokens in a page of that memory",
    "max_running": "sequences that decode at the same time; more wait",
    "max_step_tokens": "tokens computed in one step; a long prompt is cut into such chunks",
    "profile": "measure at the first start what passes cost on this machine, for a second, and keep it",
}
ADDRESS_OPTIONS = {"host": "address to listen on", "port": "port to listen on; 0: any free one"}
SERVER_OPTIONS = {
    "drain_timeout_s": "how long running answers may go on after the first signal",
    "ping_interval_s": "between pings of a silent connection",
    "ping_timeout_s": "without an answer to a ping before a connection is given up",
    "unacknowledged_timeout_s": "without the client's machine taking sent data before a connection is given up",
    "max_frame_bytes": "size of one WebSocket message; a larger one ends the connection, unread",
    "store_max_responses": "answers kept for previous_response_id",
    "store_max_bytes": "memory for these",
    "store_max_age_s": "how long they are kept",
    "log_level": "how much is logged",
    "access_log": "log every HTTP request",
}
CONNECTION_OPTIONS = {
    "max_in_flight": "responses of one connection in the engine; more wait",
    "max_queued": "responses of one connection waiting for others of their streams; more are refused",
    "max_streams": "named streams of one connection",
    "max_message_bytes": "size of one message; a larger one gets an error",
    "max_outbox_bytes": "what waits for a slow client; more ends its connection",
    "max_age_s": "how long a connection may last",
    "keep_alive_s": "of silence in a response, until its last state is sent again",
}
LOG_LEVELS = ("critical", "error", "warning", "info", "debug")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    what = parser.add_argument_group("model")
    what.add_argument(
        "--model",
        default="default",
        help="'default', a .gguf file, a Hugging Face directory or a hub id such as org/name",
    )
    what.add_argument("--model-name", metavar="NAME", help="what clients call it (default: from the file or hub id)")
    where = parser.add_argument_group("address")
    add_options(where, ServerSettings, ADDRESS_OPTIONS)
    where.add_argument(
        "--allow-origin",
        dest="allow_origins",
        metavar="ORIGIN",
        action="append",
        default=[],
        help="let web pages of this origin connect, such as https://example.org; * for all. Can be given "
        "several times; pages of this machine always may",
    )
    choices = {"kernels": KERNELS, "quantize": QUANTIZATIONS, "kv_cache_dtype": KV_CACHE_DTYPES}
    choices |= {"log_level": LOG_LEVELS}
    add_options(parser.add_argument_group("engine"), EngineSettings, ENGINE_OPTIONS, choices)
    add_speculation_options(parser)
    add_options(parser.add_argument_group("server"), ServerSettings, SERVER_OPTIONS, choices)
    add_options(parser.add_argument_group("limits of a connection"), ConnectionLimits, CONNECTION_OPTIONS)


def run(args: argparse.Namespace) -> int:
    draft = read_speculation(args)
    limits = make_settings(ConnectionLimits, args)
    settings = make_settings(ServerSettings, args, allow_origins=tuple(args.allow_origins), limits=limits)
    # Checked before anything is fetched: that a draft is named counts, not yet where it lies.
    engine_settings = make_settings(EngineSettings, args, model_path="", model_name="", draft_model_path=draft)
    check_kernels(engine_settings)
    with listen(settings.host, settings.port) as listener:
        path, name = find_model(args.model)
        engine_settings = replace(
            engine_settings,
            model_path=str(path),
            model_name=args.model_name or name,
            draft_model_path=find_draft(draft),
        )
        # The engine loads for seconds, so it starts before this process imports the rest.
        worker = launch(asdict(engine_settings))
        try:
            serve(path, engine_settings, settings, worker, listener)
        finally:
            worker.kill()
    return 0


def check_kernels(settings: EngineSettings) -> None:
    """Find out before anything is started whether the kernels that are asked for can run here.

    Raises:
        CommandFailed: they cannot.
    """
    try:
        if settings.resolved().kernels != "cpu":
            return
        if (problem := native_problem()) is not None:
            raise CommandFailed(problem)
        selected_instruction_set()
    except ValueError as error:
        raise CommandFailed(str(error)) from error


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens, bound before anything slow so that a taken port is told at once.

    Raises:
        CommandFailed: nothing can listen there.
    """
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        reason = str(error.strerror or error).partition(" (while")[0]  # Python adds the address
        raise CommandFailed(
            f"cannot listen on {host} port {port} ({reason}): stop what listens there, or choose another "
            "with --host and --port"
        ) from error


def find_model(source: str) -> tuple[Path, str]:
    """Where the model is that ``source`` names, fetched if need be, and what clients call it.

    Raises:
        CommandFailed: there is no such model, or it cannot be fetched.
    """
    from outrider.verify.checkpoint.default_model import DEFAULT_MODEL
    from outrider.verify.checkpoint.source import is_default, model_name

    if is_default(source) and DEFAULT_MODEL.path.is_file():  # checked when it was fetched
        return DEFAULT_MODEL.path, DEFAULT_MODEL.name
    return pull(source), model_name(source)


def serve(
    path: Path,
    engine_settings: EngineSettings,
    settings: ServerSettings,
    worker: EngineWorker,
    listener: socket.socket,
) -> None:
    """Serve until a signal ends it.

    Raises:
        CommandFailed: the model cannot be served.
    """
    from outrider.server.engine.client import EngineUnavailable
    from outrider.server.engine.supervisor import EngineProcess
    from outrider.server.ws.serve import make_server

    logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(name)s %(levelname)s %(message)s")
    started = time.monotonic()
    engine = EngineProcess(asdict(engine_settings), worker=worker)
    failures: list[str] = []

    async def await_engine() -> None:
        try:
            model = await engine.wait_ready()
        except EngineUnavailable as error:
            failures.append(str(error))
            server.request_stop()
            return
        print(
            f"Ready after {time.monotonic() - started:.1f} s: kernels {describe(model.kernels, engine_settings)}, "
            f"{describe_memory(model, engine_settings)}, {describe_speculation(model, engine_settings)}, "
            f"context {model.max_context} tokens.",
            flush=True,
        )
        if engine_settings.kernels == "auto" and (problem := native_problem()) is not None:
            print(f"Warning: answers come slowly, since {problem}", flush=True)

    @contextlib.asynccontextmanager
    async def lifespan() -> AsyncIterator[None]:
        engine.start()
        waiting = asyncio.create_task(await_engine())
        try:
            yield
        finally:
            waiting.cancel()
            await engine.stop()

    server = make_server(engine, load_prompt_builder(path), settings, lifespan=lifespan)
    greet(engine_settings.model_name, listener)
    server.run(sockets=[listener])
    if failures:
        raise CommandFailed(failures[0])


def describe(kernels: str, settings: EngineSettings) -> str:
    """What computes, and with what of this machine."""
    if kernels != "cpu":
        return kernels
    num_threads = settings.num_threads or usable_cpus()
    return f"cpu ({selected_instruction_set()}, {num_threads} thread{'s' * (num_threads > 1)})"


def describe_memory(model: ModelInfo, settings: EngineSettings) -> str:
    """The forms that weights, keys and values have."""
    weights = model.weights or _weights(settings.model_path, settings.quantize)
    return f"weights {weights}, keys and values {settings.resolved().kv_cache_dtype}"


def describe_speculation(model: ModelInfo, settings: EngineSettings) -> str:
    """Who guesses, with which draft model in which form, and how far."""
    if not model.max_draft_tokens or model.drafter == "none":
        return "no speculation"
    weights = model.draft_weights or _weights(settings.draft_model_path, settings.resolved().draft_quantize)
    draft = f" with {model.draft_model} ({weights})" if model.draft_model else ""
    length = "up to" if settings.adaptive_drafts else "always"
    return f"drafter {model.drafter}{draft}, {length} {model.max_draft_tokens} tokens a step"


def _weights(path: str, quantize: str) -> str:
    """What becomes of a checkpoint's weights, where the engine does not say it more exactly."""
    return "as in the file" if quantize == "none" or path.endswith(".gguf") else quantize


def load_prompt_builder(path: Path) -> PromptBuilder:
    """The checkpoint's tokenizer and chat template.

    Raises:
        CommandFailed: the checkpoint lacks them, or they are of a kind that is not supported.
    """
    from outrider.server.protocol.prompt import TemplatePromptBuilder
    from outrider.verify.checkpoint.chat_template import load_chat_template
    from outrider.verify.checkpoint.config import UnsupportedCheckpoint
    from outrider.verify.checkpoint.tokenizer import load_tokenizer

    try:
        return TemplatePromptBuilder(load_tokenizer(path), load_chat_template(path))
    except UnsupportedCheckpoint as error:
        raise CommandFailed(str(error)) from error


def greet(model_name: str, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    print(f"Serving {model_name} at ws://{address}/v1/responses; the model is loading.", flush=True)
    if not ipaddress.ip_address(host).is_loopback:
        print("Whoever reaches this address can use the model: there is no authentication.", flush=True)
