"""Hosts whose clocks differ by five seconds, and a clock that steps: nobody is stale and engines see one order."""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import aiohttp
import pytest
from django.conf import settings

from api.openai.gateway import Gateway, GatewayOptions
from api.openai.pruning_feed import PruningFeed
from api.openai.publisher import Publisher
from controller.core import events as ev
from controller.core.types import InstanceSpec
from controller.scale.observation import fresh
from tests.api.openai.gateways import TestBed, completion, snapshot
from tests.waiting import until_on_loop
from tests.workers.engine.client import complete, metric
from tests.workers.engine.process import EngineProcess
from workers import live
from workers.backends.fake import Script
from workers.pruning import read_reports
from workers.shared_clock import SharedClock

pytestmark = pytest.mark.db
BEHIND_S = 5.0


@contextmanager
def wall_clock(behind_s):
    """As on a host whose wall clock is behind by so much. Nobody sets its monotonic clock."""
    real = time.time
    with mock.patch("time.time", side_effect=lambda: real() - behind_s):
        yield


class Host:
    """A gateway on a host of its own, before a real Redis."""

    def __init__(self, name, behind_s=0.0, bed=None):
        self.behind_s = behind_s
        self.bed = bed or TestBed(snapshot(("e1",)))
        self.board = live.LiveState(settings.REDIS_URL, name)
        self.gateway = self.bed.gateway
        self.gateway.options = type(self.gateway.options)(name)
        self.gateway.monitor._board = self.board
        self.publisher = Publisher(self.gateway, self.board, None)

    async def tick(self):
        """What happens in one period."""
        with wall_clock(self.behind_s):
            self.publisher._published_at = self.publisher._clock_at = -100.0
            await self.publisher.tick()
            await self.gateway.monitor.round()
            await self.gateway.monitor.settle(1)

    def told(self):
        """By its dispatcher: what it adds to its clock for the ranks of engines."""
        self.gateway.runtime._pass()
        return self.gateway.scheduler.dispatcher._offset_s

    async def close(self):
        self.publisher.close()
        await self.board.leave()
        await self.board.close()


def bed_before(engine, session, up_s):
    """A gateway before this engine, on a host that has been up for so much longer than this one."""
    real = time.monotonic

    def monotonic():
        return real() + up_s

    instance = InstanceSpec("e1", "demo", url=engine.url, backend="reference")
    bed = TestBed(replace(snapshot(()), instances=(instance,)))
    with mock.patch("time.monotonic", new=monotonic):
        bed.gateway = Gateway(GatewayOptions("test"), session, bed.sink)
    bed.gateway.runtime.clock = bed.gateway.clock
    return bed


@pytest.fixture
async def hosts():
    """Two alone, the first with a wall clock that is five seconds behind; it also leads."""
    live._client(settings.REDIS_URL).flushdb()
    both = [Host("a", BEHIND_S), Host("b")]
    async with both[0].bed, both[1].bed:
        for _ in range(2):
            for host in both:
                await host.tick()
        yield both
        for host in both:
            await host.close()


async def test_both_gateways_count_each_other_and_share_the_fleet(hosts):
    first, second = hosts
    await first.tick()
    assert first.publisher._shares._told == second.publisher._shares._told == {"e1": 0.5}


async def test_telemetry_of_the_leader_is_not_stale_for_the_other(hosts):
    first, second = hosts
    assert (first.gateway.monitor.leading, second.gateway.monitor.leading) == (True, False)
    assert await second.gateway.monitor._read_leader() == {"e1"}
    load = second.gateway.scheduler.dispatcher._fleet.instances["e1"].load
    assert abs(second.gateway.clock() - load.observed_at) < 2.0


async def test_workers_and_pages_find_no_one_stale(hosts):
    assert {message["gateway"] for message in fresh(live.read_fleet(), time.time())} == {"a", "b"}
    for behind_s in (BEHIND_S, -BEHIND_S):
        with wall_clock(behind_s):  # of the worker's host
            assert {message["gateway"] for message in fresh(live.read_fleet(), time.time())} == {"a", "b"}
    assert len(fresh(await live.aread_fleet(), live.shared_now())) == 2


async def test_engines_are_told_ranks_of_one_clock(hosts):
    first, second = hosts
    assert first.told() == pytest.approx(second.told(), abs=0.5)
    assert first.told() + time.monotonic() == pytest.approx(time.time(), abs=0.5)  # Redis is on this host


async def test_a_wall_clock_that_steps_changes_nothing(hosts):
    first, _ = hosts
    before = first.told()
    first.behind_s = -BEHIND_S
    await first.tick()
    assert first.told() == pytest.approx(before, abs=0.5)
    assert {message["gateway"] for message in fresh(live.read_fleet(), time.time())} == {"a", "b"}


async def test_an_engines_one_slot_goes_to_the_more_urgent_request_whichever_host_it_came_to():
    """The first host's wall clock is five seconds behind and then steps to five ahead, and it was up for 100 days
    before the other. Its request comes first, and both wait at the engine for the only slot."""
    live._client(settings.REDIS_URL).flushdb()
    options = ("--model", "demo", "--profile", "constant:2ms", "--max-num-seqs", "1", "--max-model-len", "1000")
    with EngineProcess(*options) as engine:
        async with aiohttp.ClientSession(engine.url) as session:
            beds = [bed_before(engine, session, up_s) for up_s in (100 * 86_400.0, 0.0)]
            first, second = hosts = [Host("a", BEHIND_S, beds[0]), Host("b", 0.0, beds[1])]
            async with first.bed, second.bed:
                orders = []
                rounds = (BEHIND_S, (40.0, 36.0)), (BEHIND_S, (36.0, 40.0)), (-BEHIND_S, (36.0, 40.0))
                for behind_s, targets in rounds:
                    first.behind_s = behind_s
                    for host in (*hosts, *hosts):
                        await host.tick()
                    orders.append(await served(session, hosts, targets))
                for host in hosts:
                    await host.close()
    assert orders == [["b", "a"], ["a", "b"], ["a", "b"]]


