"""Orders of the coordinator of pruning, over a real Redis: transfers of pruned requests go after all others."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import orjson
import pytest

from controller.core.messages import PRUNING_CHANNEL
from controller.core.pruning import PruneReason, PruningOrders, orders_to_json
from tests.waiting import until_on_loop
from tests.workers.flowd.running import MB, connected, nothing, serving
from tests.workers.flowd.test_daemon import Process, Raw, submitted
from workers.flowd.daemon import FlowDaemon
from workers.flowd.report import exchange, keep_obeying
from workers.live import LiveState
from workers.pruning import VALID_S, publish_orders

pytestmark = pytest.mark.db

WHY = PruneReason("w0", 2.0, 1.0)
# With each policy the first of these two goes before the second, however late they are on a busy machine.
URGENT = submitted(id="urgent", requests=["r1"], size_bytes=300 * MB, due_in_s=50.0)
LATER = submitted(id="later", requests=["r2"], size_bytes=400 * MB, due_in_s=5000.0)


@asynccontextmanager
async def obeying(path: str, redis: LiveState, policy: str = "mfs") -> AsyncIterator[FlowDaemon]:
    """A daemon that listens for orders already."""
    async with serving(path, policy, lease_s=600.0) as daemon:
        assert await exchange(daemon, redis, "one")  # which tells it Redis' time
        task = asyncio.create_task(keep_obeying(daemon, redis))
        channel = PRUNING_CHANNEL.encode()
        await until_on_loop(lambda: listeners(redis, channel))
        try:
            yield daemon
        finally:
            task.cancel()


async def listeners(redis: LiveState, channel: bytes) -> int:
    return int((await redis._redis.pubsub_numsub(channel))[0][1])


async def ordered(redis: LiveState, *pruned: str, left_s: float = VALID_S, order: Sequence[str] = ()) -> int:
    """The coordinator's next orders, of which so much time is left. Returns their sequence."""
    made_at = await redis.server_time() - VALID_S + left_s
    orders = await redis.run(publish_orders(dict.fromkeys(pruned, WHY), made_at, 2, 1, ["a", "b"], order))
    return orders.sequence


async def said(redis: LiveState, sequence: int, *pruned: str, left_s: float = VALID_S) -> None:
    now = await redis.server_time()
    orders = PruningOrders(sequence, now, now + left_s, dict.fromkeys(pruned, WHY))
    await redis._redis.publish(PRUNING_CHANNEL, orjson.dumps(orders_to_json(orders)))


def going(daemon: FlowDaemon) -> list[str]:
    return [each["id"] for each in daemon.status()["flows"] if each["go"]]


def taken(daemon: FlowDaemon) -> dict[str, int]:
    found: dict[str, int] = daemon.status()["orders"]
    return found


@asynccontextmanager
async def both(path: str) -> AsyncIterator[Raw]:
    """A client with both transfers."""
    raw = await Raw.open(path)
    for each in (URGENT, LATER):
        assert (await raw.asked(**each))["event"] == "permit"
    yield raw
    raw.writer.close()


@pytest.mark.parametrize("policy", ["mfs", "earliest_deadline", "shortest_first"])
async def test_a_pruned_requests_transfer_goes_last_until_the_orders_expire(path, redis, policy):
    async with obeying(path, redis, policy) as daemon, both(path):
        await until_on_loop(lambda: going(daemon) == ["urgent"])
        await ordered(redis, "r1", left_s=1.5)
        await until_on_loop(lambda: going(daemon) == ["later"])
        assert [(each["id"], each["level"]) for each in daemon.status()["flows"]][1] == ("urgent", 8)
        await until_on_loop(lambda: going(daemon) == ["urgent"])
        assert taken(daemon) == {"taken": 1, "expired": 1}


async def test_fetches_that_are_equally_urgent_go_by_the_order_until_it_expires(path, redis):
    """Of two prefixes that prompts wait for."""
    async with obeying(path, redis) as daemon:
        raw = await Raw.open(path)
        for name, request in (("one", "r1"), ("two", "r2")):
            fetch = submitted(id=name, requests=[request], stage=1, size_bytes=300 * MB, unit=f"u{name}", batch=name)
            assert (await raw.asked(**fetch))["event"] == "permit"
        await until_on_loop(lambda: going(daemon) == ["one", "two"])
        await ordered(redis, "r3", left_s=1.5, order=["r2", "r1"])
        await until_on_loop(lambda: going(daemon) == ["two"])
        await until_on_loop(lambda: going(daemon) == ["one", "two"])
        raw.writer.close()


