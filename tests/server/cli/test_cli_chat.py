"""``outrider chat`` against a real WebSocket server: piped, and in a pseudo-terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from websockets.sync.server import ServerConnection, serve

from outrider.server.bench.streams import Chunk
from outrider.server.cli.chat import split_drafted
from outrider.server.cli.main import main

STEPS = [("Hel", "lo"), (" world",), ("!",)]  # the tokens of each step; all but the last of a step were drafted


class Server:
    """Answers every message with STEPS, "forever" with dots until cancelled; knows the ids it gave out."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.num_cancelled = 0
        self.remembers = True
        self.known: set[str] = set()

    def handle(self, socket: ServerConnection) -> None:
        for frame in socket:
            event = json.loads(frame)
            if event["type"] == "response.create":
                self.requests.append(event)
                self._answer(socket, event)

    def _answer(self, socket: ServerConnection, request: dict[str, Any]) -> None:
        def send(kind: str, **fields: Any) -> None:
            socket.send(json.dumps({"type": kind, "sequence_number": 0, **fields}))

        parent, message = request.get("previous_response_id"), request["input"][-1]["content"]
        if message == "refuse":
            return send("error", status=400, error={"type": "x", "code": "invalid_value", "message": "No."})
        if parent is not None and parent not in self.known:
            return send("error", status=400, error={"type": "x", "code": "previous_response_not_found", "message": "?"})
        response = {"id": f"resp_{len(self.requests)}", "object": "response", "status": "in_progress", "output": []}
        send("response.created", response=response)
        status = "completed"
        if message == "forever":
            status = "cancelled"
            while not self._is_cancelled(socket):
                send("response.output_text.delta", delta=".", logprobs=[])
        for tokens in STEPS if message != "forever" else ():
            send("response.output_text.delta", delta="".join(tokens), **self._draft_fields(request, tokens))
        if self.remembers:
            self.known.add(response["id"])
        usage = {"input_tokens": 5, "output_tokens": 4, "total_tokens": 9}
        metrics = {"speculative_decoding": {"num_spec_steps": 2, "num_draft_tokens": 6, "num_accepted_draft_tokens": 3}}
        kind = "response.completed" if status == "completed" else "response.incomplete"
        send(kind, response={**response, "status": status, "usage": usage, "metrics": metrics})

    def _is_cancelled(self, socket: ServerConnection) -> bool:
        try:
            event = json.loads(socket.recv(timeout=0.02))
        except TimeoutError:
            return False
        assert event["type"] == "response.cancel"
        self.num_cancelled += 1
        return True

    @staticmethod
    def _draft_fields(request: dict[str, Any], tokens: tuple[str, ...]) -> dict[str, Any]:
        if "outrider.draft_tokens" not in request.get("include", ()):
            return {"logprobs": []}
        logprobs = [{"token": t, "bytes": list(t.encode()), "logprob": -0.1, "top_logprobs": []} for t in tokens]
        counts = {"num_tokens": len(tokens), "num_draft_tokens": 3, "num_accepted": len(tokens) - 1}
        return {"logprobs": logprobs, "outrider": counts}


@contextmanager
def serving() -> Iterator[tuple[Server, str]]:
    server = Server()
    with serve(server.handle, "127.0.0.1", 0) as listener:
        thread = threading.Thread(target=listener.serve_forever)
        thread.start()
        yield server, f"ws://127.0.0.1:{listener.socket.getsockname()[1]}/v1/responses"
        listener.shutdown()
        thread.join()


