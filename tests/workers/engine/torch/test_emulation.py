"""The emulated devices can say no: what a device would refuse, and what it might do in another order."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from controller.core.steps import Chunk, Seq, Step
from tests.workers.engine.torch.bench import CPU, Bench, folder, program
from tests.workers.engine.torch.emulated_order import EmulatedStream, RaceError
from tests.workers.engine.torch.two_devices import (
    FIRST,
    SECOND,
    EmulatedNccl,
    EmulatedTensor,
    HostAccessError,
    MixedDevicesError,
    emulated,
)
from workers.engine.torch.kv.layout import TorchKv
from workers.engine.torch.model.transformer import Rotary, inverse_frequencies

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(torch.backends.cuda.is_built(), reason="a build for CUDA has devices that say no themselves"),
]
Operation = Callable[[], Any]


@pytest.fixture
def here() -> Iterator[torch.Tensor]:
    """(3, 4) floats on the first device."""
    with emulated():
        yield torch.arange(12, device=FIRST).float().view(3, 4)


def positions(device: torch.device = CPU) -> torch.Tensor:
    return torch.arange(3, device=device)


# ---- devices --------------------------------------------------------------------------------------------------------


def test_a_device_goes_on_in_all_that_is_made_of_a_tensor(here):
    made = [
        here + 1,
        here[1:],
        here.t(),
        here.to(torch.float16),
        torch.zeros_like(here),
        here.topk(2).indices,
        here.sum(),
    ]
    made += [
        here[[0, 2]],
        here.split(1)[0],
        F.softmax(here, dim=-1),
        torch.where(here > 3)[0],
        here.to(SECOND).to(FIRST),
    ]
    assert {each.device for each in made} == {FIRST}
    assert all(isinstance(each, EmulatedTensor) and each.is_cuda for each in made)
    assert type(here.cpu()) is torch.Tensor
    assert here.to(SECOND).device == SECOND


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x + torch.ones(3, 4),
        lambda x: x + torch.ones(3, 4, device=SECOND),
        lambda x: x + torch.ones((), device=SECOND),
        lambda x: torch.ones(3, 4).add_(x),
        lambda x: torch.tensor(1.0).add_(x.sum()),
        lambda x: torch.cat((x, torch.ones(3, 4))),
        lambda x: x @ torch.ones(4, 3),
        lambda x: F.linear(x, torch.ones(2, 4)),
        lambda x: F.embedding(positions(), x),
        lambda x: x.index_select(0, positions()),
        lambda x: x.gather(0, positions()[None]),
        lambda x: x.index_add_(0, positions(), torch.ones(3, 4, device=FIRST)),
        lambda x: x[positions(SECOND)],
        lambda x: torch.ones(3, 4)[positions(FIRST)],
        lambda x: x.__setitem__(positions(), torch.ones(3, 4)),
        lambda x: torch.where(x > 3, x, torch.ones(3, 4)),
        lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], attn_mask=torch.ones(3, 3) > 0),
        lambda x: torch.bucketize(x, torch.ones(4)),
    ],
)
def test_what_mixes_devices_is_refused(here, mix):
    with pytest.raises(MixedDevicesError, match="expected all tensors to be on the same device"):
        mix(here)


@pytest.mark.parametrize(
    "meeting",
    [
        lambda x: x + torch.tensor(1.0),
        lambda x: x * 2.0,
        lambda x: x[positions()],
        lambda x: x[[0, 1], 2],
        lambda x: x.__setitem__(positions(), 7.0),
        lambda x: x.__setitem__(positions(), torch.tensor(7.0)),
        lambda x: x.__setitem__(slice(0, 3), torch.ones(3, 4)),
        lambda x: x.copy_(torch.ones(3, 4)),
        lambda x: torch.ones(3, 4).copy_(x),
        lambda x: x.new_zeros(2) + x.to(SECOND).cpu()[0, 0],
        lambda x: torch.searchsorted(x[0], 2.5),
    ],
)
def test_what_torch_lets_pass_does_there_what_it_does_on_the_host(here, meeting):
    there = here.cpu()
    found, wanted = meeting(here), meeting(there)
    assert torch.equal(here.cpu(), there)
    assert found is wanted is None or torch.equal(found.cpu(), wanted.cpu())


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.numpy(),
        memoryview,
        lambda x: torch.frombuffer(x, dtype=torch.uint8),
        lambda x: (ctypes.c_char * x.nbytes).from_address(x.data_ptr()),
        lambda x: x.untyped_storage().data_ptr(),
    ],
)
def test_the_host_sees_a_device_by_copies_only(here, look):
    with pytest.raises((HostAccessError, RuntimeError, TypeError, ValueError)):
        look(here)
    assert here.cpu().numpy().sum() == here.sum().item() == 66


def test_nccl_moves_nothing_that_is_on_the_host(here):
    class Store(torch.distributed.HashStore):
        host = "127.0.0.1"

    group = EmulatedNccl(Store(), 0, 1, timedelta(seconds=5))
    with pytest.raises(MixedDevicesError, match="on a device"):
        group.send([torch.ones(3)], 0, 1)


def test_nothing_of_it_is_left_behind():
    with emulated():
        assert torch.cuda.is_available()
    assert not torch.cuda.is_available()
    with pytest.raises((AssertionError, NotImplementedError), match="CUDA"):  # the one where torch was not asked before
        torch.zeros(1, device=FIRST)


# ---- order ----------------------------------------------------------------------------------------------------------


def aside(work: Operation, *, behind: bool = False, then: bool = False) -> None:
    """In a stream of its own. `then`: the steps' line waits for it."""
    stream, steps = torch.cuda.Stream(FIRST), torch.cuda.current_stream(FIRST)
    if behind:
        stream.wait_stream(steps)
    with torch.cuda.stream(stream):
        work()
    if then:
        steps.wait_stream(stream)


