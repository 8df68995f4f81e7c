"""Live state over a real Redis: leases, what gateways publish, commands, and an absent server."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import pytest
from channels.layers import get_channel_layer
from django.conf import settings
from redis.exceptions import ConnectionError as RedisConnectionError

from controller.core.messages import LIVE_DECISIONS, LIVE_OVERVIEW, CommandAnswer, CommandMessage
from controller.models import Decision
from controller.wording.sentences import message_of
from workers import live
from workers.live import LiveState, LiveUnavailable, follow

pytestmark = pytest.mark.db


@pytest.fixture
async def pair(redis_server: Any) -> AsyncIterator[tuple[LiveState, LiveState]]:
    first, second = (LiveState(settings.REDIS_URL, name) for name in ("gw-a", "gw-b"))
    await first._redis.flushdb()
    yield first, second
    await first._redis.flushdb()  # its reports are not whole
    await first.close()
    await second.close()


def fleet_message(name: str) -> Any:
    return {"gateway": name, "at": time.time(), "seq": 1, "instances": [], "classes": []}


async def test_one_gateway_holds_a_lease_until_it_ends(pair: tuple[LiveState, LiveState]) -> None:
    first, second = pair
    assert await first.lease("telemetry", 0.2)
    assert not await second.lease("telemetry", 0.2)
    assert await first.lease("telemetry", 0.1)
    async with asyncio.timeout(5):
        while not await second.lease("telemetry", 5):
            await asyncio.sleep(0.01)
    assert not await first.lease("telemetry", 5)


async def test_telemetry_and_fleet_are_read_back(pair: tuple[LiveState, LiveState]) -> None:
    first, second = pair
    await first.publish_telemetry({"e1": {"observed_at": 5.0, "running": 3}}, 5)
    assert await second.read_telemetry(["e1", "e2"]) == {"e1": {"observed_at": 5.0, "running": 3}}
    await first.publish_fleet(fleet_message("gw-a"), 5)
    await second.publish_fleet(fleet_message("gw-b"), 5)
    assert [message["gateway"] for message in await first.aread_fleet()] == ["gw-a", "gw-b"]
    assert [message["gateway"] for message in await asyncio.to_thread(live.read_fleet)] == ["gw-a", "gw-b"]
    await second.leave()
    assert [message["gateway"] for message in await first.aread_fleet()] == ["gw-a"]


async def test_topics_are_watched_for_a_while(pair: tuple[LiveState, LiveState]) -> None:
    first, _ = pair
    assert await first.watched([LIVE_OVERVIEW, LIVE_DECISIONS]) == set()
    await first.amark_watched(LIVE_OVERVIEW)
    assert await first.watched([LIVE_OVERVIEW, LIVE_DECISIONS]) == {LIVE_OVERVIEW}


async def test_decisions_reach_a_channel_of_the_group(pair: tuple[LiveState, LiveState]) -> None:
    layer = get_channel_layer()
    channel = await layer.new_channel()
    await layer.group_add(LIVE_DECISIONS, channel)
    row = Decision(pk=7, at=datetime.now(UTC), kind="scale_out", actor="scaler", subject="e3", reason="load")
    await asyncio.to_thread(live.announce, row)
    heard = await asyncio.wait_for(layer.receive(channel), 5)
    assert heard["type"] == "live.message"
    assert (heard["message"]["topic"], heard["message"]["data"]) == (LIVE_DECISIONS, message_of(row))
    await layer.flush()


async def test_a_command_is_answered_by_each_gateway(pair: tuple[LiveState, LiveState]) -> None:
    versions: list[int] = []
    tasks = []
    for state in pair:
        await state.publish_fleet(fleet_message(state.gateway), 5)

        def answer(message: CommandMessage, state: LiveState = state) -> None:
            said = CommandAnswer(command=message["id"], gateway=state.gateway, applied=["r1"], gone=[], too_late=[])
            tasks.append(asyncio.get_running_loop().create_task(state.answer(said)))

        tasks.append(
            asyncio.get_running_loop().create_task(follow(state, answer, versions.append, lambda orders: None))
        )
    while (
        sum(
            count for _, count in await pair[0]._redis.pubsub_numsub("slackline:command:gw-a", "slackline:command:gw-b")
        )
        < 2
    ):
        await asyncio.sleep(0.01)
    await asyncio.to_thread(live.notify_config, 12)
    answers = await asyncio.to_thread(live.send_command, "op", "cancel", ["r1"])
    assert sorted(answer["gateway"] for answer in answers) == ["gw-a", "gw-b"]
    assert versions == [12, 12]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_an_absent_redis_is_said_soon() -> None:
    state = LiveState("redis://127.0.0.1:1/0", "gw")
    with pytest.raises(LiveUnavailable):
        await state.lease("telemetry", 1)
    with pytest.raises(LiveUnavailable):
        await state.watched([LIVE_OVERVIEW])
    await state.close()


async def test_a_hanging_redis_is_given_up_in_time() -> None:
    silent = await asyncio.start_server(lambda reader, writer: asyncio.sleep(30), "127.0.0.1", 0)
    state = LiveState(f"redis://127.0.0.1:{silent.sockets[0].getsockname()[1]}/0", "gw")
    started = time.monotonic()
    with pytest.raises(LiveUnavailable):
        await state.lease("telemetry", 1)
    assert time.monotonic() - started < 3 * live.CALL_S
    await state.close()
    silent.close()


def test_synchronous_calls_say_so_too(settings: Any) -> None:
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    errors: list[Exception] = []

    def call() -> None:
        try:
            live.read_fleet()
        except LiveUnavailable as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(5)
    assert len(errors) == 1
    assert isinstance(errors[0], ConnectionError)


@pytest.mark.parametrize("ends", [1, RedisConnectionError("gone")], ids=["with a result", "with an error"])
async def test_a_cancellation_that_the_client_loses_still_counts(ends):
    """asyncio.wait_for, in which the client sends, loses one that comes as it ends (before Python 3.12)."""
    state = LiveState("redis://127.0.0.1:1/0")
    begun = asyncio.Event()

    async def loses_it():
        begun.set()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60.0)
        if isinstance(ends, Exception):
            raise ends
        return ends

    task = asyncio.ensure_future(state._call(loses_it()))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()
