"""KV between two servers' halves of the connector, over real sockets, with the faults that may happen on the way."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest

from tests.waiting import until_on_loop
from tests.workers.flowd.running import MB, connected, sending, serving
from tests.workers.vllm_connector.servers import (
    BLOCKS,
    HOST,
    LAYERS,
    SECRET,
    SENT,
    TOKEN,
    WAIT_S,
    WANTED,
    Pair,
    blocks_of,
    cache,
    pair,
)
from workers.engine.kv.wire import CLASSES, as_class, be_greeted, read_frame, write, write_frame
from workers.flowd.client import Flow, FlowClient
from workers.flowd.daemon import FlowDaemon
from workers.http.fleet_proof import address
from workers.supervisor.ports import free_port
from workers.vllm_connector import places, pull, source, transfers
from workers.vllm_connector.blocks import FORMAT
from workers.vllm_connector.plan import Kept, KvLoad, KvOrders, RefusedOffer
from workers.vllm_connector.transfers import StepClock, Transfers

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Shared(NamedTuple):
    """A transfer daemon, another client of it, and a pair whose sender asks it too."""

    daemon: FlowDaemon
    other: FlowClient
    made: Pair


@asynccontextmanager
async def sharing(path: str, policy: str = "earliest_deadline", width: int = 4096) -> AsyncIterator[Shared]:
    async with serving(path, policy) as daemon, connected(path) as other:
        with pair({"flow_socket": path}, width=width) as made:
            await connects(made)
            yield Shared(daemon, other, made)


async def connects(made: Pair) -> None:
    client = made.source._client
    assert client is not None
    await until_on_loop(lambda: client.connected, WAIT_S)


@pytest.fixture
async def shared(path: str) -> AsyncIterator[Shared]:
    async with sharing(path) as found:
        yield found


def test_all_blocks_arrive_and_both_sides_hear_of_it() -> None:
    with pair() as made:
        made.keep()
        made.load()
        ended = made.until(lambda now: now.sent and now.loaded)
        assert (ended.sent, ended.loaded, ended.lost) == ({"p"}, {"d"}, set())
        assert made.equal()
        size = len(WANTED) * blocks_of(made.here).block_bytes
        assert made.source.figures() == {"sent": 1, "sent_bytes": size}
        got = made.target.figures()
        assert (got["received"], got["received_bytes"]) == (1, size)
        assert made.target.figures() == {}, "figures are those since the last question"
        found = made.target.moved()[SECRET]
        assert (found["bytes"], found["layers"], found["tokens"], found["cached"]) == (size, LAYERS, 60, 0)
        assert found["seconds"] > 0.0
        assert (found["reason"], found["flow"], found["held_s"], found["level"]) == ("", "", 0.0, 0)
        assert (made.target.moved(), made.source.moved()) == ({}, {})


def test_only_the_blocks_that_are_not_cached_yet_are_sent() -> None:
    with pair() as made:
        before = cache(2)
        made.keep()
        made.target.order(KvOrders(loads=[KvLoad("d", made.offer, 3, WANTED[3:])]))
        made.until(lambda now: now.sent and now.loaded)
        found = made.target.moved()[SECRET]
        assert (found["tokens"], found["cached"]) == (12, 48)
        for name, there in made.there.items():
            assert (there[WANTED[3]] == made.here[name][4]).all()
            assert (there[WANTED[0]] == before[name][WANTED[0]]).all()


def test_a_load_may_be_ordered_a_little_before_its_offer() -> None:
    """The sender's worker learns of an offer with the step after the answer that has it."""
    with pair() as made:
        made.load()
        made.source.order(KvOrders())
        assert not made.look().loaded
        made.keep()
        assert not made.until(lambda now: now.loaded).lost
        assert made.equal()


