"""The coordinator of pruning stopped and killed, and Redis away, while its orders are in force at two gateways.

Requests go on, orders end within three seconds, and *Flows* and the records say so.
"""

from __future__ import annotations

import copy
import json
import signal
import time
from contextlib import contextmanager

import psutil
import pytest
import redis

from controller.core.messages import PRUNING_ORDERS_KEY
from tests.faults.load import Load, recorded
from tests.faults.outage import stopped
from tests.second_gateway import second_gateway
from workers.pruning import VALID_S
from workers.tasks.pruning import BATCH_S

pytestmark = [pytest.mark.db, pytest.mark.slow]
# At each of two gateways. The two engines have 64 slots and an answer takes at least 2.8 s, so that they are overloaded
# on a quiet machine as well. On a busy one more than half of what waits has to be pruned before the rest is in time.
RATE = 14.0
BODY = {"max_tokens": 220, "slo_class": "summaries"}
DROP_BUDGET = 0.9
STOPPED_S, AWAY_S = 10.0, 5.0
LATE_S = 1.5  # by which a busy machine may end orders late
KNOWN_ENDS = {"done", "504 waiting_time_exceeded", "503 slo_infeasible", "429 slo_infeasible"}


@contextmanager
def drop_budget(system, session, budget):
    def put(value):
        answer = system.control(session, "flow-settings", {"drop_budget": value}, "PUT")
        assert answer.ok, answer.text

    put(budget)
    try:
        yield
    finally:
        put(0.0)


@contextmanager
def at_most(system, session, count):
    """Engines that the scaler may run: with more the overload would end."""

    def bound(most):
        [policy] = session.get(f"{system.console}/api/v1/scaling-policies", timeout=10).json()["items"]
        change = {"max_instances": most, "version": policy["version"]}
        answer = system.control(session, f"scaling-policies/{policy['id']}", change, "PATCH")
        assert answer.ok, answer.text
        return policy["max_instances"]

    before = bound(count)
    try:
        yield
    finally:
        bound(before)


def in_force(client, least=5):
    """Whether orders in force prune so many requests; one alone may be sent a moment later."""
    try:
        stored = client.get(PRUNING_ORDERS_KEY)
    except redis.RedisError:
        return False
    return stored is not None and len(json.loads(stored)["scavengers"]) >= least


def pruned_spans(system, sent):
    """When each of these requests was pruned, in epoch seconds: from, to, and why it ended."""
    sql = (
        "SELECT extract(epoch FROM arrived_at), coalesce(e2e_s, queue_s, 0), decisions FROM request_record"
        " WHERE id = ANY(%s)"
    )
    found = []
    for arrived, took_s, decisions in system.query(sql, [each.id for each in sent]):
        began = None
        for step in decisions:
            at = float(arrived) + step["at"]
            if began is not None:
                found.append((began, at, step["reason"] if step["kind"] == "unprune" else step["kind"]))
            began = at if step["kind"] == "prune" else None
        if began is not None:
            found.append((began, max(began, float(arrived) + took_s), "its end"))
    return found


def test_requests_go_on_without_the_coordinator_and_without_redis(system, redis_server, say):
    session, client = system.sign_in(), redis.Redis.from_url(redis_server.url)
    [(after,)] = system.query("SELECT coalesce(max(id), 0) FROM decision")
    flows = lambda: session.get(f"{system.console}/flows/", timeout=20).text  # noqa: E731
    gone = []  # from and to, in epoch seconds
    beside, log = copy.copy(system), system.folder / "logs" / "second.log"
    with (
        second_gateway(system.pid("gateway"), log) as beside.gateway,
        at_most(system, session, 2),
        drop_budget(system, session, DROP_BUDGET),
    ):
        with Load(system, RATE, BODY) as one, Load(beside, RATE, BODY) as two:
            overloaded_s = system.until(lambda: in_force(client))
            worker = psutil.Process(system.pid("pruning"))
            processes = [worker, *worker.children(recursive=True)]
            for process in processes:
                process.send_signal(signal.SIGSTOP)
            gone.append([time.time(), 0.0])
            assert "are served last now" in flows()
            system.until(lambda: "The coordinator has not run since" in flows(), STOPPED_S)
            time.sleep(max(0.0, gone[0][0] + STOPPED_S - time.time()))
            assert not in_force(client, 1)
            gone[0][1] = time.time()
            for process in processes:
                process.kill()
            again_s = system.until(lambda: in_force(client))
            gone.append([time.time(), 0.0])
            with stopped(redis_server):
                system.until(lambda: "Redis is unavailable" in flows(), AWAY_S)
                time.sleep(max(0.0, gone[1][0] + AWAY_S - time.time()))
                gone[1][1] = time.time()
            after_redis_s = system.until(lambda: in_force(client))
        sent = one.sent + two.sent
        assert {each.ended for each in sent} <= KNOWN_ENDS
        recorded(system, sent)
        system.until(lambda: "were pruned" in flows())
    spans, epoch = pruned_spans(system, sent), time.time() - time.monotonic()
    for began, ended in gone:
        assert any(each.ended == "done" for each in sent if began < epoch + each.at < ended - 2.0)
        during = [span for span in spans if span[0] < began + VALID_S + LATE_S and span[1] > began]
        assert during, "nobody was pruned: nothing was tested"
        assert max(to for _, to, _ in during) < began + VALID_S + LATE_S
        assert not any(began + VALID_S + LATE_S < at < ended for at, _, _ in spans)
    assert any(why == "orders_expired" for _, _, why in spans)
    sql = "SELECT coalesce(sum((inputs->>'pruned')::int), 0) FROM decision WHERE kind = 'pruning' AND id > %s"
    told = lambda: system.query(sql, after)[0][0]  # noqa: E731
    system.until(told, BATCH_S + 5.0)
    ends = {name: sum(each.ended == name for each in sent) for name in {each.ended for each in sent}}
    say(
        requests=ends, pruned_spans=len(spans), told=told(), overloaded_after_s=round(overloaded_s, 1),
        again_after_s=round(again_s, 1), after_redis_s=round(after_redis_s, 1),
    )  # fmt: skip
