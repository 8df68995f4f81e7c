"""How much of their KV the coordinator of pruning counts: from a daemon's transfers, through Redis, to its orders."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
from django.conf import settings

from controller.core.pruning import KvPort, ModelQueue, OpenKv, OutgoingKv, PrefillUnit, QueueReport
from controller.flow.coordinator import Coordinator, CoordinatorConfig
from tests.waiting import until_on_loop
from tests.workers.flowd.running import MB, serving
from tests.workers.flowd.test_daemon import Raw, submitted
from tests.workers.flowd.test_orders import going, obeying
from workers import live
from workers.flowd import report as flowd_report
from workers.flowd.daemon import FlowDaemon
from workers.flowd.report import exchange, keep_reporting
from workers.flowd.settings import FlowdSettings
from workers.live import LiveState
from workers.pruning import publish_report, read_open_kv
from workers.tasks import pruning

pytestmark = pytest.mark.db


async def open_kv() -> Mapping[str, OpenKv] | None:
    return await asyncio.to_thread(lambda: live.run(read_open_kv()))


async def test_of_each_request_what_is_left_of_its_open_kv_transfers(path, redis):
    async with serving(path, "mfs", lease_s=600.0) as daemon:
        raw = await Raw.open(path)
        for name, request, stage in (("one", "r1", 3), ("two", "r1", 3), ("prefix", "r2", 1), ("weights", "", 4)):
            fetched = {"unit": "u", "batch": "b"} if stage == 1 else {}
            requests = [request] if request else []
            wanted = submitted(id=name, requests=requests, stage=stage, size_bytes=400 * MB, **fetched)
            answer = await raw.asked(**wanted)
            assert answer["event"] == "permit", answer
        raw.say(op="progress", id="one", left=100 * MB)
        await until_on_loop(lambda: any(each["left_bytes"] == 100 * MB for each in daemon.report("one")["flows"]))
        await exchange(daemon, redis, "one")
        assert await open_kv() == {"r1": OpenKv("one", pytest.approx(5 / 8), "host", 800.0 * MB)}
        raw.say(op="completion", id="one")
        raw.say(op="completion", id="two")
        await until_on_loop(lambda: not daemon.sends_kv)
        await exchange(daemon, redis, "one")
        assert await open_kv() == {}
        raw.writer.close()


async def test_the_bandwidth_of_the_receiving_port_is_what_the_daemon_there_was_told(path, redis):
    """Whatever its policy is. An address that two hosts have names neither."""

    async def received_by(*hosts: str) -> float:
        for host in hosts:
            settings = FlowdSettings("off", 25.0 * MB, "", host=host, receives_at=("host", "10.0.0.7"))
            await exchange(FlowDaemon(settings), redis, host)
        return (await open_kv() or {})["r1"].receives

    async with serving(path, "mfs", lease_s=600.0) as daemon:
        raw = await Raw.open(path)
        assert (await raw.asked(**submitted(requests=["r1"])))["event"] == "permit"
        await exchange(daemon, redis, "one")
        assert await received_by() == 0.0
        assert await received_by("two") == 25.0 * MB
        assert await received_by("two", "three") == 0.0
        raw.writer.close()


async def test_daemons_that_order_nothing_or_are_silent_say_nothing(path, redis, monkeypatch):
    assert await open_kv() is None
    async with serving(path, "off") as daemon:
        await exchange(daemon, redis, "one")
        assert await open_kv() is None
    async with serving(path, "mfs") as daemon:
        await exchange(daemon, redis, "one")
        assert await open_kv() == {}
        monkeypatch.setattr("workers.pruning.FRESH_S", 0.0)
        assert await open_kv() is None


async def test_a_daemon_reports_more_often_while_it_sends_kv(path, redis, monkeypatch):
    monkeypatch.setattr(flowd_report, "PERIOD_S", 0.2)
    monkeypatch.setattr(flowd_report, "SENDING_S", 0.01)
    reports: list[bool] = []
    async with serving(path, "mfs", lease_s=600.0) as daemon:
        made = daemon.report
        monkeypatch.setattr(daemon, "report", lambda host: (reports.append(daemon.sends_kv), made(host))[1])
        task = asyncio.create_task(keep_reporting(daemon, LiveState(settings.REDIS_URL), "one", away=False))
        raw = await Raw.open(path)
        assert (await raw.asked(**submitted(size_bytes=400 * MB)))["event"] == "permit"
        await until_on_loop(lambda: reports.count(True) > 20)
        assert reports.count(False) <= 1
        task.cancel()
        raw.writer.close()


async def test_of_two_transfers_that_the_link_cannot_carry_in_time_one_is_pruned(path, redis, monkeypatch):
    """Each needs 4 s of the port within the next 5. The daemon sends the heavier one's KV last; when nearly all of it
    has gone, orders do not name it any more."""
    monkeypatch.setattr(pruning, "_untold", pruning.Untold())
    now = await redis.server_time()
    board = LiveState(settings.REDIS_URL, "gw")
    await board.publish_fleet({"gateway": "gw", "at": now, "seq": 1, "instances": [], "classes": []}, 60.0)
    await board.close()

    def reported() -> QueueReport:
        rows = [OutgoingKv(name, now + due_s, tokens) for name, due_s, tokens in (("r1", 5.5, 4000), ("r2", 5.0, 4100))]
        unit = PrefillUnit("p", 1.0, 0.0, port=KvPort(0.001, 0.0, rows))
        return QueueReport("gw", now, [ModelQueue("m", [], [unit])])

    async def decided() -> set[str]:
        await redis.run(publish_report(reported()))
        coordinator = Coordinator(CoordinatorConfig(0.5))
        return set((await asyncio.to_thread(pruning.decide, coordinator)).scavengers)

    async with obeying(path, redis) as daemon:
        raw = await Raw.open(path)
        for name in ("r1", "r2"):
            wanted = submitted(id=name, requests=[name], size_bytes=400 * MB, due_in_s=50.0)
            assert (await raw.asked(**wanted))["event"] == "permit"
        assert await decided() == set(), "the daemon has not reported them yet"
        await exchange(daemon, redis, "one")
        assert await decided() == {"r2"}
        await until_on_loop(lambda: going(daemon) == ["r1"])
        raw.say(op="progress", id="r2", left=40 * MB)
        await until_on_loop(lambda: any(each["left_bytes"] == 40 * MB for each in daemon.report("one")["flows"]))
        await exchange(daemon, redis, "one")
        assert await decided() == set(), "nearly all of its KV has gone"
        assert (pruning._untold.returned, pruning._untold.left) == ({"r2"}, set())
        raw.writer.close()
