"""The stored flow policy, and the reports that the console reads, over a real Redis."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest
from django.conf import settings

from controller.models import FlowSettings
from controller.services.slo.flow_settings import flow_settings_create, flow_settings_update
from tests.factories import ACTOR
from tests.waiting import until_on_loop
from tests.workers.flowd.running import MB, connected, nothing, sending, serving, turns
from tests.workers.flowd.test_daemon import Raw, submitted
from workers import live
from workers.flowd.client import SCHEDULED
from workers.flowd.report import ENDED_SHOWN, exchange, keep_reporting
from workers.live import LiveState
from workers.notices import announce_config, publish_flow_policy

pytestmark = pytest.mark.db


async def test_while_it_is_off_nothing_is_submitted(path):
    async with serving(path, "off"), connected(path) as client:
        await until_on_loop(lambda: client.off)
        raw = await Raw.open(path)
        assert (await raw.asked(**submitted()))["event"] == "off", "who had not heard of it"
        late = client.submit(3, MB, "host", 1.0)
        await late.turn(nothing)
        assert (late.reason, late.level) == ("off", 0)
        late.end()


async def test_a_change_takes_effect_without_a_restart_and_flows_end_as_they_began(path):
    async with serving(path, "shortest_first") as daemon, connected(path) as client, sending(client) as first:
        held = client.submit(3, 20_000 * MB, "host", 1.0)  # longer than the one that sends
        waiting = asyncio.ensure_future(held.turn(nothing))
        await until_on_loop(lambda: held.level)
        daemon.follow("mfs")
        assert daemon.report("here")["ending"] == 2
        new = client.submit(3, MB, "host", 1.0)
        await new.turn(nothing)
        assert new.reason == SCHEDULED
        assert not waiting.done(), "it waits for the one before it still"
        new.end()
        daemon.follow("off")
        await until_on_loop(lambda: client.off)
        assert not waiting.done()
        assert [each["go"] for each in daemon.status()["flows"]] == [True, False]
        first.end()
        await waiting
        assert held.reason == SCHEDULED
        held.end()
        await until_on_loop(lambda: daemon.report("here")["open"] == 0)
        daemon.follow("earliest_deadline")
        await until_on_loop(lambda: not client.off)


async def test_a_policy_of_a_newer_release_changes_nothing(path, caplog):
    async with serving(path, "mfs") as daemon:
        with caplog.at_level(logging.WARNING, "workers.flowd.daemon"):
            daemon.follow("magic")
        assert daemon.status()["policy"] == "mfs"
        assert "magic" in caplog.text


async def test_the_stored_policy_decides_once_it_is_there(path, redis):
    async with serving(path, "mfs") as daemon:
        assert await exchange(daemon, redis, "one")
        assert daemon.status()["policy"] == "mfs", "nothing is stored"
        await asyncio.to_thread(live.publish_flow_policy, "fair_sharing")
        assert await exchange(daemon, redis, "one")
        assert daemon.status()["policy"] == "fair_sharing"
        await asyncio.to_thread(live.publish_flow_policy, None)
        assert await exchange(daemon, redis, "one")
        assert daemon.status()["policy"] == "fair_sharing", "as it was last"


@pytest.mark.usefixtures("db", "redis_server")
def test_a_change_is_published_at_once_and_again_by_a_job(django_capture_on_commit_callbacks):
    published = live._client(settings.REDIS_URL)
    with django_capture_on_commit_callbacks(execute=True):
        flow_settings_create(actor=ACTOR, flow_policy="mfs")
        announce_config()
    assert published.get("slackline:flow-policy") == b"mfs"
    with django_capture_on_commit_callbacks(execute=True):
        flow_settings_update(actor=ACTOR, version=1, changes={"flow_policy": "off"})
    publish_flow_policy()
    assert published.get("slackline:flow-policy") == b"off"
    FlowSettings.objects.all().delete()
    publish_flow_policy()
    assert published.get("slackline:flow-policy") is None


async def test_a_report_has_the_load_of_ports_and_the_levels_of_flows(path, redis):
    async with serving(path, "mfs") as daemon, connected(path) as client, sending(client, due_in_s=100_000.0):
        raw = await Raw.open(path)
        urgent = submitted(id="u", due_in_s=8.0, size_bytes=500 * MB, requests=["req-1"])
        assert (await raw.asked(**urgent))["event"] == "permit"
        await exchange(daemon, redis, "one")
        (found,) = await asyncio.to_thread(live.read_host_flows)
        assert (found["host"], found["policy"], found["open"]) == ("one", "mfs", 2)
        assert abs(found["at"] - time.time()) < 5.0
        out, memory = found["ports"]
        assert (out["port"], out["flows"], out["held"]) == ("out", 2, 1)
        assert {each["level"]: (each["flows"], each["held"]) for each in out["levels"]}[1] == (1, 0)
        assert sum(each["flows"] for each in out["levels"]) == 2
        assert (memory["port"], memory["flows"]) == ("memory", 0)
        (flow,) = [each for each in found["flows"] if each["request"] == "req-1"]
        assert (flow["go"], flow["end"], flow["to"], flow["levels"][-1][1]) == (True, "", "host", 1)
        raw.say(op="completion", id="u")
        await turns()
        await until_on_loop(lambda: len(daemon.status()["flows"]) == 1)
        ended = [each for each in daemon.report("one")["flows"] if each["end"]]
        assert [(each["request"], each["end"]) for each in ended] == [("req-1", "ended")]


async def test_a_promotion_is_in_the_history_with_its_time(path):
    async with serving(path, "mfs") as daemon, connected(path) as client, sending(client, due_in_s=200.0):
        rising = client.submit(3, 20 * MB, "host", 2.0)
        waiting = asyncio.ensure_future(rising.turn(nothing))
        await until_on_loop(lambda: rising.promotions > 0)
        (found,) = [each for each in daemon.report("one")["flows"] if each["id"] == rising.id]
        levels = [level for _, level in found["levels"]]
        assert levels == sorted(levels, reverse=True)
        assert len(levels) > 1
        assert found["held_s"] > 0.0
        assert found["levels"][-1][0] > found["levels"][0][0]
        rising.end()
        waiting.cancel()


async def test_only_the_newest_that_ended_are_kept(path):
    async with serving(path, "mfs") as daemon:
        raw = await Raw.open(path)
        for number in range(ENDED_SHOWN + 5):
            raw.say(**submitted(id=f"f{number}"))
            raw.say(op="completion", id=f"f{number}")
        await until_on_loop(
            lambda: daemon.report("one")["flows"][:1] and daemon.report("one")["flows"][0]["id"] == "f204"
        )
        assert len(daemon.report("one")["flows"]) == ENDED_SHOWN


async def test_without_redis_it_goes_on_and_says_so_once(path, caplog, monkeypatch):
    monkeypatch.setattr("workers.flowd.report.PERIOD_S", 0.01)
    async with serving(path, "mfs") as daemon, connected(path) as client:
        with caplog.at_level(logging.WARNING, "workers.flowd.report"):
            task = asyncio.ensure_future(keep_reporting(daemon, LiveState("redis://127.0.0.1:1/0"), "one", away=False))
            await until_on_loop(lambda: "nothing is reported" in caplog.text)
            await asyncio.sleep(0.1)
            flow = client.submit(3, MB, "host", 1.0)
            await flow.turn(nothing)
            assert flow.scheduled
            task.cancel()
        assert len([each for each in caplog.records if each.name == "workers.flowd.report"]) == 1
