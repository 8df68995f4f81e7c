"""The coordinator of pruning through real Redis: two gateways report, the job decides, both gateways enforce.

One instance with one slot serves both. Each gateway alone could keep its requests in time; together they can keep two.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import orjson
import pytest
from asgiref.sync import sync_to_async
from django.conf import settings
from django.db import connections

from api.openai import status
from api.openai.pruning_feed import PruningFeed
from console.views.traffic.pruning import pruning_context
from controller.core import events as ev
from controller.core.messages import PRUNING_CHANNEL
from controller.core.pruning import PruneReason, PruningOrders, orders_to_json, report_from_json
from controller.core.snapshot import ClassConfig
from controller.core.types import InstanceSpec, LatencyCoefficients
from controller.flow.coordinator import Coordinator, CoordinatorConfig
from controller.models import Decision, FlowSettings
from controller.selectors.snapshot import gateway_snapshot
from controller.services.actors import SYSTEM
from controller.services.slo.flow_settings import flow_settings_create
from controller.wording.sentences import message_of
from tests.api.openai.gateways import TestBed, completion, snapshot
from tests.waiting import until_on_loop
from workers import live
from workers.backends.fake import Script
from workers.live import LiveState, follow
from workers.pruning import read_orders, read_reports
from workers.tasks import pruning
from workers.tasks.heartbeat import heartbeat_send
from workers.tasks.names import PRUNING_PROCESS

pytestmark = [pytest.mark.db, pytest.mark.django_db(transaction=True)]

SLOW = LatencyCoefficients(0.01, 3e-3, 0.0, 0.02, 0.0, 0.001)  # a prompt of 800 tokens takes 2.4 s
LONG = [1] * 800
CHAT = ClassConfig("chat", None, 23.0, 0.1, None, 60.0, 0.95, 1.0)


@pytest.fixture(autouse=True)
def batch(monkeypatch, redis_server):
    """The job's memory, empty; and an empty Redis."""
    live._client(settings.REDIS_URL).flushdb()
    made = pruning.Untold()
    monkeypatch.setattr(pruning, "_untold", made)
    return made


@pytest.fixture(autouse=True)
async def closed(batch):
    """Connections of the thread in which the job ran."""
    yield
    await sync_to_async(connections.close_all)()


@asynccontextmanager
async def gateway(name, *, on=True, requests=3, gateways=1):
    """A gateway that reports and listens. One request is in its slot of the instance, of which each of `gateways` has
    one, and the others wait."""
    engine = InstanceSpec("e1", "demo", backend="fake", latency=SLOW, max_num_seqs=gateways)
    shared = snapshot(classes=(CHAT,))
    async with AsyncExitStack() as stack:
        bed = await stack.enter_async_context(TestBed(replace(shared, instances=(engine,), pruning=on), name=name))
        bed.every(Script(hang_after=0))
        board = LiveState(settings.REDIS_URL, name)
        stack.push_async_callback(board.close)
        await board.publish_fleet({"gateway": name, "at": time.time(), "seq": 1, "instances": [], "classes": []}, 60.0)
        bed.gateway.shared.heard(await board.server_time(), bed.gateway.clock(), bed.gateway.clock())
        bed.gateway.runtime.push(ev.SharesChanged("e1", 1 / gateways))
        instances = bed.gateway.scheduler.dispatcher._fleet.instances
        await until_on_loop(lambda: instances["e1"].slots == 1)
        bed.feed = PruningFeed(bed.gateway, board)
        tasks = [
            asyncio.ensure_future(follow(board, lambda command: None, lambda version: None, bed.feed.enforce)),
            asyncio.ensure_future(bed.feed.run()),
        ]
        stack.callback(lambda: [task.cancel() for task in tasks])
        bed.clients = [bed.send(completion(prompt=LONG)) for _ in range(requests)]
        stack.push_async_callback(lambda: asyncio.gather(*(client.hang_up() for client in bed.clients)))
        await until_on_loop(lambda: len(bed.gateway.scheduler.dispatcher.queue().ids()) == requests - 1)
        yield bed


def waiting(bed):
    queue = bed.gateway.scheduler.dispatcher.queue()
    return [queue.row(name) for name in queue.ids()]