async def test_queues_are_reported_on_one_clock_whichever_host_they_wait_at(hosts):
    """What the coordinator of pruning reads from Redis says which of two gateways' requests is due first. Their one
    instance says nothing, and has one slot."""
    due = {}
    for host, ttft_s in zip(hosts, (40.0, 36.0), strict=True):
        one_slot = replace(snapshot(("e1",)).instances[0], max_num_seqs=1)
        host.gateway.configure(replace(snapshot(()), version=2, instances=(one_slot,), pruning=True))
        host.bed.backend("e1", Script(hang_after=0))
        host.clients = [host.bed.send(completion(target_ttft=ttft_s, waiting_time=60)) for _ in range(2)]
        await until_on_loop(lambda bed=host.bed: len(bed.gateway.scheduler.queue()) == 1)
        with wall_clock(host.behind_s):
            await PruningFeed(host.gateway, host.board).tick()
        due[host.gateway.options.name] = time.time() + ttft_s
    reports, now = await hosts[1].board.run(read_reports())
    told = {report.gateway: report.queues[0].waiting[0].due for report in reports}
    assert told == pytest.approx(due, abs=1.0)
    assert {report.gateway: report.at for report in reports} == pytest.approx({"a": now, "b": now}, abs=1.0)
    for client in (client for host in hosts for client in host.clients):
        await client.hang_up()


async def served(session, hosts, targets):
    """Names of hosts in the order in which their requests ended. While both wait, another one has the slot."""
    running = asyncio.create_task(complete(session, model="demo", max_tokens=900, ignore_eos=True))

    async def has(state, count):
        return await metric(session, f"num_requests_{state}") == count

    await until_on_loop(lambda: has("running", 1))
    ended = []
    for count, (host, ttft_s) in enumerate(zip(hosts, targets, strict=True), 1):
        client = host.bed.send(completion(target_ttft=ttft_s, waiting_time=60))
        client.task.add_done_callback(lambda _, name=host.gateway.options.name: ended.append(name))
        await until_on_loop(lambda count=count: has("waiting", count))
    running.cancel()
    await until_on_loop(lambda: len(ended) == len(hosts))
    return ended


async def test_all_follow_redis_own_clock_when_that_steps(hosts):
    first, second = hosts
    for host in hosts:
        real = host.board.server_time
        host.board.server_time = lambda real=real: _later(real)
        await host.tick()
    assert first.told() == pytest.approx(second.told(), abs=0.5)
    assert first.told() + time.monotonic() == pytest.approx(time.time() + BEHIND_S, abs=0.5)


async def _later(real):
    return await real() + BEHIND_S


async def test_a_command_from_a_console_behind_is_not_too_late(hosts):
    first, _ = hosts
    with wall_clock(BEHIND_S):
        heard = []
        with mock.patch.object(
            live, "_send_and_wait", lambda _client, _gateways, message, _wait_s: heard.append(message)
        ):
            live.send_command("ann", "cancel", ["r1"])
    (message,) = heard
    assert 4.0 < message["expires_at"] - first.gateway.shared.now() < 6.0


async def test_without_redis_it_is_the_hosts_clock_and_later_goes_on_from_the_last_reading(monkeypatch):
    async with TestBed(snapshot(("e1",))) as bed:
        board = live.LiveState("redis://127.0.0.1:1/0", "lonely")
        publisher = Publisher(bed.gateway, board, None)
        await publisher.read_clock()
        bed.gateway.runtime._pass()
        dispatcher = bed.gateway.scheduler.dispatcher
        assert dispatcher._offset_s + time.monotonic() == pytest.approx(time.time(), abs=0.1)
        bed.gateway.shared.heard(time.time() + 60, time.monotonic(), time.monotonic())
        await publisher.read_clock()
        bed.gateway.runtime._pass()
        assert dispatcher._offset_s + time.monotonic() == pytest.approx(time.time() + 60, abs=0.1)
        publisher.close()
        await board.close()


class Wound:
    def __init__(self):
        self.at = 100.0

    def __call__(self):
        return self.at


def test_half_the_round_trip_is_added_and_what_it_explains_is_no_news():
    clock = SharedClock(Wound())
    assert clock.now() == pytest.approx(time.time(), abs=0.5)
    clock.heard(1000.0, 99.0, 100.0)
    assert clock.now() == 1000.5
    clock.heard(1000.2, 99.0, 100.0)  # 1000.7, give or take half a second
    assert clock.now() == 1000.5
    clock.heard(1003.0, 99.0, 100.0)
    assert clock.now() == 1003.5


async def test_a_small_change_is_not_told_again():
    async with TestBed(snapshot(("e1",))) as bed:
        told = []
        bed.gateway.runtime.tell = told.append
        for offset_s in (500.0, 500.04, 500.06, 506.0):
            bed.gateway.shared._offset = offset_s
            bed.gateway.tell_clock()
        assert told == [ev.ClockOffset(500.0), ev.ClockOffset(500.06), ev.ClockOffset(506.0)]