async def test_it_comes_back_when_the_next_orders_do_not_name_it(path, redis):
    async with obeying(path, redis) as daemon, both(path):
        await ordered(redis, "r1")
        await until_on_loop(lambda: going(daemon) == ["later"])
        await ordered(redis)
        await until_on_loop(lambda: going(daemon) == ["urgent"])
        assert taken(daemon) == {"taken": 2}


async def test_orders_that_are_late_or_out_of_sequence_change_nothing_and_are_counted(path, redis):
    async with obeying(path, redis) as daemon, both(path):
        await said(redis, 7, "r1")
        await until_on_loop(lambda: going(daemon) == ["later"])
        await said(redis, 7, "r2")
        await said(redis, 6, "r2")
        await said(redis, 8, "r2", left_s=-0.5)
        await redis._redis.publish(PRUNING_CHANNEL, b'{"sequence": 9}')
        await until_on_loop(lambda: taken(daemon) == {"taken": 1, "out_of_sequence": 2, "late": 1})
        assert daemon.report("here").get("orders") == taken(daemon)  # for the page Flows
        assert going(daemon) == ["later"]


async def test_no_orders_count_for_longer_than_the_coordinators_and_a_new_count_is_followed(path, redis):
    """Redis keeps nothing, so after its restart the coordinator's count begins at 1 again."""
    async with obeying(path, redis) as daemon, both(path):
        await said(redis, 7, "r1", left_s=1e6)
        await until_on_loop(lambda: going(daemon) == ["later"])
        await until_on_loop(lambda: taken(daemon).get("expired"))
        await until_on_loop(lambda: going(daemon) == ["urgent"])  # it is called back at a step that is due soon
        await said(redis, 1, "r1")
        await until_on_loop(lambda: going(daemon) == ["later"])
        assert taken(daemon) == {"taken": 2, "expired": 1}


async def test_another_policy_and_new_transfers_follow_the_orders_in_force(path, redis):
    async with obeying(path, redis, "shortest_first") as daemon:
        await ordered(redis, "r1")
        await until_on_loop(lambda: taken(daemon) == {"taken": 1})
        daemon.follow("mfs")
        async with both(path):
            await until_on_loop(lambda: going(daemon) == ["later"])
            await until_on_loop(lambda: going(daemon) == ["urgent"])
        assert taken(daemon) == {"taken": 1, "expired": 1}, "once, by the policy before"


async def test_of_what_several_requests_share_all_must_be_pruned_and_nobodys_never_is(path, redis):
    async with obeying(path, redis) as daemon:
        raw = await Raw.open(path)
        for name, requests in (("shared", ["r1", "r2"]), ("nobodys", [])):
            assert (await raw.asked(**URGENT | {"id": name, "requests": requests}))["event"] == "permit"
        before = {each["id"]: each["level"] for each in daemon.status()["flows"]}
        await ordered(redis, "r1")
        await until_on_loop(lambda: taken(daemon) == {"taken": 1})
        await asyncio.sleep(0.1)
        assert all(each["level"] <= before[each["id"]] < 8 for each in daemon.status()["flows"])


async def test_without_redis_transfers_go_on_and_orders_in_force_end(path):
    away = LiveState("redis://127.0.0.1:1/0")
    async with serving(path, lease_s=600.0) as daemon, connected(path) as client, both(path):
        task = asyncio.create_task(keep_obeying(daemon, away))
        daemon.obey(PruningOrders(1, 0.0, math.inf, {"r1": WHY}), 0.5)
        await until_on_loop(lambda: going(daemon) == ["later"])
        await until_on_loop(lambda: going(daemon) == ["urgent"])
        flow = client.submit(3, MB, "host", 0.05)
        await flow.turn(nothing)
        assert flow.scheduled
        assert not task.done()
        task.cancel()
        await away.close()


async def test_the_process_follows_orders(path, redis):
    with Process(path):
        await until_on_loop(lambda: listeners(redis, PRUNING_CHANNEL.encode()))
        async with asyncio.timeout(30.0), both(path) as raw:
            await ordered(redis, "r1")
            told = [await raw.hear() for _ in range(2)]
            assert {each["id"]: each["go"] for each in told} == {"urgent": False, "later": True}
