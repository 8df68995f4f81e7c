"""KV of a real model from one engine to another: the answer is the one a single engine gives, token for token."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Sequence

import aiohttp
import orjson
import pytest
import torch

from controller.core.steps import Chunk, FinishReason, Seq, SeqState, Step, StepDone, Suspended
from tests.workers.engine.client import COMPLETIONS, complete, samples, streamed
from tests.workers.engine.offers import fleet_offer
from tests.workers.engine.proxy import ELSEWHERE, Wire
from tests.workers.engine.torch.bench import VOCABULARY, folder, program
from workers.engine.kv.links import Links, Peer
from workers.engine.kv.progress import KvProgress
from workers.engine.kv.server import KvServer
from workers.engine.kv.store import KvMismatch
from workers.engine.kv.transfer import KvTraffic
from workers.engine.kv.wire import KvTransferError
from workers.engine.torch.executor import TorchExecutor
from workers.engine.torch.kv.layout import TorchKv
from workers.engine.torch.task import Boundary

pytestmark = [pytest.mark.torch, pytest.mark.long(50)]


@pytest.fixture(scope="module", params=["continuous", "slackline"])
def engine_options(request: pytest.FixtureRequest) -> dict[str, Sequence[str]]:
    """Eight layers: of a prompt in one step, those that are left are left for long enough to be seen."""
    model = folder("LlamaForCausalLM", "--layers", "8")
    common = ("--executor", "torch", "--model", str(model), "--threads", "1", "--kv-cache-gib", "0.04")
    options = (*common, "--profile", "constant:5ms", "--shutdown-timeout", "0", "--max-num-batched-tokens", "64")
    options = (*options, "--scheduler", request.param)
    return {"prefill": (*options, "--role", "prefill"), "decode": (*options, "--role", "decode")}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "top_p": 0.9, "seed": 7}])
async def test_a_handed_over_answer_is_the_single_engines(sessions, sampling):
    body = {"prompt": [(7 * i) % VOCABULARY for i in range(150)], "ignore_eos": True, **sampling}
    before = (await samples_of(sessions["decode"]))["slackline_kv_received_bytes"]
    first = await complete(sessions["prefill"], **body, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    offer = first["kv_transfer_params"]
    chunks = await streamed(sessions["decode"], COMPLETIONS, {**body, "max_tokens": 20, "kv_transfer_params": offer})
    whole = await complete(sessions["prefill"], **body, max_tokens=20)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["choices"][0]["text"]
    # Blocks the decode engine has cached from the turn before are not sent again.
    assert (await samples_of(sessions["decode"]))["slackline_kv_received_bytes"] > before


async def test_an_answer_from_kv_that_was_pulled_while_it_was_computed_is_the_single_engines(sessions):
    """The last step of so small a model may be over before its beginning is told: then the next prompt is tried."""
    for start in range(3, 23):
        body = {"prompt": [(11 * i + start) % VOCABULARY for i in range(300)], "ignore_eos": True, "temperature": 0}
        asked = {**body, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True, "early": True}}
        async with sessions["prefill"].post(COMPLETIONS, json=asked) as prefill:
            early = prefill.headers.get("x-slackline-kv-offer")
            offer = orjson.loads(early) if early else (await prefill.json())["kv_transfer_params"]
            assert ("first_token" in offer) == (early is None)
            chunks = await streamed(
                sessions["decode"], COMPLETIONS, {**body, "max_tokens": 20, "kv_transfer_params": offer}
            )
            first = await prefill.json()
        whole = await complete(sessions["prefill"], **body, max_tokens=20)
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert text == whole["choices"][0]["text"]
        assert text.startswith(first["choices"][0]["text"])
        if early:
            return
    pytest.fail("none of twenty prompts was offered early")


async def test_layers_of_a_real_step_move_as_it_passes_them():
    """Suspended behind its first layer, of that one everything is sent and of the other nothing."""
    one, other = program(folder()), program(folder())
    here, there = TorchKv(one.cache), TorchKv(other.cache)
    events: queue.Queue[object] = queue.Queue()
    executor = TorchExecutor(one, events.put, lambda call: call(), events.put, boundary=Boundary.LAYER)
    tokens, blocks = [(7 * i) % VOCABULARY for i in range(40)], list(range(10))
    seq = Seq("s", 0.0, 40, 1, token_ids=[*tokens], keep_kv=True, state=SeqState.RUNNING, blocks=blocks)
    step = Step(1, (Chunk(seq, 0, 40, True),), (), 0)
    progress = KvProgress(executor.layers_done)
    assert list(progress.began(step)) == [seq]
    executor.start(step)
    executor.suspend(1)
    assert isinstance(await asyncio.to_thread(events.get, True, 30.0), Suspended)
    assert executor.layers_done(1) == 1

    server = KvServer(here, "t", {"s": seq}.get, lambda taken: None, progress)
    await server.start("127.0.0.1", 0)
    links = Links(there, "t", KvTraffic(), 30.0)
    target = Seq("t", 0.0, 40, 8, token_ids=[*tokens, 0], output_tokens=1, blocks=[*reversed(range(12))])
    pulling = asyncio.ensure_future(links.pull(fleet_offer("127.0.0.1", server.port, "s", 40), target))
    async with asyncio.timeout(30.0):
        while server.traffic.sent_bytes < 40 * here.token_bytes:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    assert server.traffic.sent_bytes == 40 * here.token_bytes

    executor.resume(1)
    done = events.get(True, 30.0)  # holds the loop too, or the last layer might leave before the step's end is told
    assert isinstance(done, StepDone)
    (sampled,) = done.sampled
    seq.computed, seq.output_tokens = 40, 1
    seq.token_ids.append(sampled.token)
    seq.state, seq.finish = SeqState.FINISHED, FinishReason.LENGTH
    moved, first_token = await pulling
    assert (first_token, moved.early_bytes) == (sampled.token, 40 * here.token_bytes)
    for layer in range(here.layers):
        assert there.read(target, layer, 0, 40) == here.read(seq, layer, 0, 40)
    links.close()
    server.close()
    executor.close()


async def test_real_entries_of_which_one_bit_was_turned_over_on_the_way_are_not_taken():
    """Nothing but the checksum could tell: any bits are entries."""
    one, other = program(folder()), program(folder())
    torch.manual_seed(0)
    one.cache.memory.copy_(torch.randn_like(one.cache.memory))
    here, there = TorchKv(one.cache), TorchKv(other.cache)
    tokens = [(7 * i) % VOCABULARY for i in range(40)]
    source = Seq("s", 0.0, 40, 1, token_ids=[*tokens, 9], keep_kv=True, blocks=list(range(10)), computed=40)
    source.state, source.finish, source.output_tokens = SeqState.FINISHED, FinishReason.LENGTH, 1
    server = KvServer(here, "t", {"s": source}.get, lambda taken: None)
    await server.start("127.0.0.1", 0)
    server.names.add(f"{ELSEWHERE}:{server.port}")
    links = Links(there, "t", KvTraffic(), 30.0)
    target = Seq("t", 0.0, 40, 8, token_ids=[*tokens, 0], output_tokens=1, blocks=[*reversed(range(12))])
    offer = fleet_offer(ELSEWHERE, server.port, "s", 40)
    async with Wire(server.port) as wire:
        links.announce([Peer("p", ELSEWHERE, server.port)])
        await links.tried(5.0)  # its bandwidth is measured: what comes next is the pull
        wire.flip(30 * here.token_bytes)
        with pytest.raises(KvTransferError, match="checksum of layer") as raised:
            await links.pull(offer, target)
        assert (raised.value.reason, wire.flips) == ("corrupt", 1)
        await links.pull(offer, target)
    for layer in range(here.layers):
        assert there.read(target, layer, 0, 40) == here.read(source, layer, 0, 40)
    links.close()
    server.close()


async def samples_of(session: aiohttp.ClientSession) -> dict[str, float]:
    async with session.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    return {name: float(value) for name, _, value in (line.partition(" ") for line in lines if line[0] != "#")
            if name.startswith("slackline_")}  # fmt: skip


async def test_metrics_name_what_moved(sessions):
    before = await samples_of(sessions["decode"])
    body = {"prompt": [(13 * i + 5) % VOCABULARY for i in range(100)], "ignore_eos": True, "temperature": 0}
    first = await complete(sessions["prefill"], **body, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    offer = first["kv_transfer_params"]
    await streamed(sessions["decode"], COMPLETIONS, {**body, "max_tokens": 2, "kv_transfer_params": offer})
    seen = await samples_of(sessions["decode"])
    assert seen["slackline_kv_received"] - before["slackline_kv_received"] == 1
    assert seen["slackline_kv_failed"] == before["slackline_kv_failed"]
    assert (await samples(sessions["decode"]))["vllm:num_requests_running", ""] == 0


def test_entries_written_are_the_entries_read():
    one, other = program(folder()), program(folder())
    torch.manual_seed(0)
    one.cache.memory.copy_(torch.randn_like(one.cache.memory))
    tokens = list(range(30))
    source = Seq("a", 0.0, 30, 4, token_ids=tokens, blocks=[5, 2, 9, 0, 11, 3, 1, 8])
    target = Seq("b", 0.0, 30, 4, token_ids=tokens, blocks=[0, 1, 2, 3, 4, 5, 6, 7])
    here, there = TorchKv(one.cache), TorchKv(other.cache)
    for layer in range(here.layers):
        there.write(target, layer, 0, here.read(source, layer, 0, 17))
        there.write(target, layer, 17, here.read(source, layer, 17, 30))
        assert there.read(target, layer, 0, 30) == here.read(source, layer, 0, 30)
        assert len(here.read(source, layer, 0, 1)) == here.token_bytes


def test_what_does_not_fit_is_refused():
    kv = TorchKv(program(folder()).cache)
    seq = Seq("a", 0.0, 30, 4, blocks=[0])
    with pytest.raises(KvMismatch, match="whole tokens"):
        kv.write(seq, 0, 0, b"abc")
    with pytest.raises(KvMismatch, match="blocks"):
        kv.read(seq, 0, 0, 30)