def pruned(*beds):
    return [row["id"] for bed in beds for row in waiting(bed) if row["hopeless"]]


def decide(budget=0.5):
    return pruning.decide(Coordinator(CoordinatorConfig(drop_budget=budget)))


def sequence():
    orders = live.run(read_orders())
    return None if orders is None else orders.sequence


def reported_waiting():
    return sum(len(queue.waiting) for report in live.run(read_reports())[0] for queue in report.queues)


def sent_by(bed):
    """How many prompts of 2.4 s its last report says are at the instance; None if it has reported nothing."""
    reports = (each for each in live.run(read_reports())[0] if each.gateway == bed.gateway.options.name)
    return next((round(unit.backlog_s / 2.4) for each in reports for unit in each.queues[0].units), None)


def reported(*beds):
    """Whether what waits at these was reported."""
    names = {report.gateway for report in live.run(read_reports())[0] if report.waits}
    return names >= {bed.gateway.options.name for bed in beds}


async def test_what_two_gateways_cannot_serve_in_time_is_pruned_and_comes_back():
    async with gateway("gw-a") as one, gateway("gw-b") as two:
        await until_on_loop(lambda: reported(one, two))
        found = await sync_to_async(decide)()
        assert len(found.scavengers) == 2
        await until_on_loop(lambda: sorted(pruned(one, two)) == sorted(found.scavengers))
        assert len(waiting(one)) + len(waiting(two)) == 4  # nobody was refused
        at_one, at_two = set(pruned(one)), set(pruned(two))
        for client in two.clients[1:]:
            await client.hang_up()
        await until_on_loop(lambda: not reported(two))
        await sync_to_async(decide)()
        await until_on_loop(lambda: pruned(one, two) == [])
        assert (pruning._untold.returned, pruning._untold.left) == (at_one, at_two)


async def test_late_orders_and_orders_out_of_sequence_show_in_metrics_and_on_the_page():
    redis = live._client(settings.REDIS_URL)

    def send(sequence, expires_in_s):
        now = time.time()
        sent = PruningOrders(sequence, now, now + expires_in_s, {}, 4, 1, ["gw-a"])
        redis.publish(PRUNING_CHANNEL, orjson.dumps(orders_to_json(sent)))

    stored = await sync_to_async(flow_settings_create)(actor=SYSTEM, drop_budget=0.5)
    await sync_to_async(heartbeat_send)(PRUNING_PROCESS)
    async with gateway("gw-a") as one:
        await until_on_loop(lambda: redis.pubsub_numsub(PRUNING_CHANNEL)[0][1] == 1)
        taken = one.gateway.scheduler.dispatcher.orders.taken
        for sequence, expires_in_s in ((7, -1.0), (7, 60.0), (7, 60.0), (3, 60.0)):
            send(sequence, expires_in_s)
        await until_on_loop(lambda: taken["out_of_sequence"] == 2)
        one.gateway.instruments.watch(lambda: status.gauges(one.gateway))  # as the service does
        page = status.metrics(one.gateway).decode()
        for outcome, count in (("taken", 1), ("late", 1), ("out_of_sequence", 2)):
            assert f'slackline_pruning_orders_total{{outcome="{outcome}"}} {count}.0\n' in page
        await one.feed._board.publish_fleet(status.fleet_message(one.gateway, 1, []), 60.0)
        shown = await sync_to_async(pruning_context)(stored)
    assert shown["ignored"] == [{"gateway": "gw-a", "late": 1, "out_of_sequence": 2}]


async def test_each_request_says_why_it_was_pruned():
    async with gateway("gw-a") as one, gateway("gw-b") as two:
        await until_on_loop(lambda: reported(one, two))
        found = await sync_to_async(decide)()
        await until_on_loop(lambda: len(pruned(one, two)) == 2)
        name, reason = next(iter(found.scavengers.items()))
        (in_flight,) = [
            bed.gateway.runtime.requests[name] for bed in (one, two) if name in bed.gateway.runtime.requests
        ]
        (step,) = [step for step in in_flight.decisions if step["kind"] == "prune"]
        assert (step["reason"], step["figures"]["instance"]) == ("others_in_time", "e1")
        assert step["figures"]["behind_s"] == pytest.approx(reason.behind_s, abs=0.01)