@pytest.mark.parametrize(
    ("sender", "receiver", "about", "says", "reason"),
    [
        ({"token": "of-another-fleet"}, {}, "model", "does not know the fleet's token", "refused"),
        ({"peers": frozenset({"192.0.2.1:7"})}, {}, "model", "none of the peers of this server", "cut"),
        ({}, {}, "other", "the KV here is", "other_model"),
    ],
)
def test_what_must_not_be_sent_is_computed(
    sender: dict[str, object],
    receiver: dict[str, object],
    about: str,
    says: str,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pair(sender, receiver, about) as made, caplog.at_level(logging.WARNING):
        made.keep()
        made.load()
        ended = made.until(lambda now: now.loaded)
        assert ended.lost == set(WANTED)
        assert says in caplog.text
        assert made.target.figures() == {"failed": 1}
        found = made.target.moved()[SECRET]
        assert (found["reason"], found["bytes"], found["tokens"]) == (reason, 0, 0)
        assert found["seconds"] > 0.0
        assert found["error"] in caplog.text


def test_an_offer_that_was_refused_is_told_with_the_step_that_computes_its_prompt() -> None:
    with pair() as made:
        made.target.order(KvOrders(refused=[RefusedOffer(SECRET, "\u00fc" + "x" * 10_000)]))
        found = made.target.moved()[SECRET]
        assert (found["reason"], found["bytes"], found["seconds"]) == ("refused", 0, 0.0)
        assert found["error"] == "?" + "x" * (transfers.MOST_SAID - 1), "as far as a header may have it"
        assert (made.target.figures(), made.look().loaded) == ({}, set()), "no load began"


def test_kv_is_given_for_its_own_secret_only(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "KNOWN_S", 0.05)
    with pair() as made, caplog.at_level(logging.WARNING):
        made.keep()
        made.load(made.offer._replace(secret="6" * 32))
        assert made.until(lambda now: now.loaded).lost == set(WANTED)
        assert "not kept here" in caplog.text
        assert not made.look().sent, "what others offered stays"


def test_kv_that_nobody_loads_is_freed_by_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "KNOWN_S", 0.05)
    with pair({"lease_s": 0.05}) as made:
        made.keep()
        assert made.until(lambda now: now.sent).sent == {"p"}
        assert made.source.figures() == {"expired": 1}
        made.load()
        assert made.until(lambda now: now.loaded).lost == set(WANTED)


def test_kv_that_is_not_wanted_is_freed_at_once() -> None:
    with pair() as made:
        made.keep()
        made.target.order(KvOrders(unwanted=[made.offer]))
        made.until(lambda now: now.sent)
        assert made.source.figures() == {}


def test_blocks_beyond_the_cache_are_neither_sent_nor_written() -> None:
    with pair() as made:
        made.keep()
        made.target.order(KvOrders(loads=[KvLoad("d", made.offer, 0, (1, 2, 3, BLOCKS))]))
        assert made.until(lambda now: now.loaded).lost == {1, 2, 3, BLOCKS}


# ---- the transfer daemon ---------------------------------------------------------------------------------------------


def test_without_its_daemon_a_transfer_goes_unscheduled(path: str) -> None:
    with pair({"flow_socket": path}) as made:
        made.keep()
        made.load()
        made.until(lambda now: now.sent and now.loaded)
        assert made.equal()
        assert made.source.figures()["unscheduled"] == 1
        found = made.target.moved()[SECRET]
        assert (found["flow"], found["held_s"], found["level"]) == ("unavailable", 0.0, 0)


async def test_a_daemon_that_never_answers_stops_no_transfer(path: str) -> None:
    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    daemon = await asyncio.start_unix_server(mute, path)
    with pair({"flow_socket": path}) as made:
        await connects(made)
        made.keep()
        made.load()
        await until_on_loop(lambda: made.look().sent and made.moved.loaded, WAIT_S)
        assert made.source.figures()["unscheduled"] == 1
    daemon.close()


@pytest.mark.parametrize(
    ("called", "name"),
    [
        ("cmpl-req-0af3-0-1b2c3d4e", "req-0af3"),
        ("chatcmpl-req-0af3-1b2c3d4e", "req-0af3"),
        ("cmpl-req-0af3-0", "cmpl-req-0af3-0"),
        ("p", "p"),
    ],
)
def test_a_transfer_is_named_as_the_gateway_names_its_request(called: str, name: str) -> None:
    assert source.name_of(called) == name


async def test_a_transfer_that_has_time_waits_for_one_that_has_none(shared: Shared) -> None:
    """The link is full until the other one ends; then it is sent, and its bytes are marked."""
    daemon, other, made = shared
    async with sending(other):
        made.keep()
        made.load(due_in_s=25.0)
        await until_on_loop(lambda: len(daemon.status()["flows"]) == 2, WAIT_S)
        await asyncio.sleep(1.2)
        assert not made.look().loaded, "it is held"
    await until_on_loop(lambda: made.look().sent and made.moved.loaded, WAIT_S)
    assert not made.moved.lost
    assert made.equal()
    found = made.source.figures()
    assert found["held_seconds"] >= 1.0
    assert "unscheduled" not in found
    moved = made.target.moved()[SECRET]
    assert moved["held_s"] == pytest.approx(found["held_seconds"])
    assert moved["held_s"] <= moved["seconds"]
    assert 0 < moved["span_s"] <= moved["seconds"] - moved["held_s"], "it was held before its first KV"
    assert (moved["flow"], 1 <= moved["level"] <= 8) == ("scheduled", True)
    await until_on_loop(lambda: not daemon.status()["flows"], WAIT_S)


