"""The native threads never hang, crash or change a result, however they are made, shared, starved and let go."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import pytest
from random_decoder import KINDS, RandomDecoder
from stored_weights import pack, random_weight, same_bits
from torch import Tensor

from outrider.kernels.cpu import _native
from outrider.kernels.cpu.operations import CpuOperations

BEST = _native.instruction_sets()[0]
NUM_CPUS = os.cpu_count() or 1

Multiply = Callable[[_native.Machine], npt.NDArray[np.float32]]


def product(format: str, num_rows: int, out_features: int, seed: int = 0) -> Multiply:
    packed = pack([random_weight(format, out_features, 96, seed)])
    x = np.random.default_rng(seed).standard_normal((num_rows, 96)).astype(np.float32)

    def multiply(machine: _native.Machine) -> npt.NDArray[np.float32]:
        result = np.full((num_rows, out_features), np.nan, dtype=np.float32)
        machine.linear(x, packed, result)
        return result

    return multiply


@pytest.fixture(scope="module")
def model() -> RandomDecoder:
    return RandomDecoder(KINDS["mixed, windows, biases"], [40])


def decode(model: RandomDecoder, ops: CpuOperations, num_passes: int = 1) -> Tensor:
    """The last residual of some passes; a decoder of its own, six layers of some thirty phases."""
    pages = model.pages(ops)
    cache = model.fresh_cache(pages)
    decoder = ops.pack_decoder(model.layers, model.kind.shape)
    for _ in range(num_passes):
        residual, decoder_pass = model.inputs(ops, pages, [(0, 0, 40)])
        result = ops.decode(residual, decoder, cache, decoder_pass)
    return result


def test_python_threads_may_share_a_machine() -> None:
    shapes = [("Q4_1", 1, 1000), ("F32", 50, 40), ("Q8_0", 7, 333), ("BF16", 3, 16), ("Q4_0", 20, 500)]
    products = [product(*shape, seed) for seed, shape in enumerate(shapes)]
    alone = [multiply(_native.Machine(1, BEST)) for multiply in products]
    machine = _native.Machine(3, BEST)

    def work(index: int) -> bool:
        return all(same_bits(products[index](machine), alone[index]) for _ in range(200))

    with ThreadPoolExecutor(len(products)) as pool:
        assert all(pool.map(work, range(len(products))))


@pytest.mark.parametrize("num_threads", [1, 2, 2 * NUM_CPUS + 1, 8 * NUM_CPUS])
def test_more_threads_than_processors_change_nothing(num_threads: int, model: RandomDecoder) -> None:
    expected = decode(model, CpuOperations(1))
    assert same_bits(decode(model, CpuOperations(num_threads), num_passes=20), expected)


def test_machines_come_and_go(model: RandomDecoder) -> None:
    multiply = product("Q4_1", 5, 200)
    expected = multiply(_native.Machine(1, BEST))
    for index in range(300):
        machine = _native.Machine(1 + index % 9, BEST)
        if index % 3:
            assert same_bits(multiply(machine), expected)
        if index % 50 == 0:
            time.sleep(0.01)  # time for the threads to fall asleep
        del machine


def test_whoever_is_let_go_first_the_threads_end_well(model: RandomDecoder) -> None:
    expected = decode(model, CpuOperations(1))
    for _ in range(200):
        # Late threads may still walk through the run when decoder, plan and machine are already gone.
        assert same_bits(decode(model, CpuOperations(8)), expected)
    gc.collect()


def test_a_machine_lives_as_long_as_its_decoder(model: RandomDecoder) -> None:
    ops = CpuOperations(3)
    pages = model.pages(ops)
    cache = model.fresh_cache(pages)
    decoder = ops.pack_decoder(model.layers, model.kind.shape)
    residual, decoder_pass = model.inputs(ops, pages, [(0, 0, 40)])
    expected = decode(model, CpuOperations(1))
    del ops
    gc.collect()
    other = CpuOperations(1)
    assert same_bits(other.decode(residual, decoder, cache, decoder_pass), expected)


def test_other_python_threads_run_meanwhile() -> None:
    machine, packed = _native.Machine(1, BEST), pack([random_weight("F32", 1000, 96, seed=1)])
    x, result = np.ones((400, 96), dtype=np.float32), np.empty((400, 1000), dtype=np.float32)
    num_steps, stopping = 0, threading.Event()

    def count() -> None:
        nonlocal num_steps
        while not stopping.wait(0.0001):
            num_steps += 1

    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # so that nobody is made to let the interpreter go: only who does so by itself
    counter = threading.Thread(target=count)
    counter.start()
    try:
        for _ in range(1000):
            steps_before = num_steps
            machine.linear(x, packed, result)
            if num_steps > steps_before:
                break
        else:
            pytest.fail("the interpreter stood still during every call")
    finally:
        stopping.set()
        sys.setswitchinterval(before)
        counter.join()


@pytest.fixture
def busy_neighbours() -> Iterator[None]:
    """A process that never rests for every processor."""
    spin = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    neighbours = [subprocess.Popen(spin, stdout=subprocess.PIPE) for _ in range(NUM_CPUS)]
    try:
        for neighbour in neighbours:
            assert neighbour.stdout is not None
            neighbour.stdout.readline()
        yield
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.communicate()


@pytest.mark.usefixtures("busy_neighbours")
def test_busy_neighbours_hold_nothing_up_for_ever(model: RandomDecoder) -> None:
    expected = decode(model, CpuOperations(1))
    for num_threads in (2, 2 * NUM_CPUS):
        assert same_bits(decode(model, CpuOperations(num_threads), num_passes=20), expected)


@pytest.mark.parametrize("num_threads", [0, -1, 100_000])
def test_a_number_of_threads_nobody_can_mean_is_refused(num_threads: int) -> None:
    with pytest.raises(ValueError, match=f"num_threads must be from 1 to 1024, not {num_threads}"):
        _native.Machine(num_threads, BEST)


def test_an_unknown_instruction_set_is_named() -> None:
    with pytest.raises(ValueError, match=r'no instruction set "abacus"; use one of .*scalar'):
        _native.Machine(1, "abacus")
