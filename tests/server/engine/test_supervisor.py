"""With real processes: whatever becomes of the engine, every request ends exactly once and nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from outrider.server.engine.client import EngineClient, EngineOverloaded, EngineUnavailable
from outrider.server.engine.launch import launch
from outrider.server.engine.request import FinishReason, Request, StepOutput
from outrider.server.engine.supervisor import EngineProcess, SupervisorSettings
from outrider.verify.sampling_params import SamplingParams

END, CRASH, EXIT, HANG, SLOW, STRAY, REFUSE, FOREVER = range(8)  # as in toy_engine.py
QUICK = SupervisorSettings(first_backoff_s=0.01, max_backoff_s=0.04, stop_timeout_s=2.0)
DEADLINE_S = 20.0

Start = Callable[..., EngineProcess]


class Client:
    """Submits one request and keeps what comes back."""

    def __init__(self, engine: EngineClient, request_id: str, op: int, length: int, max_tokens: int = 4000) -> None:
        self.engine = engine
        self.request_id = request_id
        self.outputs: list[StepOutput] = []
        self._more = asyncio.Event()
        engine.submit(Request(request_id, (op, length), SamplingParams(max_tokens=max_tokens)), self._receive)

    def _receive(self, output: StepOutput) -> None:
        self.outputs.append(output)
        self._more.set()

    @property
    def ends(self) -> list[FinishReason]:
        return [output.finish_reason for output in self.outputs if output.finish_reason is not None]

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self._more.clear()
                await self._more.wait()

    async def end(self) -> FinishReason:
        await self.until(lambda: bool(self.ends))
        return self.ends[0]

    async def tokens_arrived(self, num_tokens: int) -> None:
        await self.until(lambda: len(self.tokens) >= num_tokens)


@pytest.fixture(autouse=True)
def _toy_engine_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    process = psutil.Process()
    fds = process.num_fds()
    yield
    assert process.children() == []
    assert process.num_fds() <= fds


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts engine processes, stops them at the end."""
    engines: list[EngineProcess] = []

    def start(limits: SupervisorSettings = QUICK, **settings: Any) -> EngineProcess:
        engine = EngineProcess(settings, engine="toy_engine:make", limits=limits)
        engine.start()
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        await engine.stop()
    assert {task.get_name() for task in asyncio.all_tasks()} & {"engine supervisor"} == set()


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)


async def ready(engine: EngineProcess) -> None:
    async with asyncio.timeout(DEADLINE_S):
        await engine.wait_ready()


def pid_of(engine: EngineProcess) -> int:
    assert engine.pid is not None
    return engine.pid


async def test_a_request_gets_its_tokens_and_one_end(start: Start) -> None:
    engine = start()
    async with asyncio.timeout(DEADLINE_S):
        model = await engine.wait_ready()
    assert model.name == "toy"
    assert engine.status.state == "ready"
    assert engine.status.model == model
    client = Client(engine, "a", END, 5)
    assert await client.end() is FinishReason.STOP
    assert client.tokens == [100, 101, 102, 103, 104]
    assert engine.status.stats is not None
    assert engine.status.stats.num_steps == 5
    assert engine.status.last_step_age_s is None


async def test_requests_from_before_the_start_are_held_and_answered(start: Start) -> None:
    engine = start(start_s=0.1)
    clients = [Client(engine, f"r{i}", END, i + 1) for i in range(5)]
    cancelled = clients[3]
    engine.cancel("r3")
    assert cancelled.outputs == []  # never from inside the call
    assert await cancelled.end() is FinishReason.CANCELLED
    assert engine.status.state == "starting"
    del clients[3]
    assert [await client.end() for client in clients] == [FinishReason.STOP] * 4
    assert [len(client.tokens) for client in clients] == [1, 2, 3, 5]
    assert cancelled.ends == [FinishReason.CANCELLED]


async def test_a_refusal_by_the_engine_needs_no_step(start: Start) -> None:
    client = Client(start(), "a", REFUSE, 0)
    assert await client.end() is FinishReason.ERROR
    assert client.outputs[0].error == "refused"


async def test_cancel_ends_a_running_request_and_only_that(start: Start) -> None:
    engine = start()
    endless, other = Client(engine, "a", FOREVER, 0), Client(engine, "b", SLOW, 10)
    await endless.tokens_arrived(3)
    engine.cancel("a")
    engine.cancel("a")
    engine.cancel("unknown")
    assert await endless.end() is FinishReason.CANCELLED
    assert await other.end() is FinishReason.STOP
    engine.cancel("b")
    assert await Client(engine, "c", END, 3).end() is FinishReason.STOP
    assert (endless.ends, other.ends) == ([FinishReason.CANCELLED], [FinishReason.STOP])


