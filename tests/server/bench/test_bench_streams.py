"""The two wire protocols, against servers that speak them byte by byte, and the command over both."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.server import ServerConnection, serve

from outrider.server.bench.contenders import Server
from outrider.server.bench.prompts import Prompt
from outrider.server.bench.speculation import Speculation
from outrider.server.bench.streams import (
    Ask,
    CannotConnect,
    Chunk,
    Ending,
    Record,
    Sent,
    StreamFailed,
    open_connection,
)
from outrider.server.cli.main import main

PAUSE_S = 0.03
SPECULATION = {"num_spec_steps": 2, "num_draft_tokens": 6, "num_accepted_draft_tokens": 4}
HELLO = Ask([{"role": "user", "content": "Hello"}], max_tokens=8, temperature=0.0)


class ResponsesServer:
    """Answers "Hel" + "lo 😀"; the user message chooses otherwise: refuse, fail, drop, silent, late."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.num_connections = 0
        self.max_running = 0
        self._num_running = 0
        self._lock = threading.Lock()

    def handle(self, socket: ServerConnection) -> None:
        self.num_connections += 1
        for frame in socket:
            request = json.loads(frame)
            self.requests.append(request)
            with self._counted():
                self._answer(socket, request["input"][-1]["content"])

    @contextmanager
    def _counted(self) -> Iterator[None]:
        with self._lock:
            self._num_running += 1
            self.max_running = max(self.max_running, self._num_running)
        yield
        with self._lock:
            self._num_running -= 1

    def _answer(self, socket: ServerConnection, choice: str) -> None:
        def send(kind: str, **fields: Any) -> None:
            socket.send(json.dumps({"type": kind, "sequence_number": 0, **fields}))

        response = {"id": "resp_1", "object": "response", "status": "in_progress", "output": []}
        if choice == "refuse":
            return send("error", status=400, error={"code": "invalid_value", "message": "No.", "type": "x"})
        send("response.created", response=response)
        if choice == "silent":
            return None
        time.sleep(10 * PAUSE_S if choice == "late" else PAUSE_S)
        send("response.output_text.delta", delta="late" if choice == "late" else "", logprobs=[])
        time.sleep(PAUSE_S)
        send("response.output_text.delta", delta="Hel", logprobs=[])
        if choice == "drop":
            return socket.close(1011, "broken")
        if choice == "fail":
            return send("response.failed", response={**response, "status": "failed", "error": {"message": "died"}})
        time.sleep(PAUSE_S)
        send("response.output_text.delta", delta="lo 😀", logprobs=[])
        usage = {"input_tokens": 18, "output_tokens": 7, "total_tokens": 25}
        metrics = {"speculative_decoding": SPECULATION}
        send("response.completed", response={**response, "status": "completed", "usage": usage, "metrics": metrics})


@contextmanager
def responses_server() -> Iterator[tuple[ResponsesServer, str]]:
    server = ResponsesServer()
    with serve(server.handle, "127.0.0.1", 0) as listener:
        thread = threading.Thread(target=listener.serve_forever)
        thread.start()
        yield server, f"ws://127.0.0.1:{listener.socket.getsockname()[1]}/v1/responses"
        listener.shutdown()
        thread.join()