async def test_a_transfer_that_is_held_half_way_tells_when_it_stood_still(shared: Shared) -> None:
    """So that the gateway knows when the port that receives it was in use."""
    _, _, made = shared
    client = made.source._client
    assert client is not None
    submit, flows = client.submit, list[Flow]()

    def watched(*args: Any, **named: Any) -> Flow:
        flows.append(submit(*args, **named))
        sent = flows[0].sent

        def held_after(size: int) -> None:
            """The first layer is sent; then it may not send until the test says so."""
            sent(size)
            flows[0].sent = sent  # type: ignore[method-assign]
            flows[0].permitted(False, 1, 1)

        flows[0].sent = held_after  # type: ignore[method-assign]
        return flows[0]

    client.submit = watched  # type: ignore[method-assign]
    made.keep()
    made.load(due_in_s=25.0)
    await until_on_loop(lambda: flows and not flows[0].may_send, WAIT_S)
    await asyncio.sleep(0.5)
    made.source._loop.call_soon_threadsafe(flows[0].permitted, True, 1, 1)
    await until_on_loop(lambda: made.look().loaded, WAIT_S)
    moved = made.target.moved()[SECRET]
    began, ended, share = moved["pauses"][:3]
    assert 0.4 < began - ended <= moved["span_s"]
    assert share == pytest.approx(1 / LAYERS, abs=1e-6)
    assert moved["held_s"] == pytest.approx(began - ended, abs=0.2)


async def test_a_transfer_is_promoted_in_time_and_says_so(path: str) -> None:
    """The other one is of level 2 and has more time than this one, which begins below it."""
    async with sharing(path, "mfs", width=5 * 4096) as (daemon, other, made):
        async with sending(other, due_in_s=4000.0, size=20_000 * MB) as flow:
            await until_on_loop(lambda: daemon.status()["flows"][0]["rate"] > 100 * MB, WAIT_S)
            made.keep()
            made.load(due_in_s=6.0)
            await until_on_loop(lambda: made.look().loaded, WAIT_S)
            assert flow.level == 2
        moved = made.target.moved()[SECRET]
        assert (moved["flow"], moved["level"]) == ("scheduled", 2)
        assert moved["promotions"] >= 1
        assert 0.5 < moved["held_s"] < moved["seconds"] < 6.0


async def test_a_transfer_that_is_held_when_its_daemon_goes_away_is_sent(shared: Shared) -> None:
    daemon, other, made = shared
    async with sending(other):
        made.keep()
        made.load(due_in_s=25.0)
        await until_on_loop(lambda: len(daemon.status()["flows"]) == 2, WAIT_S)
        await daemon.close()
        await until_on_loop(lambda: made.look().sent and made.moved.loaded, WAIT_S)
    assert not made.moved.lost
    assert made.equal()
    assert made.source.figures()["unscheduled"] == 1


