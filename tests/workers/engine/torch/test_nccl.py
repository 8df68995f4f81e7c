"""What can be seen of CUDA devices without one: how groups are made and left, and what runs beside the steps."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention.bias import CausalBias

from tests.workers.engine.torch.bench import folder, program
from tests.workers.engine.torch.meetings import memory, met
from tests.workers.engine.torch.test_pool import step_of
from workers.engine.torch import streams as torch_streams
from workers.engine.torch.model.batch import causal, segments_of
from workers.engine.torch.pool import ExecutionPool
from workers.engine.torch.streams import beside, mark
from workers.engine.torch.task import Boundary, StepTask
from workers.engine.torch.weights.files import WeightsError
from workers.engine.torch.weights.host_group import _HostWork
from workers.engine.torch.weights.meeting import DEVICE, RECEIVER, SENDER
from workers.engine.torch.weights.pieces import longest_operation

pytestmark = pytest.mark.torch
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


# ---- weights --------------------------------------------------------------------------------------------------------


async def test_a_peer_that_dies_ends_the_transfer_and_not_the_process(monkeypatch):
    """By default the watchdog of NCCL ends the process of whoever is left, and with it all that it serves."""
    made = []

    def group(store, rank, size, timeout):
        made.append((store, rank, size, timeout, os.environ[WATCHDOG]))
        return "group"

    monkeypatch.setattr(dist, "ProcessGroupNCCL", group, raising=False)
    for name in [WATCHDOG, *(name for name in os.environ if name.startswith("TORCH_NCCL_"))]:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="one"))
    async with met() as (source, receiver):
        source.set(f"{DEVICE}/{SENDER}", b"another")
        assert await asyncio.to_thread(receiver._made, RECEIVER, CUDA) == "group"
        assert made == [(receiver, RECEIVER, 2, longest_operation(), "2")]
        assert os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] == "0"


async def test_an_engine_that_does_not_say_its_device_is_named(monkeypatch):
    """As one of an earlier version: it joined, so that it did not is no answer."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="one"))
    async with met(timeout_s=0.3) as (source, receiver):
        source.set("another", b"key")
        with pytest.raises(RuntimeError, match="does not say its CUDA device"):
            await asyncio.to_thread(receiver._made, RECEIVER, CUDA)


def test_a_transfer_that_was_aborted_leaves_the_device_as_it_was():
    aborted = SimpleNamespace(wait=lambda timeout: False)
    device = torch.ones(3)
    with pytest.raises(RuntimeError, match="aborted"):
        _HostWork(aborted, torch.zeros(3), device).wait(timedelta(seconds=1))
    assert device.tolist() == [1.0, 1.0, 1.0]


class Group:
    """One that breaks, and says in which thread it was dropped."""

    def __init__(self, left: list[str]) -> None:
        self._left = left

    def __del__(self) -> None:
        self._left.append(threading.current_thread().name)

    def abort(self) -> None:
        self._left.append("aborted")

    def recv(self, *args):
        raise RuntimeError("the peer is gone")

    send = recv


@pytest.mark.parametrize("side", ["receiver", "source"])
async def test_a_group_that_broke_ends_in_the_thread_that_used_it(monkeypatch, side):
    """NCCL's takes a while to end: where the loop does it no request moves meanwhile."""
    here, left = memory(), []
    theirs = here.manifest()
    async with met() as ends:
        meeting = ends[side == "receiver"]
        monkeypatch.setattr(meeting, "group", lambda rank, device: Group(left))
        move = (lambda: here.receive(meeting, theirs)) if side == "receiver" else (lambda: here.send(meeting))
        gc.disable()
        try:
            with pytest.raises(WeightsError, match="failed: the peer is gone") as kept:
                await asyncio.to_thread(move)
            assert left[0] == "aborted"
            assert left[1].startswith("asyncio_")  # the executor's thread, while the error is still held here
            assert kept.value.__cause__ is not None
        finally:
            gc.enable()


async def test_the_source_is_done_when_all_has_landed():
    source, target = memory(), memory(present=False)
    async with met() as (sends, receives):
        landed, may_land = receives.landed, threading.Event()
        receives.landed = lambda: (may_land.wait(5.0), landed())  # as a digest that takes long
        taking = asyncio.create_task(asyncio.to_thread(target.receive, receives, source.manifest()))
        giving = asyncio.create_task(asyncio.to_thread(source.send, sends))
        await asyncio.wait({giving}, timeout=0.5)
        assert not giving.done()
        may_land.set()
        assert await giving == await taking == source.nbytes