def chunk(delta: dict[str, Any], finish_reason: str | None = None, **fields: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    event = {"id": "c", "object": "chat.completion.chunk", "choices": [choice], "usage": None, **fields}
    return b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n"


USAGE = {"prompt_tokens": 18, "completion_tokens": 7, "total_tokens": 25}
LLAMA_TIMINGS = {"predicted_n": 7, "draft_n": 6, "draft_n_accepted": 4}
# Pieces as they are written to the socket: one cuts a character in two, and U+2028 is no end of a line.
HEAD = [b": keep-alive\n\n", chunk({"role": "assistant", "content": ""}), chunk({"content": "Hel"})]
SMILE = chunk({"content": "lo 😀\u2028"})
CUT = SMILE.index("😀".encode()) + 2
LAST = chunk({}, "stop", choices=[], usage=USAGE, timings=LLAMA_TIMINGS)
ANSWERS: dict[str, list[bytes]] = {
    "Hello": [*HEAD, SMILE[:CUT], SMILE[CUT:], chunk({}, "stop"), LAST, b"data: [DONE]\n\n"],
    "error": [*HEAD, b'data: {"error": {"message": "died"}}\n\n'],
    "garbage": [*HEAD, b"data: {{{\n\n"],
    "cut": HEAD,
}


class ChatHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    requests: list[dict[str, Any]]

    def do_GET(self) -> None:
        self._send(200, b'{"object": "list", "data": [{"id": "the-model"}]}')

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.requests.append(request)
        choice = request["messages"][-1]["content"]
        if choice == "refuse":
            return self._send(400, b'{"error": {"message": "No."}}')
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for piece in ANSWERS[choice]:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            time.sleep(PAUSE_S)
        self.wfile.write(b"0\r\n\r\n")

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@contextmanager
def chat_server() -> Iterator[tuple[list[dict[str, Any]], str]]:
    requests: list[dict[str, Any]] = []
    handler = type("Handler", (ChatHandler,), {"requests": requests})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield requests, f"http://127.0.0.1:{server.server_port}/v1/chat/completions"
        server.shutdown()
        thread.join()


async def records(url: str, *asks: Ask, timeout_s: float | None = None) -> list[Record]:
    connection = open_connection(url, timeout_s=timeout_s)
    try:
        return [record for ask in asks for record in [r async for r in connection.stream(ask)]]
    finally:
        await connection.aclose()


def choosing(choice: str) -> Ask:
    return Ask([{"role": "user", "content": choice}])


async def test_both_protocols_give_the_same_records() -> None:
    with responses_server() as (_, ws_url), chat_server() as (_, http_url):
        for url in (ws_url, http_url):
            sent, *chunks, ending = await records(url, HELLO)
            assert isinstance(sent, Sent)
            assert isinstance(ending, Ending)
            texts = [c.text for c in chunks if isinstance(c, Chunk)]
            assert "".join(texts).rstrip("\u2028") == "Hello 😀"
            times = [record.at for record in (sent, *chunks, ending)]
            assert times == sorted(times)
            assert (ending.status, ending.num_input_tokens, ending.num_output_tokens) == ("completed", 18, 7)
            assert ending.speculation is not None
            assert ending.speculation.num_accepted == 4


async def test_the_requests_carry_what_was_asked_and_nothing_that_was_not() -> None:
    ask = Ask(HELLO.messages, max_tokens=8, temperature=0.0, max_draft_tokens=0)
    with responses_server() as (server, url):
        await records(url, HELLO, ask)
    expected = {"type": "response.create", "input": list(HELLO.messages), "max_output_tokens": 8, "temperature": 0.0}
    assert server.requests == [expected, expected | {"max_draft_tokens": 0}]
    assert server.num_connections == 1, "the connection is kept from one answer to the next"
    with chat_server() as (requests, url):
        await records(url, HELLO)
    expected = {"model": "the-model", "messages": list(HELLO.messages), "max_tokens": 8, "temperature": 0.0}
    assert requests == [expected | {"stream": True, "stream_options": {"include_usage": True}}]


async def test_speculation_is_read_in_the_shapes_of_vllm_and_of_llama_cpp() -> None:
    with responses_server() as (_, ws_url), chat_server() as (_, http_url):
        vllm, llama = (await records(ws_url, HELLO))[-1], (await records(http_url, HELLO))[-1]
    assert isinstance(vllm, Ending)
    assert vllm.speculation == Speculation(num_steps=2, num_draft_tokens=6, num_accepted=4)
    assert isinstance(llama, Ending)
    assert llama.speculation == Speculation(num_steps=3, num_draft_tokens=6, num_accepted=4), "7 tokens, 4 of them free"


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("refuse", "No"),
        ("fail", "died"),
        ("drop", "closed the connection.*broken"),
        ("silent", "silent for 0.2 s"),
        ("late", "silent for 0.2 s"),
    ],
)
async def test_a_websocket_answer_that_fails_says_why_and_the_next_one_is_not_touched(
    choice: str, message: str
) -> None:
    with responses_server() as (_, url):
        connection = open_connection(url, timeout_s=0.2)
        with pytest.raises(StreamFailed, match=message):
            async for _ in connection.stream(choosing(choice)):
                pass
        assert [r.text async for r in connection.stream(HELLO) if isinstance(r, Chunk)] == ["", "Hel", "lo 😀"]
        await connection.aclose()


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("refuse", "HTTP 400.*No"),
        ("error", "died"),
        ("garbage", "no chunk of this protocol"),
        ("cut", "without a finish_reason"),
    ],
)
async def test_a_chat_answer_that_fails_says_why(choice: str, message: str) -> None:
    with chat_server() as (_, url), pytest.raises(StreamFailed, match=message):
        await records(url, choosing(choice))


@pytest.mark.parametrize("url", ["ws://127.0.0.1:9/v1/responses", "http://127.0.0.1:9/v1/chat/completions"])
async def test_no_server_is_said_with_its_url(url: str) -> None:
    with pytest.raises(CannotConnect, match=url):
        await records(url, HELLO)