async def test_loads_that_are_held_keep_no_urgent_one_out(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are more of them than may move at a time."""
    monkeypatch.setattr(places, "MOST_FROM_PEER", 2)
    late = [str(number) * 32 for number in range(4)]
    daemon, other, made = shared
    async with sending(other, due_in_s=60.0):
        made.source.order(KvOrders(kept=[Kept(secret, f"p{secret[0]}", SENT) for secret in late]))
        for secret in late:
            offer, due = made.offer._replace(secret=secret), time.time() + 100.0
            made.target.order(KvOrders(loads=[KvLoad(f"d{secret[0]}", offer, 0, WANTED, due)]))
        await until_on_loop(lambda: len(daemon.status()["flows"]) == 5, 5.0)
        made.keep()
        made.load(due_in_s=0.5)
        await until_on_loop(lambda: made.look().loaded, 5.0)
        assert (made.moved.loaded, made.moved.lost) == ({"d"}, set())
    await until_on_loop(lambda: len(made.look().loaded) == 5, WAIT_S)
    assert not made.moved.lost


def load_as(made: Pair, name: str) -> None:
    """Another request's load of the same KV, as a gateway's next try brings it. It has time."""
    made.target.order(KvOrders(loads=[KvLoad(name, made.offer, 0, WANTED, time.time() + 100.0)]))


async def test_the_next_try_gets_the_kv_of_a_load_that_was_given_up_while_it_was_held(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if it asks a little before. That the receiver has gone is seen without a word to it."""

    async def silent(sending: object) -> None:
        pass

    monkeypatch.setattr(source._Sending, "_still", silent)
    daemon, other, made = shared
    async with sending(other, due_in_s=60.0):
        made.keep()
        load_as(made, "d")
        await until_on_loop(lambda: len(daemon.status()["flows"]) == 2, WAIT_S)
        first = {flow["id"] for flow in daemon.status()["flows"]}
        load_as(made, "again")
        await asyncio.sleep(0.3)  # time to ask
        made.target.cancel(["d"])
        await until_on_loop(lambda: {flow["id"] for flow in daemon.status()["flows"]} - first, 10.0)
        assert (made.look().loaded, made.moved.sent) == ({"d"}, set())
    await until_on_loop(lambda: made.look().sent and "again" in made.moved.loaded, WAIT_S)
    assert not made.moved.lost
    assert made.equal()


async def test_kv_that_is_being_sent_is_not_taken_from_its_receiver(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor from whoever asks after that one has failed."""
    monkeypatch.setattr(source, "BUSY_S", 0.05)
    daemon, other, made = shared
    async with sending(other, due_in_s=60.0):
        made.keep()
        load_as(made, "d")
        await until_on_loop(lambda: len(daemon.status()["flows"]) == 2, WAIT_S)
        load_as(made, "too soon")
        await until_on_loop(lambda: made.look().loaded, WAIT_S)
        assert (made.moved.loaded, made.moved.lost) == ({"too soon"}, set(WANTED))
        await asyncio.sleep(0.3)  # time to drop it
        made.target.cancel(["d"])
        await until_on_loop(lambda: len(daemon.status()["flows"]) == 1, WAIT_S)
        assert not made.look().sent, "it is kept"
        made.moved.lost.clear()
        load_as(made, "later")
    await until_on_loop(lambda: made.look().sent and "later" in made.moved.loaded, WAIT_S)
    assert not made.moved.lost
    assert made.equal()


@pytest.mark.parametrize("short_at", ["source", "target"])
async def test_short_memory_at_either_end_makes_a_transfer_urgent(shared: Shared, short_at: str) -> None:
    daemon, other, made = shared
    async with sending(other):
        made.keep(kv_usage=0.99 if short_at == "source" else 0.0)
        made.load(due_in_s=60.0, kv_usage=0.99 if short_at == "target" else 0.0)
        await until_on_loop(lambda: made.look().sent and made.moved.loaded, WAIT_S)
        await until_on_loop(lambda: len(daemon.status()["flows"]) < 2, WAIT_S)
        assert len(daemon.status()["flows"]) == 1, "the other one is still there"
    assert made.equal()


async def test_packets_of_both_ends_are_marked(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int | None, int]] = []

    def watched(writer: asyncio.StreamWriter, wire_class: int | None) -> None:
        as_class(writer, wire_class)
        seen.append((wire_class, writer.get_extra_info("socket").getsockopt(socket.IPPROTO_IP, socket.IP_TOS)))

    monkeypatch.setattr(source, "as_class", watched)
    monkeypatch.setattr(pull, "as_class", watched)
    async with sharing(path, "mfs") as (_, _, made):
        made.keep()
        made.load(due_in_s=2.0)
        await until_on_loop(lambda: made.look().sent and made.moved.loaded, WAIT_S)
    assert len(seen) >= 2
    assert all(wire_class is not None and tos == (CLASSES - 1 - wire_class) << 5 for wire_class, tos in seen)
    assert len({wire_class for wire_class, _ in seen}) * 2 <= len(seen), "each class at both ends"


async def test_little_of_a_scheduled_transfer_is_unsent_in_the_kernel_and_none_in_the_process_at_a_turn(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[int, int, int]] = []
    take_turn = source._Sending._turn

    async def watched(self: source._Sending) -> dict[str, int]:
        told = await take_turn(self)
        transport = self._writer.transport
        low = self._writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)
        found.append((low, transport.get_write_buffer_limits()[1], transport.get_write_buffer_size()))
        return told

    monkeypatch.setattr(source._Sending, "_turn", watched)
    async with sharing(path, "mfs") as (_, _, made):
        made.keep()
        made.load(due_in_s=2.0)
        await until_on_loop(lambda: made.look().sent and made.moved.loaded, WAIT_S)
    assert found == [(source.UNSENT_BYTES, 0, 0)] * LAYERS


# ---- a sender that dies, or is none ----------------------------------------------------------------------------------


@asynccontextmanager
async def sender_that(then: Serve, port: int) -> AsyncIterator[None]:
    """A program with the fleet's token in the sender's place."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await be_greeted(reader, writer, TOKEN, {address(HOST, port)})
            await read_frame(reader)
            await then(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(serve, HOST, port)
    yield
    server.close()


def layer_of(writer: asyncio.StreamWriter, layer: int, size: int, check: int | None = None) -> None:
    data = bytes(size)
    write_frame(writer, {"layer": layer, "bytes": size})
    write(writer, data + (zlib.crc32(data) if check is None else check).to_bytes(4, "big"))


def agree(writer: asyncio.StreamWriter) -> int:
    """What a right sender would say first. Bytes of a layer."""
    blocks = blocks_of(cache(1))
    write_frame(writer, {"blocks": len(WANTED), "layout": blocks.layout})
    return len(WANTED) * blocks.layer_bytes(0)


async def dies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    size = agree(writer)
    layer_of(writer, 0, size)
    write_frame(writer, {"layer": 1, "bytes": size})
    write(writer, bytes(size // 2))


async def damages(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    layer_of(writer, 0, agree(writer), check=1)
    await reader.read()


async def sends_other_sizes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    layer_of(writer, 0, agree(writer) + 1)
    await reader.read()


async def sends_other_layers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    layer_of(writer, LAYERS - 1, agree(writer))
    await reader.read()


async def has_another_version(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    write_frame(writer, {"blocks": len(WANTED), "layout": {**blocks_of(cache(1)).layout, "format": FORMAT + 1}})
    await reader.read()


async def says_too_much(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    write(writer, (1 << 30).to_bytes(4, "big"))
    await reader.read()


async def falls_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    agree(writer)
    await reader.read()


@pytest.mark.parametrize(
    ("then", "says"),
    [
        (dies, "closed the connection (cut)"),
        (damages, "came damaged (corrupt)"),
        (sends_other_sizes, "layer 0 was expected"),
        (sends_other_layers, "layer 0 was expected"),
        (has_another_version, "another layout (other_model)"),
        (says_too_much, "a frame of 1073741824 bytes"),
        (falls_silent, "no response in time (timeout)"),
    ],
)
async def test_kv_that_does_not_come_whole_is_computed(
    then: Serve, says: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull, "STALL_S", 0.5)
    with pair() as made, caplog.at_level(logging.WARNING):
        made.source.close()
        async with sender_that(then, made.offer.port):
            made.load()
            await until_on_loop(lambda: made.target.ended().lost == set(WANTED), WAIT_S)
        assert says in caplog.text


async def test_a_peer_that_is_silent_keeps_no_load_from_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "MOST_FROM_PEER", 2)
    silent = free_port()
    with pair() as made:
        async with sender_that(falls_silent, silent):
            for name in ("s1", "s2", "s3"):
                offer = made.offer._replace(port=silent)
                made.target.order(KvOrders(loads=[KvLoad(name, offer, 0, WANTED)]))
            made.keep()
            made.load()
            await until_on_loop(lambda: made.look().loaded, 5.0)
            assert (made.moved.loaded, made.moved.lost) == ({"d"}, set())
            made.target.cancel({"s1", "s2", "s3"})


async def test_a_load_whose_request_has_ended_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM takes its blocks back only when it hears that nothing is written there any more."""
    with pair() as made:
        made.source.close()
        async with sender_that(falls_silent, made.offer.port):
            made.load()
            await until_on_loop(lambda: "d" in made.target._pulls, WAIT_S)
            made.target.cancel({"d", "another"})
            await until_on_loop(lambda: made.look().loaded == {"d"}, WAIT_S)
            assert not made.moved.lost


def test_an_address_that_is_taken_ends_the_start() -> None:
    with pair() as made, pytest.raises(OSError, match="address already in use"):
        Transfers(made.source._settings, blocks_of(cache(1)))


def test_steps_that_have_ended_and_the_one_that_runs_count_as_computing() -> None:
    now = 0.0
    clock = StepClock(lambda: now)
    for at, tell, busy_s in (
        (1.0, clock.begun, 0.0), (3.0, clock.ended, 2.0), (4.0, clock.ended, 2.0), (6.0, clock.begun, 2.0),
    ):  # fmt: skip
        now = at
        tell()
        assert clock.busy_s() == busy_s
    now = 7.5
    assert clock.busy_s() == 3.5