def test_what_one_stream_writes_another_reads_behind_it_only(here):
    with pytest.raises(RaceError, match="does not come behind"):
        aside(here.sum)
    aside(here.sum, behind=True)


@pytest.mark.parametrize(
    "synchronise", [lambda: torch.cuda.synchronize(FIRST), lambda: torch.ones(1, device=FIRST).item()]
)
def test_what_the_host_has_waited_for_is_done(here, synchronise):
    here.add_(1)
    with pytest.raises(RaceError):
        aside(here.sum)
    synchronise()
    aside(here.sum)


def test_what_the_host_waited_for_on_another_device_is_not(here):
    torch.cuda.synchronize(SECOND)
    with pytest.raises(RaceError):
        aside(here.sum)


def test_an_event_says_what_was_queued_before_it_and_no_more(here):
    other, event = torch.zeros(3, device=FIRST), torch.cuda.Event()
    event.record()
    other.add_(1)
    assert event.query()
    aside(here.sum)
    with pytest.raises(RaceError):
        aside(other.sum)


def test_a_stream_is_done_when_somebody_has_waited_for_it(here):
    stream = torch.cuda.current_stream(FIRST)
    assert not stream.query()
    stream.synchronize()
    assert stream.query()


def test_what_is_read_aside_is_not_written_meanwhile(here):
    aside(here.sum, behind=True)
    with pytest.raises(RaceError, match=r"add_.* does not come behind .*sum"):
        here.add_(1)
    aside(here.sum, behind=True, then=True)
    here.add_(1)


def test_other_rows_of_the_same_memory_are_not_in_the_way():
    with emulated():
        memory, rows = torch.zeros(8, 4, device=FIRST), torch.tensor([1, 2])
        torch.cuda.synchronize(FIRST)
        memory[rows] = 1.0
        aside(lambda: memory[[0, 3]])
        with pytest.raises(RaceError):
            aside(lambda: memory[[2, 3]])


def test_memory_that_goes_while_another_stream_reads_it_is_told():
    def read_and_forgotten() -> None:
        aside(torch.zeros(4, device=FIRST).sum, behind=True)

    with pytest.raises(RaceError, match="given back while"), emulated():
        read_and_forgotten()


def test_threads_begin_in_the_line_of_the_first_device(here):
    found: list[EmulatedStream] = []
    with torch.cuda.stream(torch.cuda.Stream(SECOND)):
        assert torch.cuda.current_stream().device == SECOND
        thread = threading.Thread(target=lambda: found.append(torch.cuda.current_stream()))
        thread.start()
        thread.join()
    assert found == [torch.cuda.current_stream(FIRST)]


# ---- an engine with a fault -----------------------------------------------------------------------------------------


def one_chunk(device: torch.device) -> bytes:
    """KV of a chunk from which nothing is sampled."""
    bench = Bench(program(folder(), device=device), boundary=None)
    try:
        seq = Seq("prompt", 0.0, 20, 1, token_ids=list(range(20)), blocks=list(range(5)))
        bench.executor.start(Step(1, (Chunk(seq, 0, 16, False),), (), 0))
        bench.next_event()
        return TorchKv(bench.executor._program.cache).read(seq, 0, 0, 16)
    finally:
        bench.close()


def test_an_engine_that_forgets_to_move_a_tensor_is_found(monkeypatch):
    def forgetful(self: Rotary, config: Any, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(config.rope, config.head_dim)

    monkeypatch.setattr(Rotary, "__init__", forgetful)
    with pytest.raises(MixedDevicesError), emulated():
        one_chunk(FIRST)


def test_an_engine_that_does_not_wait_for_its_steps_is_found(monkeypatch):
    with emulated():
        assert one_chunk(FIRST) == one_chunk(CPU)
        lines, synchronize = {torch.cuda.current_stream(FIRST)}, EmulatedStream.synchronize
        monkeypatch.setattr(EmulatedStream, "synchronize", lambda self: self in lines or synchronize(self))
        with pytest.raises(RaceError, match="index does not come behind"):
            one_chunk(FIRST)
