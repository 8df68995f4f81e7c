"""The queue over its topic: one picture a process, a window a browser, whole states only when they are needed."""

from __future__ import annotations

import asyncio
import json
import time
from types import SimpleNamespace

import pytest

from console.consumers import queue as module
from console.consumers.queue import QueueConsumer
from controller.core.messages import LIVE_QUEUE
from tests.console.consumers.test_base import frames, is_data
from tests.console.consumers.test_topics import tell
from tests.console.live.live_data import fleet, queue_changes, queue_row, queue_state


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(module, "ASK_EVERY_S", 0.0)


def state(*rows, **fields):
    return queue_state(*rows, **{"at": time.time(), **fields})


def changes(base, *put, **fields):
    return queue_changes(base, *put, **{"at": time.time(), **fields})


def has(*ids):
    return lambda frame: is_data(frame) and [row["id"] for row in frame["data"]["rows"]] == list(ids)


def row(ident, slack_s=1.0, **fields):
    return queue_row(ident, time.time() + slack_s, **fields)


async def opened(browser, *until):
    socket = browser(QueueConsumer)
    assert await socket.connect()
    await frames(socket, has(*until))
    return socket


async def test_a_browser_gets_the_rows_it_looks_at_and_no_others(browser, live_store):
    live_store.queues = [state(*(row(f"r{n:04}", n) for n in range(10_000)))]
    socket = browser(QueueConsumer)
    await socket.connect()
    first = (await frames(socket, lambda f: is_data(f) and f["data"]["rows"]))[-1]["data"]
    assert (first["total"], len(first["rows"])) == (10_000, 60)
    await socket.say(json.dumps({"type": "view", "offset": 7000, "limit": 30}))
    there = (await frames(socket, lambda f: is_data(f) and f["data"]["offset"] == 7000))[-1]
    assert [each["id"] for each in there["data"]["rows"]] == [f"r{n:04}" for n in range(7000, 7030)]
    assert len(json.dumps(there)) < 20_000
    assert live_store.watched[0] == LIVE_QUEUE


async def test_changes_reach_every_browser_and_only_the_first_asked_for_the_whole(browser, live_store, layer):
    live_store.queues = [state(row("a"))]
    sockets = [await opened(browser, "a") for _ in range(3)]
    assert live_store.asked == 1
    await tell(layer, LIVE_QUEUE, changes(1, row("b", 2.0), total=2))
    for socket in sockets:
        await frames(socket, has("a", "b"))
    assert live_store.asked == 1


async def test_a_lost_message_makes_it_ask_for_the_whole(browser, live_store, layer):
    live_store.queues = [state(row("a"))]
    socket = await opened(browser, "a")
    live_store.queues = [state(row("a"), row("b", 2.0), version=4)]
    await tell(layer, LIVE_QUEUE, changes(4, row("c", 3.0), total=3))
    await frames(socket, has("a", "b", "c"))
    assert live_store.asked == 2


async def test_a_gateway_that_dies_takes_its_rows_with_it(browser, live_store, layer, monkeypatch):
    monkeypatch.setattr(module, "GONE_AFTER_S", 0.2)
    monkeypatch.setattr("console.live.queue_mirror.GONE_AFTER_S", 0.4)
    live_store.queues = [state(row("a")), state(row("b", 2.0), gateway="gateway-2", feed="g")]
    socket = await opened(browser, "a", "b")
    live_store.queues = []

    async def alive():
        while True:
            await tell(layer, LIVE_QUEUE, changes(1, total=1))
            await asyncio.sleep(0.05)

    living = asyncio.create_task(alive())
    frame = (await frames(socket, has("a")))[-1]
    living.cancel()
    assert frame["data"]["gateways"] == 1


async def test_an_outage_of_redis_keeps_the_rows_and_says_that_they_are_old(browser, live_store, monkeypatch):
    skipped_s = 0.0
    clock, shared_now = time.monotonic, module.live.shared_now
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock() + skipped_s))
    monkeypatch.setattr(module.live, "shared_now", lambda: shared_now() + skipped_s)
    live_store.queues = [state(row("a"))]
    socket = await opened(browser, "a")
    live_store.away = True
    frame = (await frames(socket, lambda frame: frame["reason"] == "Redis is unavailable"))[-1]
    assert frame["stale"]
    skipped_s = 10 * module.GONE_AFTER_S
    live_store.away, reached_at = False, module.board()._reached_at
    async with asyncio.timeout(10):
        while module.board()._reached_at == reached_at:
            await asyncio.sleep(0.01)
    await socket.say('{"type": "refetch"}')
    frame = (await frames(socket, lambda frame: frame["type"] == "snapshot"))[-1]
    assert [each["id"] for each in frame["data"]["rows"]] == ["a"]


async def test_a_paused_view_stays_while_the_queue_moves_and_can_be_resumed(browser, live_store, layer):
    live_store.queues = [state(row("a"), row("b", 2.0))]
    socket = await opened(browser, "a", "b")
    await socket.say('{"type": "view", "held": true}')
    await frames(socket, lambda f: is_data(f) and f["data"]["held"])
    await tell(layer, LIVE_QUEUE, changes(1, row("new", 0.1), gone=("a",), total=2))
    frame = (await frames(socket, lambda f: is_data(f) and "left" in f["data"]["rows"][0]))[-1]
    assert [each["id"] for each in frame["data"]["rows"]] == ["a", "b"]
    await socket.say('{"type": "view"}')
    await frames(socket, has("new", "b"))


async def test_one_class_or_a_text_is_chosen_by_the_server(browser, live_store):
    live_store.queues = [state(row("a"), row("b", 2.0, slo_class="batch"))]
    socket = await opened(browser, "a", "b")
    await socket.say(json.dumps({"type": "view", "key": "acme/batch"}))
    frame = (await frames(socket, has("b")))[-1]["data"]
    assert (frame["matching"], frame["total"], len(frame["by_class"])) == (1, 2, 2)
    await socket.say(json.dumps({"type": "view", "text": "chat"}))
    await frames(socket, has("a"))


async def test_a_window_of_nonsense_ends_the_connection(browser, live_store):
    socket = browser(QueueConsumer)
    await socket.connect()
    await socket.say('{"type": "view", "limit": 100000}')
    assert await socket.closed() == 1003


async def test_the_mirror_is_emptied_when_the_last_browser_leaves(browser, live_store):
    live_store.queues = [state(row("a"))]
    first, second = await opened(browser, "a"), await opened(browser, "a")
    await first.leave()
    assert len(module.board().mirror) == 1
    await second.leave()
    assert len(module.board().mirror) == 0


async def test_it_says_whether_engines_take_what_comes_and_when_that_changes(browser, live_store, monkeypatch):
    monkeypatch.setattr(module, "ENGINES_EVERY_S", 0.0)
    live_store.queues = [state()]
    live_store.fleets = [fleet(at=time.time(), capacity={"demo": "up"}), fleet(at=1.0, capacity={"demo": "none"})]
    socket = browser(QueueConsumer)
    assert await socket.connect()
    await frames(socket, lambda f: is_data(f) and f["data"]["capacity"] == {"demo": "up"})
    live_store.fleets = [fleet(at=time.time(), capacity={"demo": "none"})]
    await frames(socket, lambda f: is_data(f) and f["data"]["capacity"] == {"demo": "none"})