async def test_what_a_gateway_has_sent_counts_though_nothing_waits_there():
    """Three gateways share an instance. At two of them a request waits, behind one that is computed."""
    async with gateway("gw-a", requests=2, gateways=3) as one, gateway("gw-b", requests=2, gateways=3) as two:
        await until_on_loop(lambda: reported(one, two))
        assert (await sync_to_async(decide)(1.0)).scavengers == {}
        async with gateway("gw-c", requests=1, gateways=3) as third:
            await until_on_loop(lambda: sent_by(third) == 1, within_s=10.0)
            found = await sync_to_async(decide)(1.0)
            assert (len(found.scavengers), found.gateways) == (1, ["gw-a", "gw-b", "gw-c"])


async def test_requests_of_one_gateway_are_left_to_it():
    async with gateway("gw-a") as one:
        await until_on_loop(lambda: reported(one))
        assert (await sync_to_async(decide)()).scavengers == {}
        assert sequence() is None


async def test_a_gateway_without_a_drop_budget_reports_nothing():
    async with gateway("gw-a", on=False) as one, gateway("gw-b") as two:
        await until_on_loop(lambda: reported(two))
        await one.feed.tick()
        assert not reported(one)


async def test_orders_of_a_coordinator_that_stopped_end_by_themselves(monkeypatch):
    monkeypatch.setattr("workers.pruning.VALID_S", 0.5)
    async with gateway("gw-a") as one, gateway("gw-b") as two:
        await until_on_loop(lambda: reported(one, two))
        await sync_to_async(decide)()
        await until_on_loop(lambda: len(pruned(one, two)) == 2)
        await until_on_loop(lambda: pruned(one, two) == [])
        await until_on_loop(lambda: sequence() is None)
        assert len(waiting(one)) + len(waiting(two)) == 4


async def test_a_restarted_coordinator_counts_on(monkeypatch):
    async with gateway("gw-a") as one, gateway("gw-b") as two:
        await until_on_loop(lambda: reported(one, two))
        await sync_to_async(decide)()
        await until_on_loop(lambda: len(pruned(one, two)) == 2)
        monkeypatch.setattr(pruning, "_untold", pruning.Untold())
        await two.clients[2].hang_up()
        await until_on_loop(lambda: reported_waiting() == 3)
        await sync_to_async(decide)()  # without one, the other two are in time
        await until_on_loop(lambda: len(pruned(one, two)) == 1)
        assert sequence() == 2


UNIT = ["e1", 1.0, 0.0, 0.0, 0]
WAITS = ["req-1", 9e9, 0.8, 800, 10.0, False, 1.0]
BAD_REPORTS = [
    ["gw", "late", []],
    [7, 9e9, []],
    ["gw", 9e9, [[7, [], []]]],
    ["gw", 9e9, [["demo", [WAITS], [["e1", -1.0, 0.0, 0.0, 0]]]]],
    ["gw", 9e9, [["demo", [WAITS], [["e1", "fast", 0.0, 0.0, 0]]]]],
    ["gw", 9e9, [["demo", [[*WAITS[:2], -1.0, *WAITS[3:]]], [UNIT]]]],
    ["gw", 9e9, [["demo", [["req-1", None, *WAITS[2:]]], [UNIT]]]],
    ["gw", 9e9, [["demo", [[*WAITS[:6], -1.0]], [UNIT]]]],
]
GOOD_ORDERS = {
    "sequence": 9, "made_at": 1.0, "expires_at": 9e9, "scavengers": {}, "waiting": 0, "batches": 0, "gateways": [],
}  # fmt: skip
BAD_ORDERS = [
    {"expires_at": "never"},
    {"sequence": "last"},
    {"sequence": -1},
    {"made_at": None},
    {"scavengers": {"req-1": ["e1", "soon", 1.0]}},
    {"scavengers": []},
    {"gateways": 5},
]


@pytest.mark.parametrize("report", BAD_REPORTS)
def test_a_report_with_figures_that_cannot_be_is_none(report):
    assert report_from_json(["gw", 1.0, [["demo", [WAITS], [UNIT]]]]).queues
    with pytest.raises((TypeError, ValueError)):
        report_from_json(report)