async def kill_9(engine: EngineProcess) -> None:
    os.kill(pid_of(engine), signal.SIGKILL)


async def crash(engine: EngineProcess) -> None:
    assert await Client(engine, "killer", CRASH, 2).end() is FinishReason.ERROR


async def suicide(engine: EngineProcess) -> None:
    assert await Client(engine, "killer", EXIT, 2).end() is FinishReason.ERROR


@pytest.mark.parametrize("kill", [kill_9, crash, suicide])
async def test_a_death_ends_open_requests_once_and_the_next_engine_serves(
    start: Start, kill: Callable[[EngineProcess], Awaitable[None]]
) -> None:
    engine = start()
    open_ones = [Client(engine, f"r{i}", FOREVER, 0) for i in range(3)]
    for client in open_ones:
        await client.tokens_arrived(2)
    old_pid = pid_of(engine)
    await kill(engine)
    for client in open_ones:
        assert await client.end() is FinishReason.ERROR
        assert client.outputs[-1].error
        assert client.tokens == list(range(100, 100 + len(client.tokens)))
    assert engine.status.state == "restarting"
    held = Client(engine, "held", END, 3)  # while there is no engine
    assert await held.end() is FinishReason.STOP
    assert engine.status.state == "ready"
    assert engine.status.num_restarts == 1
    assert pid_of(engine) != old_pid
    assert not psutil.pid_exists(old_pid)
    assert [client.ends for client in open_ones] == [[FinishReason.ERROR]] * 3


async def test_the_details_of_a_crash_are_in_the_status_not_in_what_clients_read(start: Start) -> None:
    engine = start(replace(QUICK, first_backoff_s=0.3))
    client = Client(engine, "a", CRASH, 1)
    await client.end()
    assert "told to crash" not in str(client.outputs[-1].error)
    await eventually(lambda: "told to crash" in engine.status.message)


@pytest.mark.parametrize("hang", ["in a step", "stopped by a signal"])
async def test_an_engine_that_finishes_no_step_is_killed_and_replaced(start: Start, hang: str) -> None:
    engine = start(replace(QUICK, hang_timeout_s=0.4))
    await ready(engine)
    old_pid = pid_of(engine)
    if hang == "in a step":
        client = Client(engine, "a", HANG, 3)
    else:
        client = Client(engine, "a", FOREVER, 0)
        await client.tokens_arrived(3)
        os.kill(old_pid, signal.SIGSTOP)
    assert await client.end() is FinishReason.ERROR
    assert await Client(engine, "b", END, 3).end() is FinishReason.STOP
    assert pid_of(engine) != old_pid
    assert not psutil.pid_exists(old_pid)


async def test_neither_idleness_nor_long_work_in_short_steps_is_a_hang(start: Start) -> None:
    engine = start(replace(QUICK, hang_timeout_s=0.3))
    await ready(engine)
    pid = pid_of(engine)
    await asyncio.sleep(0.7)
    client = Client(engine, "a", SLOW, 40)
    await client.tokens_arrived(1)
    age_s = engine.status.last_step_age_s
    assert age_s is not None
    assert age_s < 0.3
    assert await client.end() is FinishReason.STOP
    assert (pid_of(engine), engine.status.num_restarts) == (pid, 0)


async def test_starts_that_fail_are_repeated_and_held_requests_survive_them(start: Start, tmp_path: Path) -> None:
    engine = start(starts=str(tmp_path / "starts"), die_at=[1, 2, 3])
    client = Client(engine, "a", END, 2)
    assert await client.end() is FinishReason.STOP
    assert engine.status.num_restarts == 3