def chat(monkeypatch: pytest.MonkeyPatch, url: str, typed: str, *arguments: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    return main(["chat", "--url", url, *arguments])


def test_piped_lines_are_turns_of_one_dialogue_and_only_answers_reach_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving() as (server, url):
        options = ("--system", "Be brief.", "--temperature", "0", "--max-tokens", "9")
        assert chat(monkeypatch, url, "One?\n\nTwo?\n", *options) == 0
    shown = capsys.readouterr()
    assert shown.out == "Hello world!\nHello world!\n"
    assert shown.err.count("· 4 tokens,") == 2
    assert "acceptance length 2.50" in shown.err
    first, second = server.requests
    assert first["input"] == [{"role": "user", "content": "One?"}]
    assert "previous_response_id" not in first
    assert second["input"] == [{"role": "user", "content": "Two?"}], "only what is new is sent"
    assert second["previous_response_id"] == "resp_1"
    for request in (first, second):
        assert (request["instructions"], request["temperature"], request["max_output_tokens"]) == ("Be brief.", 0.0, 9)


def test_drafted_text_is_marked_when_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving() as (server, url):
        assert chat(monkeypatch, url, "/drafts\nOne?\n/drafts\nTwo?\n") == 0
    assert capsys.readouterr().out == "[Hel]lo world!\nHello world!\n"
    assert "outrider.draft_tokens" in server.requests[0]["include"]
    assert "include" not in server.requests[1]


def test_reset_begins_a_new_dialogue_and_unknown_commands_are_not_sent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving() as (server, url):
        assert chat(monkeypatch, url, "One?\n/reset\n/nonsense\n/help\nTwo?\n") == 0
    assert len(server.requests) == 2
    assert "previous_response_id" not in server.requests[1]
    told = capsys.readouterr().err
    assert "no command /nonsense" in told
    assert "/reset    begin a new dialogue" in told


def test_a_dialogue_the_server_has_lost_is_told_again_in_full(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving() as (server, url):
        server.remembers = False
        assert chat(monkeypatch, url, "One?\nTwo?\n") == 0
    assert capsys.readouterr().out == "Hello world!\nHello world!\n"
    assert [message["content"] for message in server.requests[-1]["input"]] == ["One?", "Hello world!", "Two?"]
    assert "previous_response_id" not in server.requests[-1]


def test_no_server_is_a_sentence_that_says_how_to_start_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, "ws://127.0.0.1:9/v1/responses", "Hi\n") == 1
    assert "outrider serve" in capsys.readouterr().err
    assert chat(monkeypatch, "http://127.0.0.1:9/", "Hi\n") == 1
    assert "must begin with ws://" in capsys.readouterr().err


def test_a_refused_turn_ends_a_piped_chat_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving() as (server, url):
        assert chat(monkeypatch, url, "refuse\nTwo?\n") == 1
    assert "outrider chat: No." in capsys.readouterr().err
    assert len(server.requests) == 1


def delta(text: str, tokens: list[bytes], num_tokens: int, num_accepted: int) -> Chunk:
    counts = {"num_tokens": num_tokens, "num_draft_tokens": 4, "num_accepted": num_accepted}
    return Chunk(0.0, text, {"outrider": counts, "logprobs": [{"bytes": list(token)} for token in tokens]})


@pytest.mark.parametrize(
    ("chunk", "expected"),
    [
        (delta("a bc", [b"a", b" b", b"c"], 3, 2), ("a b", "c")),
        (delta("abc", [b"a", b"b", b"c"], 3, 3), ("abc", "")),  # the last accepted token ended the answer
        (delta("abc", [b"abc"], 1, 0), ("", "abc")),
        (delta("é!", [b"\xc3", b"\xa9", b"!"], 3, 1), ("", "é!")),  # half a character is not shown as drafted
        (delta("ab", [b"ab", b"cd"], 2, 1), ("ab", "")),  # the rest was cut at a stop string
        (delta("😀ab", [b"\xf0\x9f", b"\x98\x80", b"a", b"b"], 4, 2), ("", "😀ab")),  # two steps: unknown which
        (Chunk(0.0, "abc", {"logprobs": []}), ("", "abc")),
    ],
)
def test_a_delta_is_split_where_its_drafted_tokens_end(chunk: Chunk, expected: tuple[str, str]) -> None:
    assert split_drafted(chunk) == expected


class Screen:
    """The other side of a pseudo-terminal: what a person sees and types."""

    def __init__(self, controller: int) -> None:
        self._controller = controller
        self._unread = b""

    def type(self, text: str) -> None:
        os.write(self._controller, text.encode())

    def read_until(self, expected: str, again: Callable[[], None] = lambda: None) -> str:
        """What is shown next, up to and including ``expected``. ``again`` is done twice a second until then."""
        deadline = time.monotonic() + 30
        while expected.encode() not in self._unread:
            is_readable, _, _ = select.select([self._controller], [], [], 0.5)
            if is_readable:
                self._unread += os.read(self._controller, 4096)
                continue
            assert time.monotonic() < deadline, f"{expected!r} did not come after {self._unread!r}"
            again()
        shown, mark, self._unread = self._unread.partition(expected.encode())
        return (shown + mark).decode()


@contextmanager
def in_terminal(url: str, **environment: str) -> Iterator[tuple[subprocess.Popen[bytes], Screen]]:
    """The command in a pseudo-terminal, as a person would run it."""
    controller, terminal = pty.openpty()
    command = "import sys; from outrider.server.cli.main import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", command, "chat", "--url", url],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm", "NO_COLOR": "", **environment},
    )
    os.close(terminal)
    try:
        yield process, Screen(controller)
    finally:
        process.kill()
        process.wait()
        os.close(controller)


def test_ctrl_c_cancels_the_answer_and_keeps_the_chat_and_ctrl_d_leaves() -> None:
    with serving() as (server, url), in_terminal(url) as (process, screen):
        screen.read_until("> ")
        screen.type("forever\n")
        screen.read_until("...")
        process.send_signal(signal.SIGINT)
        screen.read_until("cancelled")
        screen.type("One?\n")
        assert "\x1b[2mTTFT" in screen.read_until("tokens/s"), "one dim line after each answer"
        screen.read_until("> ")
        # Python's input() misses a signal that comes in the instant between its prompt and its wait.
        screen.read_until("Ctrl-D leaves", again=lambda: process.send_signal(signal.SIGINT))
        screen.read_until("> ")  # before it the terminal would take Ctrl-D for itself
        screen.type("\x04")
        assert process.wait(20) == 0
    assert server.num_cancelled == 1
    assert server.requests[1]["previous_response_id"] == "resp_1", "a cancelled answer can be continued"


def test_drafts_are_coloured_in_a_terminal_unless_no_color_is_set() -> None:
    for environment, drafted in (({}, "\x1b[4;36mHel\x1b[0mlo world!"), ({"NO_COLOR": "1"}, "[Hel]lo world!")):
        with serving() as (_, url), in_terminal(url, **environment) as (_, screen):
            screen.read_until("> ")
            screen.type("/drafts\nOne?\n")
            assert drafted in screen.read_until("tokens/s")