@pytest.mark.parametrize("wrong", BAD_ORDERS)
def test_orders_with_figures_that_cannot_be_are_none(wrong):
    assert live.orders_of(orjson.dumps(GOOD_ORDERS)) is not None
    assert live.orders_of(orjson.dumps(GOOD_ORDERS | wrong)) is None


async def test_no_orders_are_in_force_for_longer_than_the_coordinators(monkeypatch):
    """Whoever has taken a gateway can publish some."""
    monkeypatch.setattr("api.openai.pruning_feed.VALID_S", 0.3)
    async with gateway("gw-a") as one, gateway("gw-b") as two:
        await until_on_loop(lambda: reported(one, two))
        [first, _] = [row["id"] for row in waiting(one)]
        forged = GOOD_ORDERS | {"sequence": 2**60, "scavengers": {first: ["e1", 2.0, 1.0]}}
        live._client(settings.REDIS_URL).publish("slackline:pruning:orders", orjson.dumps(forged))
        await until_on_loop(lambda: pruned(one, two) == [first])
        await until_on_loop(lambda: pruned(one, two) == [])
        await sync_to_async(decide)()
        await until_on_loop(lambda: len(pruned(one, two)) == 2)
        assert sequence() < 2**60, "the coordinator's own orders, though they come after higher numbers"


async def test_anything_but_orders_and_reports_is_ignored():
    async with gateway("gw-a") as one, gateway("gw-b") as two:
        client = live._client(settings.REDIS_URL)
        client.sadd("slackline:gateways", "gw-c", "gw-d")
        client.set("slackline:pruning:report:gw-c", b"<html>")
        client.set("slackline:pruning:report:gw-d", b'["gw-d", 1.0, [["demo", [[1]], []]]]')
        for number, report in enumerate(BAD_REPORTS):
            client.sadd("slackline:gateways", f"bad-{number}")
            client.set(f"slackline:pruning:report:bad-{number}", orjson.dumps(report))
        for message in (
            b"<html>",
            b"[]",
            b'{"sequence": 9}',
            *(orjson.dumps(GOOD_ORDERS | each) for each in BAD_ORDERS),
        ):
            client.publish("slackline:pruning:orders", message)
        await until_on_loop(lambda: reported(one, two))
        assert len((await sync_to_async(decide)()).scavengers) == 2
        await until_on_loop(lambda: len(pruned(one, two)) == 2)


async def test_without_redis_requests_wait_as_they_would():
    async with gateway("gw-a") as one:
        before = [row["id"] for row in waiting(one)]
        board = LiveState("redis://127.0.0.1:1/0", "gw-a")
        feed = PruningFeed(one.gateway, board)
        with pytest.raises(live.LiveUnavailable):
            await feed.tick()
        running = asyncio.ensure_future(feed.run())
        await asyncio.sleep(0.2)
        assert not running.done()  # it goes on trying
        running.cancel()
        await board.close()
        assert [row["id"] for row in waiting(one)] == before


async def test_the_job_prunes_and_writes_one_decision_for_what_happened(monkeypatch):
    monkeypatch.setattr(pruning, "BATCH_S", 0.0)
    await sync_to_async(flow_settings_create)(actor=SYSTEM, drop_budget=0.5)
    assert (await sync_to_async(gateway_snapshot)()).pruning
    async with gateway("gw-a") as one, gateway("gw-b") as two:
        await until_on_loop(lambda: reported(one, two))
        await sync_to_async(pruning.coordinate)()
        await until_on_loop(lambda: len(pruned(one, two)) >= 2)  # after that second the others may be late themselves
        decision = await Decision.objects.aget(kind="pruning")
        assert decision.inputs["pruned"] == 2
        assert decision.inputs["by_instance"] == {"e1": 2}
        assert decision.inputs["gateways"] == ["gw-a", "gw-b"]
        assert set(decision.inputs["requests"]) <= set(pruned(one, two))
        assert message_of(decision)["sentence"].startswith("coordinator pruned 2 requests, so that")


async def told():
    return [decision async for decision in Decision.objects.filter(kind="pruning")]