async def test_after_too_many_failed_starts_everything_is_refused(start: Start, tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    engine = start(starts=str(starts), die_at=list(range(1, 100)))
    client = Client(engine, "a", END, 2)
    assert await client.end() is FinishReason.ERROR
    assert engine.status.state == "failed"
    assert "status 3" in engine.status.message
    assert len(starts.read_text().splitlines()) == QUICK.max_failed_starts
    with pytest.raises(EngineUnavailable):
        Client(engine, "b", END, 2)
    with pytest.raises(EngineUnavailable, match="status 3"):
        await engine.wait_ready()
    assert client.ends == [FinishReason.ERROR]


async def test_an_engine_that_was_ready_in_between_has_all_its_starts_again(start: Start, tmp_path: Path) -> None:
    engine = start(starts=str(tmp_path / "starts"), die_at=[1, 2, 3, 4, 6, 7, 8, 9])
    assert await Client(engine, "a", EXIT, 2).end() is FinishReason.ERROR
    assert await Client(engine, "b", END, 2).end() is FinishReason.STOP


async def test_a_refused_first_start_is_not_repeated_and_its_reason_is_told(start: Start, tmp_path: Path) -> None:
    starts = tmp_path / "starts"
    engine = start(starts=str(starts), refuse_at=[1])
    with pytest.raises(EngineUnavailable, match=r"^The model file nowhere\.gguf does not exist\.$"):
        await engine.wait_ready()
    assert len(starts.read_text().splitlines()) == 1


async def test_a_refused_restart_is_repeated(start: Start, tmp_path: Path) -> None:
    engine = start(starts=str(tmp_path / "starts"), refuse_at=[2, 3])
    assert await Client(engine, "a", EXIT, 1).end() is FinishReason.ERROR
    assert await Client(engine, "b", END, 1).end() is FinishReason.STOP


async def test_outputs_for_requests_that_are_over_are_counted_and_go_nowhere(start: Start) -> None:
    engine = start()
    client = Client(engine, "a", STRAY, 3)
    await client.end()
    await Client(engine, "b", END, 1).end()
    assert engine.num_stray_outputs == 2
    assert client.ends == [FinishReason.STOP]
    assert client.tokens == [100, 101, 102]


async def test_there_is_a_limit_to_open_requests_and_room_comes_back(start: Start) -> None:
    engine = start(replace(QUICK, max_open_requests=3))
    clients = [Client(engine, f"r{i}", FOREVER, 0) for i in range(3)]
    with pytest.raises(EngineOverloaded, match="3 places") as overload:
        Client(engine, "d", END, 1)
    assert overload.value.retry_after_s > 0
    await ready(engine)
    with pytest.raises(EngineOverloaded):
        Client(engine, "e", END, 1)
    engine.cancel("r0")
    await clients[0].end()
    assert await Client(engine, "f", END, 1).end() is FinishReason.STOP


async def test_a_request_that_cannot_be_sent_ends_alone(start: Start) -> None:
    engine = start()
    await ready(engine)
    good, bad = Client(engine, "a", SLOW, 5), Client(engine, "b", 2**70, 1)
    assert await bad.end() is FinishReason.ERROR
    assert await good.end() is FinishReason.STOP
    assert bad.ends == [FinishReason.ERROR]


async def test_a_receiver_that_raises_harms_no_other(start: Start) -> None:
    engine = start()

    def broken(_: StepOutput) -> None:
        raise RuntimeError("broken receiver")

    engine.submit(Request("a", (END, 5), SamplingParams(max_tokens=9)), broken)
    assert await Client(engine, "b", END, 8).end() is FinishReason.STOP
    assert engine.status.num_restarts == 0


async def test_stop_ends_requests_and_process_in_good_order(start: Start, tmp_path: Path) -> None:
    farewell = tmp_path / "farewell"
    engine = start(farewell=str(farewell))
    client = Client(engine, "a", FOREVER, 0)
    await client.tokens_arrived(1)
    pid = pid_of(engine)
    await engine.stop()
    assert client.ends == [FinishReason.ERROR]
    assert "stopping" in str(client.outputs[-1].error)
    assert not psutil.pid_exists(pid)
    assert farewell.exists()
    assert engine.status.state == "stopped"
    with pytest.raises(EngineUnavailable):
        Client(engine, "b", END, 1)
    await engine.stop()


@pytest.mark.parametrize("phase", ["before", "launching", "loading", "hung", "backing off", "failed"])
async def test_stop_works_at_any_time_and_leaves_nothing(start: Start, phase: str, tmp_path: Path) -> None:
    limits = replace(QUICK, stop_timeout_s=0.2, first_backoff_s=60.0, max_backoff_s=60.0)
    starts = tmp_path / "starts"
    clients = []
    if phase == "before":
        engine = start(limits)
    elif phase in ("launching", "loading"):
        engine = start(limits, start_s=60, starts=str(starts))
        await eventually(lambda: engine.pid is not None if phase == "launching" else starts.exists())
    elif phase == "hung":
        engine = start(limits)
        await ready(engine)
        os.kill(pid_of(engine), signal.SIGSTOP)
        clients.append(Client(engine, "sent", FOREVER, 0))
    elif phase == "backing off":
        engine = start(limits)
        await ready(engine)
        os.kill(pid_of(engine), signal.SIGKILL)
        await eventually(lambda: engine.pid is None)
        clients.append(Client(engine, "held", END, 1))
    else:
        engine = start(limits, starts=str(starts), refuse_at=[1])
        await eventually(lambda: engine.status.state == "failed")
    async with asyncio.timeout(DEADLINE_S):
        await engine.stop()
    assert engine.status.state == "stopped"
    assert engine.pid is None
    assert [client.ends for client in clients] == [[FinishReason.ERROR]] * len(clients)


async def test_a_process_launched_early_is_taken_over() -> None:
    worker = launch({}, "toy_engine:make")
    engine = EngineProcess({}, engine="toy_engine:make", limits=QUICK, worker=worker)
    engine.start()
    await ready(engine)
    assert pid_of(engine) == worker.process.pid
    assert await Client(engine, "a", END, 1).end() is FinishReason.STOP
    await engine.stop()


async def test_a_process_launched_early_and_never_used_is_ended() -> None:
    await EngineProcess({}, engine="toy_engine:make", worker=launch({}, "toy_engine:make")).stop()


async def test_signals_to_the_group_are_the_servers_business(start: Start) -> None:
    engine = start()
    client = Client(engine, "a", SLOW, 10)
    await client.tokens_arrived(1)
    os.kill(pid_of(engine), signal.SIGINT)
    os.kill(pid_of(engine), signal.SIGTERM)
    assert await client.end() is FinishReason.STOP
    assert engine.status.num_restarts == 0


async def test_200_requests_with_random_cancels_and_a_death_end_exactly_once(start: Start) -> None:
    engine = start()
    rng = random.Random(7)
    clients: list[Client] = []
    for i in range(200):
        clients.append(Client(engine, f"r{i}", rng.choice([END, END, REFUSE, FOREVER, STRAY]), rng.randint(1, 30)))
        if rng.random() < 0.5:
            engine.cancel(f"r{rng.randint(0, i)}")
        if rng.random() < 0.3:
            await asyncio.sleep(0.002)
        if i == 120:
            await clients[-1].until(lambda: bool(clients[-1].outputs))
            os.kill(pid_of(engine), signal.SIGKILL)
    for client in clients:
        if not client.ends:
            engine.cancel(client.request_id)
    for client in clients:
        await client.end()
    await Client(engine, "last", END, 2).end()
    assert [len(client.ends) for client in clients] == [1] * 200
    for client in clients:
        assert client.outputs[-1].finish_reason is not None
        assert client.tokens == list(range(100, 100 + len(client.tokens)))
    assert {reason for client in clients for reason in client.ends} == {
        FinishReason.STOP,
        FinishReason.CANCELLED,
        FinishReason.ERROR,
    }
    assert engine.status.last_step_age_s is None


@pytest.mark.parametrize("moment", ["idle", "in a step"])
def test_the_engine_dies_with_its_server(moment: str, tmp_path: Path) -> None:
    """The server is killed without a chance to clean up, also while the engine cannot look at its socket."""
    if moment == "in a step" and sys.platform != "linux":
        pytest.skip("only Linux ends a process with its parent")
    server = f"""
import asyncio
from outrider.server.engine.request import Request
from outrider.server.engine.supervisor import EngineProcess
from outrider.verify.sampling_params import SamplingParams

async def main():
    engine = EngineProcess({{}}, engine="toy_engine:make")
    engine.start()
    await engine.wait_ready()
    if {moment == "in a step"}:
        hanging = asyncio.Event()
        engine.submit(Request("a", ({HANG}, 2), SamplingParams(max_tokens=9)), lambda output: hanging.set())
        await hanging.wait()
    print(engine.pid, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""
    process = subprocess.Popen([sys.executable, "-c", server], stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        engine = psutil.Process(int(process.stdout.readline()))
        process.kill()
    deadline = time.monotonic() + DEADLINE_S
    with contextlib.suppress(psutil.NoSuchProcess):
        while engine.is_running() and engine.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "the engine outlived its server"
            time.sleep(0.01)
