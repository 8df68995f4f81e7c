"""KV transfers that ask a transfer daemon whether they may send: held, told so, not cut, and never held forever."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson
import pytest

from controller.core.kv_links import KvMoved
from controller.core.steps import Chunk, FinishReason, Seq, SeqState, Step
from tests.waiting import until_on_loop
from tests.workers.engine.client import COMPLETIONS, complete, events_of, post
from tests.workers.engine.offers import fleet_offer
from tests.workers.engine.process import FLEET, EngineProcess
from tests.workers.flowd.running import connected, sending, serving
from workers.engine.kv import transfer as kv_transfer
from workers.engine.kv.links import Links
from workers.engine.kv.progress import KvProgress
from workers.engine.kv.server import KvServer
from workers.engine.kv.store import EmulatedKv
from workers.engine.kv.transfer import KvTraffic
from workers.engine.kv.turns import UNSENT_BYTES, LayerStarts, Turns, TurnsConfig
from workers.flowd import client as flow_client
from workers.flowd.client import FlowClient

TOKENS = 64
STORE = EmulatedKv(layers=4, token_bytes=4096)


class Transfers:
    """A source that keeps the KV of one prompt, and a receiver; `renewed` counts renewals of its lease."""

    def __init__(self, client: FlowClient | None, timeout_s: float, about: dict[str, Any]) -> None:
        self.seq = Seq("s", 0.0, TOKENS, 1, token_ids=[*range(TOKENS), 9], output_tokens=1, computed=TOKENS)
        self.seq.state, self.seq.finish = SeqState.FINISHED, FinishReason.LENGTH
        self.renewed = 0
        self.turns = TurnsConfig(client, renew=self._renew)
        self.server = KvServer(STORE, "t", {"s": self.seq}.get, lambda seq: None, turns=self.turns)
        self.links = Links(STORE, "t", KvTraffic(), timeout_s, lambda seq: about)

    def _renew(self, seq: Seq) -> None:
        assert seq is self.seq
        self.renewed += 1

    def pull(self) -> asyncio.Task[tuple[KvMoved, int]]:
        target = Seq("t", 0.0, TOKENS, 8, token_ids=[*range(TOKENS), 0], output_tokens=1)
        return asyncio.ensure_future(self.links.pull(fleet_offer("127.0.0.1", self.server.port, "s", TOKENS), target))


@asynccontextmanager
async def daemon_and_two(path: str) -> AsyncIterator[tuple[FlowClient, FlowClient]]:
    """A daemon that goes by deadlines, and two clients of it."""
    async with serving(path, "earliest_deadline"), connected(path) as one, connected(path) as two:
        yield one, two


@asynccontextmanager
async def transfers(client: FlowClient | None, timeout_s: float = 5.0, **about: Any) -> AsyncIterator[Transfers]:
    both = Transfers(client, timeout_s, about)
    await both.server.start("127.0.0.1", 0)
    try:
        yield both
    finally:
        both.links.close()
        both.server.close()


async def test_a_held_transfer_is_not_cut_and_its_holding_is_no_bandwidth(path, monkeypatch):
    """Held for far longer than a silent source, or a whole transfer, may take."""
    monkeypatch.setattr(kv_transfer, "STALL_S", 0.4)
    monkeypatch.setattr(flow_client, "STILL_S", 0.1)
    async with daemon_and_two(path) as (client, other), transfers(client, timeout_s=0.4, due_in_s=30.0) as both:
        async with sending(other):
            pulling = both.pull()
            await asyncio.sleep(1.5)
            assert not pulling.done()
            assert both.server.traffic.sent_bytes == 0
            assert both.renewed >= 2
        moved, first_token = await pulling
        assert (first_token, moved.bytes, moved.flow) == (9, STORE.layers * TOKENS * STORE.token_bytes, "scheduled")
        assert 1.0 < moved.held_s <= moved.seconds
        assert moved.moving_s < 0.5
        assert 0 < moved.span_s < moved.held_s, "it was held before its first KV"
        assert moved.pauses == (), "and not after it"
        assert both.turns.traffic.held_s == pytest.approx(moved.held_s)
        (link,) = both.links._links.values()
        assert link.health.bandwidth_bytes_s == pytest.approx(moved.bytes / moved.moving_s)
        assert both.turns.traffic.unscheduled == 0


async def test_the_deadline_of_the_receiver_decides_who_goes_first(path):
    async with daemon_and_two(path) as (client, other), sending(other, due_in_s=30.0):
        async with transfers(client, due_in_s=0.5) as both:
            moved, _ = await both.pull()
            assert moved.held_s < 0.5
        async with transfers(client, due_in_s=60.0) as both:
            pulling = both.pull()
            await asyncio.sleep(1.0)
            assert not pulling.done()
            pulling.cancel()


@pytest.mark.parametrize("about", [{}, {"due_in_s": "soon"}, {"due_in_s": 1e300}, {"due_in_s": True}])
async def test_a_receiver_without_a_readable_deadline_is_served(path, about):
    async with serving(path), connected(path) as client, transfers(client, **about) as both:
        moved, _ = await both.pull()
        assert moved.flow == "scheduled"


async def test_short_memory_at_the_receiver_promotes_the_transfer(path):
    async with (
        daemon_and_two(path) as (client, other),
        sending(other),
        transfers(client, due_in_s=30.0, pressed=True) as both,
    ):
        moved, _ = await both.pull()
        assert moved.flow == "scheduled"
        assert moved.held_s < flow_client.MOST_HELD_S / 2


async def test_a_daemon_that_goes_away_lets_the_transfer_go_and_the_record_says_so(path):
    async with (
        serving(path, "earliest_deadline") as daemon,
        connected(path) as client,
        connected(path) as other,
        sending(other),
        transfers(client, due_in_s=30.0) as both,
    ):
        pulling = both.pull()
        await asyncio.sleep(0.5)
        assert not pulling.done()
        await daemon.close()
        moved, _ = await pulling
        assert moved.flow == "lost"
        assert moved.held_s < 5.0
        assert both.turns.traffic.unscheduled == 1


@asynccontextmanager
async def connected_later(path: str) -> AsyncIterator[FlowClient]:
    client = FlowClient(path)
    client.start()
    try:
        yield client
    finally:
        client.close()


async def test_without_a_daemon_transfers_go_at_once_and_the_record_says_so(path):
    async with connected_later(path) as client, transfers(client, due_in_s=30.0) as both:
        moved, _ = await both.pull()
        assert (moved.flow, moved.held_s, moved.level) == ("unavailable", 0.0, 0)
        assert both.turns.traffic.unscheduled == 1


async def test_without_flow_scheduling_nothing_is_said_of_it():
    async with transfers(None) as both:
        moved, _ = await both.pull()
        assert (moved.flow, moved.held_s, moved.promotions, moved.level) == ("", 0.0, 0, 0)


async def test_a_receiver_that_goes_away_while_it_is_held_is_not_waited_for(path, monkeypatch):
    monkeypatch.setattr(flow_client, "STILL_S", 0.1)
    async with (
        daemon_and_two(path) as (client, other),
        sending(other),
        transfers(client, due_in_s=30.0) as both,
    ):
        pulling = both.pull()
        await until_on_loop(lambda: both.renewed >= 1)
        pulling.cancel()
        await until_on_loop(lambda: both.server.traffic.failed == 1)
        assert not client._flows


async def test_packets_of_both_ends_are_marked_while_it_moves(path, monkeypatch):
    seen = []
    real = kv_transfer.as_class

    def watched(writer: Any, wire_class: int | None) -> None:
        real(writer, wire_class)
        seen.append(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_IP, socket.IP_TOS))

    monkeypatch.setattr(kv_transfer, "as_class", watched)
    async with serving(path, "earliest_deadline"), connected(path) as client, transfers(client) as both:
        marked = []
        monkeypatch.setattr("workers.engine.kv.turns.as_class", lambda writer, each: marked.append(each))
        await both.pull()
        await until_on_loop(lambda: len(marked) == 2)
        assert marked == [0, None], "the next operation of this connection is none of this transfer"
        assert seen == [0xE0]


@pytest.mark.parametrize("scheduled", [True, False])
async def test_what_could_not_be_called_back_is_little_and_none_of_it_is_ours_at_a_turn(path, monkeypatch, scheduled):
    """Before each layer nothing of the layers before it is in the process, and little may be unsent in the kernel."""
    found, take_turn = [], Turns.next

    async def watched(self: Turns, *args: Any) -> dict[str, int]:
        told = await take_turn(self, *args)
        low = self._writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)
        found.append((low, max(self._writer.transport.get_write_buffer_limits())))
        assert not scheduled or self._writer.transport.get_write_buffer_size() == 0
        return told

    monkeypatch.setattr(Turns, "next", watched)
    async with serving(path), connected(path) as client, transfers(client if scheduled else None) as both:
        await both.pull()
    assert len(found) == STORE.layers
    assert (set(found) == {(UNSENT_BYTES, 0)}) is scheduled


async def test_layers_of_a_step_with_a_transfer_are_reported_as_they_begin(path):
    passed = [0]
    progress = KvProgress(lambda step_id: passed[0])
    seq = Seq("s", 0.0, TOKENS, 8, token_ids=[*range(TOKENS), 0], keep_kv=True)
    seq.state = SeqState.RUNNING
    async with serving(path) as daemon, connected(path) as client, connected(path) as other, sending(other):
        said: list[Any] = []

        def told() -> list[tuple[str, int | None]]:
            return [(each["op"], each.get("layer")) for each in said if each["op"] in ("layer", "computed")]

        client.say, say = lambda message: (said.append(message), say(message)), client.say  # type: ignore[method-assign,assignment]
        layers = LayerStarts(client, progress, layers=4)
        assert layers.follow(seq) == "", "no step computes it"
        assert list(progress.began(Step(7, (Chunk(seq, 0, TOKENS, last=True),), (), 0))) == [seq]
        assert [layers.follow(seq), layers.follow(seq)] == ["7", "7"]
        flow = client.submit(3, 10_000, "host", 30.0, batch="7")
        for layers_done in (0, 1, 3, 4):
            passed[0] = layers_done
            await until_on_loop(lambda: told()[-1:] == [("layer", min(passed[0], 3))])
        await until_on_loop(lambda: flow.level)
        assert daemon._batches
        seq.computed = TOKENS
        await until_on_loop(lambda: not any(daemon._batches.values()))
        assert told() == [("layer", 0), ("layer", 1), ("layer", 3), ("computed", None)]
        assert [each["batch"] for each in said if each["op"] == "submit"] == ["7"]
        assert layers.follow(seq) == ""


# ---- engines --------------------------------------------------------------------------------------------------------

PROMPT = list(range(10, 330))


async def test_engines_hold_a_transfer_beyond_their_own_limits(path, monkeypatch):
    """Two engine processes whose lease and time-out are shorter than the holding. The answer is the single engine's."""
    monkeypatch.setenv("FLOW_SOCKET", path)
    same = (
        *("--profile", "constant:2ms", "--model", "tiny", "--max-model-len", "512", "--kv-blocks", "64"),
        *("--no-enable-prefix-caching", "--shutdown-timeout", "0", "--kv-lease", "2.5", "--kv-timeout", "2.5"),
    )

    def start(role: str) -> EngineProcess:
        return EngineProcess(*same, "--role", role, token=FLEET["token"])

    async with serving(path, "earliest_deadline"), connected(path) as other:
        with await asyncio.to_thread(start, "prefill") as p, await asyncio.to_thread(start, "decode") as d:
            async with aiohttp.ClientSession(p.url) as prefill, aiohttp.ClientSession(d.url) as decode:
                whole = await complete(decode, prompt=PROMPT, max_tokens=6, ignore_eos=True)
                asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 6, "ignore_eos": True}
                async with sending(other) as first:
                    remote = {"do_remote_decode": True}
                    status, offered = await post(
                        prefill, COMPLETIONS, {**asked, "max_tokens": 1, "kv_transfer_params": remote}
                    )
                    assert status == 200
                    body = {**asked, "kv_transfer_params": offered["kv_transfer_params"], "target_ttft": 60}
                    async with decode.post(COMPLETIONS, json={**body, "stream": True}) as response:
                        await asyncio.sleep(5.0)
                        first.end()
                        raw = await response.read()
        text = "".join(orjson.loads(event)["choices"][0]["text"] for event in events_of(raw)[:-1])
        assert text == whole["choices"][0]["text"]
        comment = next(event for event in raw.split(b"\n\n") if event.startswith(b": kv {"))
        moved = orjson.loads(comment[5:])
        assert moved["flow"] == "scheduled"
        assert moved["held_s"] > 3.5
        assert moved["bytes"] == 32 * 4096 * len(PROMPT)