async def test_what_a_killed_coordinator_had_pruned_is_told_by_the_next(monkeypatch):
    await sync_to_async(flow_settings_create)(actor=SYSTEM, drop_budget=0.5)
    async with gateway("gw-a") as one, gateway("gw-b") as two:
        await until_on_loop(lambda: reported(one, two))
        await sync_to_async(pruning.coordinate)()
        gone, began = set(pruning._untold.pruned), pruning._untold.since
        assert gone
        assert await told() == []
        monkeypatch.setattr(pruning, "_untold", pruning.Untold())  # of a new process
        monkeypatch.setattr(pruning, "BATCH_S", 0.0)
        await sync_to_async(pruning.coordinate)()
        (decision,) = await told()
        assert gone <= set(decision.inputs["requests"])
        assert decision.inputs["seconds"] >= time.time() - began - 2.0
    monkeypatch.setattr(pruning, "_untold", pruning.Untold())
    await sync_to_async(pruning.coordinate)()  # what was told is stored no more
    assert not any(gone & set(later.inputs["requests"]) for later in await told() if later.id != decision.id)


async def test_a_coordinator_that_was_stopped_tells_nothing_that_another_told(monkeypatch):
    monkeypatch.setattr(pruning, "BATCH_S", 0.0)
    await sync_to_async(flow_settings_create)(actor=SYSTEM, drop_budget=0.5)

    def stopped():
        pruning._untold.pruned["req-1"] = PruneReason("e1", 2.0, 1.0)
        pruning._untold.seen_at = time.monotonic() - 2 * pruning.LEASE_S

    assert await sync_to_async(live.lease)(pruning.LEASE, "another", 60.0)
    stopped()
    await sync_to_async(pruning.coordinate)()
    live._client(settings.REDIS_URL).delete("slackline:lease:pruning")
    stopped()
    await sync_to_async(pruning.coordinate)()  # it has the lease again, and the other left nothing to tell
    assert await told() == []


async def test_without_redis_a_coordinator_keeps_what_it_has_to_tell(monkeypatch):
    """However long Redis is away, for it looks again within the lease. How long the test takes must not matter."""

    def away(*_):
        raise live.LiveUnavailable("away")

    monkeypatch.setattr(pruning, "LEASE_S", 600.0)
    await sync_to_async(flow_settings_create)(actor=SYSTEM, drop_budget=0.5)
    await sync_to_async(pruning.coordinate)()
    pruning._untold.pruned["req-1"] = PruneReason("e1", 2.0, 1.0)
    with monkeypatch.context() as cut:
        cut.setattr(live, "run", away)
        cut.setattr(live, "lease", away)
        for _ in range(2):
            pruning._untold.seen_at -= 0.6 * pruning.LEASE_S
            await sync_to_async(pruning.coordinate)()
    live._client(settings.REDIS_URL).flushdb()  # it came back empty
    monkeypatch.setattr(pruning, "BATCH_S", 0.0)
    await sync_to_async(pruning.coordinate)()
    (decision,) = await told()
    assert decision.inputs["requests"] == ["req-1"]


@pytest.mark.parametrize("stored", [b"<html>", b"[]", b"{}", b'{"since": "long ago"}', b'{"pruned": {"a": [1]}}'])
async def test_what_cannot_be_read_of_another_coordinator_is_left_out(stored, monkeypatch):
    await sync_to_async(flow_settings_create)(actor=SYSTEM, drop_budget=0.5)
    live._client(settings.REDIS_URL).set("slackline:pruning:untold", stored)
    monkeypatch.setattr(pruning, "BATCH_S", 0.0)
    await sync_to_async(pruning.coordinate)()
    assert await told() == []


async def test_the_job_does_nothing_while_pruning_is_off_or_another_one_has_the_lease():
    async with gateway("gw-a") as one, gateway("gw-b") as two:
        await until_on_loop(lambda: reported(one, two))
        await sync_to_async(pruning.coordinate)()
        await sync_to_async(flow_settings_create)(actor=SYSTEM, drop_budget=0.5)
        live._client(settings.REDIS_URL).delete("slackline:lease:pruning")
        assert await sync_to_async(live.lease)(pruning.LEASE, "another", 60.0)
        await sync_to_async(pruning.coordinate)()
        assert sequence() is None
        assert await Decision.objects.filter(kind="pruning").acount() == 0
    assert not await FlowSettings.objects.filter(drop_budget=0).aexists()