# ---- streams --------------------------------------------------------------------------------------------------------


class Streams:
    """`torch.cuda`'s, as far as they are used: what was done to which."""

    def __init__(self, monkeypatch) -> None:
        self.said, self.ended = [], 0
        monkeypatch.setattr(torch_streams, "_KEPT", torch_streams.StreamPool())
        monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: self.stream("own"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.stream("steps"))
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "Event", lambda: Event(self))

    def stream(self, name: str):
        said = self.said

        class Stream:
            def wait_stream(self, other):
                said.append(f"{name} waits for {other.name}")

            def synchronize(self):
                said.append(f"{name} done")

            def query(self):
                return f"{name} done" in said

        Stream.name = name
        return Stream()

    @contextmanager
    def on(self, stream):
        self.said.append(f"on {stream.name}")
        yield
        self.said.append(f"off {stream.name}")


class Event:
    def __init__(self, device: Streams) -> None:
        self._device, self.at = device, 0

    def record(self, stream=None) -> None:
        self._device.said.append("recorded")
        self.at = self._device.said.count("recorded")

    def query(self) -> bool:
        return self.at <= self._device.ended

    def synchronize(self) -> None:
        self._device.said.append(f"waited for {self.at}")


def test_copies_have_a_stream_of_their_own_and_are_done_at_the_end(monkeypatch):
    streams = Streams(monkeypatch)
    with beside(CUDA, behind=True):
        streams.said.append("work")
    assert streams.said == ["own waits for steps", "on own", "work", "off own", "own done"]
    streams.said.clear()
    with beside(CUDA, behind=False):
        pass
    assert streams.said == ["on own", "off own", "own done"]
    streams.said.clear()
    with beside(CPU, behind=True):
        assert mark(CPU).query()
    assert streams.said == []


def test_layers_count_as_done_when_the_device_has_passed_them(monkeypatch):
    streams, made = Streams(monkeypatch), program(folder())
    monkeypatch.setattr("workers.engine.torch.task.mark", lambda device: mark(CUDA))
    task = StepTask(1, made, segments_of(step_of(1, range(20))))
    with torch.inference_mode():
        while not task.over:
            task.advance()
    assert task.layers_done == 0  # all are queued, none has ended
    streams.ended = 1
    assert task.layers_done == 1
    streams.ended = 2
    assert task.layers_done == 2 == made.model.config.layers


@pytest.mark.parametrize(("boundary", "stops_behind"), [(Boundary.OPERATOR, 2), (Boundary.LAYER, 5)])
def test_a_device_is_given_one_operator_ahead_at_any_boundary(monkeypatch, boundary, stops_behind):
    streams, suspended = Streams(monkeypatch), threading.Event()
    made = program(folder())
    task = StepTask(1, made, segments_of(step_of(1, range(20))))
    pool = ExecutionPool(
        lambda task: None, lambda task, layers: suspended.set(), lambda error: None, boundary, cuda=CUDA
    )
    second = made.stages[1].operator

    def signalled(p):
        pool.preempt(1)
        second(p)

    made.stages[1] = made.stages[1]._replace(operator=signalled)
    pool.submit(task)
    assert suspended.wait(20)
    assert task.done == stops_behind
    waits = [said for said in streams.said if said.startswith("waited")]
    assert waits == [f"waited for {n}" for n in range(1, stops_behind)]  # the last one given is not waited for there
    assert streams.said[-1] == "steps done"  # but here, and no other stream
    pool.close()


# ---- attention ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "start"), [(2, 1), (7, 16), (16, 7)])
def test_the_mask_that_is_said_is_the_one_that_is_written_out(length, start):
    said, written = causal(length, start, CUDA), causal(length, start, CPU)
    assert isinstance(said, CausalBias)
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(1, 8, length, 16, generator=generator)
    k, v = (torch.randn(1, 2, start + length, 16, generator=generator) for _ in "kv")
    found = F.scaled_dot_product_attention(q, k, v, attn_mask=said, enable_gqa=True)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, v, attn_mask=written, enable_gqa=True))
