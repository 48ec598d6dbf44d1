"""``outrider chat``: talk to a server in the terminal."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import queue
import signal
import sys
import threading
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, TextIO

from outrider.server.bench.measures import Measurement
from outrider.server.bench.streams import (
    Ask,
    CannotConnect,
    Chunk,
    Ending,
    Record,
    ResponsesConnection,
    Sent,
    StreamFailed,
)

DEFAULT_URL = "ws://127.0.0.1:8800/v1/responses"
INCLUDE_DRAFTS = ("outrider.draft_tokens", "message.output_text.logprobs")  # how many drafted, and where they end
HELP = """\
/drafts   show which tokens were drafted, or stop showing it
/reset    begin a new dialogue
/help     this list
Ctrl-C    stop the answer
Ctrl-D    leave"""
DESCRIPTION = f"""\
Talk to a server that runs (start one with: outrider serve). The server keeps the dialogue; only what is new is sent.
After each answer a line tells the time to first token, tokens/s, and the acceptance length: tokens per step of the
model, 1.0 being what it does without drafts.

in the chat:
{HELP}
"""
EPILOG = """\
examples:
  outrider chat --system "Answer in one sentence."
  echo "Why is the sky blue?" | outrider chat --max-tokens 64

Where the output is no terminal, or NO_COLOR is set, there are no colours, and drafted text stands in [brackets].
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.add_argument("--url", default=DEFAULT_URL, help="the server")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the dialogue")
    parser.add_argument("--temperature", metavar="T", type=float, help="0 takes the likeliest token, 1 samples")
    parser.add_argument("--max-tokens", metavar="N", type=int, help="where an answer is cut")


def run(args: argparse.Namespace) -> int:
    if not args.url.startswith(("ws://", "wss://")):
        print(f"outrider chat: the URL must begin with ws://, not {args.url!r}", file=sys.stderr)
        return 1
    with LoopThread() as loop:
        connection = ResponsesConnection(args.url, None, None)
        try:
            loop.start(connection.connect()).result()
            return Chat(args, connection, loop).run()
        except CannotConnect as error:
            print(f"outrider chat: {error}\nStart a server with: outrider serve", file=sys.stderr)
            return 1
        finally:
            loop.start(connection.aclose()).result()


class LoopThread:
    """An event loop in the background: it answers the server's pings while somebody types."""

    def __enter__(self) -> LoopThread:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="outrider-chat", daemon=True)
        self._thread.start()
        return self

    def start(self, work: Coroutine[Any, Any, None]) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Terminal:
    """Standard output, styled where that is wanted."""

    def __init__(self, out: TextIO, environment: Mapping[str, str]) -> None:
        self._out = out
        self.is_styled = out.isatty() and not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"

    def write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()

    def drafted(self, text: str) -> str:
        if not text:
            return ""
        return f"\x1b[4;36m{text}\x1b[0m" if self.is_styled else f"[{text}]"

    def dim(self, text: str) -> str:
        return f"\x1b[2m{text}\x1b[0m" if self.is_styled else text