def test_other_urls_are_refused() -> None:
    with pytest.raises(ValueError, match="ftp://"):
        open_connection("ftp://host/")


def prompts(*choices: str) -> Sequence[Prompt]:
    return [Prompt(i, ({"role": "user", "content": choice},)) for i, choice in enumerate(choices, start=1)]


async def test_ttft_is_the_first_text_that_is_not_empty_and_a_failure_harms_no_other_stream() -> None:
    with responses_server() as (server, url):
        contender = Server("ours", url, max_tokens=8, temperature=0.0, timeout_s=5)
        one = await contender.run(prompts("Hello", "refuse", "Hello", "drop", "Hello"), concurrency=2)
        await contender.aclose()
    failed = [m.line for m in one.measurements if m.error is not None]
    assert failed == [2, 4]
    assert [m.line for m in one.measurements] == [1, 2, 3, 4, 5]
    good = one.measurements[0]
    assert good.ttft_s is not None
    assert good.ttft_s >= 2 * PAUSE_S, "the empty delta came first and does not count"
    assert len(good.text_times_s) == 2
    assert good.e2e_s is not None
    assert good.e2e_s >= good.text_times_s[-1]
    assert server.max_running == 2


def bench(tmp_path: Path, *arguments: str, choices: Sequence[str] = ("Hello", "Hello", "Hello")) -> int:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": choice}) + "\n" for choice in choices))
    return main(["bench", str(path), *arguments])


def test_the_command_compares_two_servers_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "bench.json"
    with responses_server() as (server, ws_url), chat_server() as (requests, http_url):
        options = ("--rounds", "2", "--warmup", "1", "--concurrency", "1,2", "--no-speculation", "--json", str(out))
        assert bench(tmp_path, "--url", ws_url, "--compare", http_url, *options) == 0
    printed = capsys.readouterr().out
    for expected in ("3 prompts of prompts.jsonl", "outrider: unknown", "outrider / compared, 2 streams", "6 of 6"):
        assert expected in printed
    written = json.loads(out.read_text())
    assert [(r["contender"], r["concurrency"]) for r in written["results"]] == [
        ("outrider", 1),
        ("compared", 1),
        ("outrider", 2),
        ("compared", 2),
    ]
    assert written["results"][0]["summary"]["num_output_tokens"] == 2 * 3 * 7
    assert written["comparisons"][0]["ratios"]["tokens/s in all"]["median"] > 0
    assert all(request["max_draft_tokens"] == 0 for request in server.requests)
    assert not any("max_draft_tokens" in request for request in requests), "another server may refuse our fields"


def test_prompts_with_a_category_make_a_table_by_category(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": "Hello", "category": c}) + "\n" for c in ("code", "code", "prose")))
    with responses_server() as (_, ws_url), chat_server() as (_, http_url):
        assert main(["bench", str(path), "--url", ws_url, "--rounds", "1", "--per-category", "1"]) == 0
        alone = capsys.readouterr().out
        assert main(["bench", str(path), "--url", ws_url, "--compare", http_url, "--rounds", "1"]) == 0
    rows = [line.split()[:2] for line in alone.split("\n")]
    assert ["code", "1"] in rows
    assert ["all", "2"] in rows
    assert "compared tok/s  outrider tok/s" in capsys.readouterr().out


def test_the_command_fails_if_any_request_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with responses_server() as (_, url):
        assert bench(tmp_path, "--url", url, "--rounds", "1", choices=("Hello", "refuse")) == 1
    shown = capsys.readouterr()
    assert "1/2" in shown.out
    assert "outrider, line 2: No." in shown.err


def test_the_command_draws_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with responses_server() as (_, url):
        assert bench(tmp_path, "--url", url, "--rounds", "1", "--plot", str(tmp_path / "plot.png")) == 0
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with responses_server() as (server, url):
        assert bench(tmp_path, "--url", url, "--plot", "x.png") == 1
    assert "pip install 'outrider[plot]'" in capsys.readouterr().err
    assert server.requests == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--baseline", "vllm"], "the only baseline is transformers"),
        (["--baseline", "transformers", "--temperature", "0.7"], "--temperature 0"),
        (["--baseline", "transformers:./absent.gguf"], "absent.gguf"),
    ],
)
def test_a_baseline_that_cannot_run_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert bench(tmp_path, *arguments) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--url", "ftp://x"], ["--concurrency", "1,0"], ["--rounds", "x"]])
def test_wrong_usage_exits_with_2(tmp_path: Path, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench(tmp_path, *arguments)
    assert stopped.value.code == 2