class Chat:
    """The dialogue and its commands."""

    def __init__(self, args: argparse.Namespace, connection: ResponsesConnection, loop: LoopThread) -> None:
        self._args = args
        self._connection = connection
        self._loop = loop
        self._terminal = Terminal(sys.stdout, os.environ)
        self._is_interactive = sys.stdin.isatty()
        self._shows_drafts = False
        self._messages: list[Mapping[str, str]] = []
        self._previous_response_id: str | None = None

    def run(self) -> int:
        """Until the input ends. Without a person at the keyboard, the first failure ends it too."""
        if self._is_interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (gives input() its editing and history)
            self._tell(f"connected to {self._args.url}; /help lists the commands")
        while True:
            try:
                if not self._take_line(input("> " if self._is_interactive else "").strip()):
                    return 1
            except EOFError:
                if self._is_interactive:
                    self._terminal.write("\n")
                return 0
            except KeyboardInterrupt:
                if not self._is_interactive:
                    raise
                self._terminal.write("\n")
                self._tell("Ctrl-D leaves")

    def _take_line(self, line: str) -> bool:
        """Do what a line says; False if that failed and nobody is there to try something else."""
        if line.startswith("/"):
            self._command(line)
            return True
        return not line or self._turn(line) or self._is_interactive

    def _command(self, line: str) -> None:
        match line:
            case "/help":
                self._tell(HELP)
            case "/reset":
                self._messages, self._previous_response_id = [], None
                self._tell("a new dialogue")
            case "/drafts":
                self._shows_drafts = not self._shows_drafts
                example = self._terminal.drafted("like this")
                self._tell(f"drafted tokens are shown {example}" if self._shows_drafts else "drafts are not shown")
            case _:
                self._tell(f"there is no command {line}; /help lists them")

    def _turn(self, text: str) -> bool:
        """Ask, print the answer; False if there was none."""
        message = {"role": "user", "content": text}
        try:
            answer, ending = self._answer([message])
        except StreamFailed as error:
            if error.code != "previous_response_not_found":
                return self._fail(error)
            self._previous_response_id = None
            try:  # the server has lost the dialogue, perhaps it was restarted: tell it everything
                answer, ending = self._answer([*self._messages, message])
            except StreamFailed as again:
                return self._fail(again)
        self._messages += [message, {"role": "assistant", "content": answer}]
        self._previous_response_id = ending.response_id
        return True

    def _answer(self, messages: list[Mapping[str, str]]) -> tuple[str, Ending]:
        """Print an answer as it comes.

        Raises:
            StreamFailed: it did not come to its end.
        """
        ask = Ask(
            messages,
            max_tokens=self._args.max_tokens,
            temperature=self._args.temperature,
            instructions=self._args.system,
            previous_response_id=self._previous_response_id,
            include=INCLUDE_DRAFTS if self._shows_drafts else (),
        )
        records: queue.SimpleQueue[Record | StreamFailed] = queue.SimpleQueue()
        sent_at, text, text_times_s = 0.0, "", []
        with self._ctrl_c_cancels():
            self._loop.start(self._pump(ask, records))
            while True:
                match records.get():
                    case Sent(at):
                        sent_at = at
                    case Chunk(at) as chunk:
                        text += chunk.text
                        text_times_s.append(at - sent_at)
                        self._terminal.write(self._shown(chunk))
                    case Ending(at) as ending:
                        self._terminal.write("\n")
                        self._tell(statistics(tuple(text_times_s), at - sent_at, ending))
                        return text, ending
                    case StreamFailed() as error:
                        if text:
                            self._terminal.write("\n")
                        raise error

    async def _pump(self, ask: Ask, records: queue.SimpleQueue[Record | StreamFailed]) -> None:
        try:
            async for record in self._connection.stream(ask):
                records.put(record)
        except StreamFailed as error:
            records.put(error)

    @contextlib.contextmanager
    def _ctrl_c_cancels(self) -> Iterator[None]:
        """Ctrl-C cancels the answer, whose end is still to come, and interrupts nothing here."""
        before = signal.signal(signal.SIGINT, lambda *_: self._loop.start(self._connection.cancel()))
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _shown(self, chunk: Chunk) -> str:
        if not self._shows_drafts:
            return chunk.text
        drafted, own = split_drafted(chunk)
        return self._terminal.drafted(drafted) + own

    def _fail(self, error: StreamFailed) -> bool:
        print(f"outrider chat: {error}", file=sys.stderr)
        return False

    def _tell(self, text: str) -> None:
        """A remark, kept apart from the answers where these go to a file or a program."""
        if sys.stdout.isatty():
            self._terminal.write(self._terminal.dim(text) + "\n")
        else:
            print(text, file=sys.stderr)


def statistics(text_times_s: tuple[float, ...], e2e_s: float, ending: Ending) -> str:
    """One line on an answer: what a client saw, in the words of ``outrider bench``."""
    seen = Measurement(0, text_times_s, e2e_s, ending.num_input_tokens, ending.num_output_tokens, ending.speculation)
    parts = []
    if seen.ttft_s is not None:
        parts.append(f"TTFT {seen.ttft_s * 1000:.0f} ms")
    if seen.tokens_per_second is not None:
        parts.append(f"{seen.num_output_tokens} tokens, {seen.tokens_per_second:.1f} tokens/s")
    if seen.speculation is not None and seen.speculation.acceptance_length is not None:
        parts.append(f"acceptance length {seen.speculation.acceptance_length:.2f}")
    if ending.status != "completed":
        parts.append(ending.status)
    return " · ".join(parts)


def split_drafted(chunk: Chunk) -> tuple[str, str]:
    """A chunk's text in two: what was drafted and found right, and what the target added.

    A step's tokens are the accepted ones, then one more. Where a chunk holds several steps, because half a
    character was held back, nothing tells them apart, and all of it counts as the target's.
    """
    counts, logprobs = chunk.fields.get("outrider") or {}, chunk.fields.get("logprobs") or []
    num_tokens, num_accepted = counts.get("num_tokens", 0), counts.get("num_accepted", 0)
    if num_tokens - num_accepted > 1:
        return "", chunk.text
    num_bytes = sum(len(token.get("bytes") or ()) for token in logprobs[:num_accepted])
    drafted = chunk.text.encode()[:num_bytes].decode(errors="ignore")
    return drafted, chunk.text[len(drafted) :]
