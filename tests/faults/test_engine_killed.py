"""`kill -9` of an engine under load: nothing is lost, and another engine takes its place."""

import math
import time

import pytest

from tests.faults.load import Load, quantile_ms, recorded

pytestmark = [pytest.mark.db, pytest.mark.slow]


def test_requests_finish_elsewhere_or_say_that_they_are_cut(system, say):
    victim = sorted(system.instances())[0]
    body = {"max_tokens": 80, "slo_class": "batch"}
    with Load(system, rate=20, body=body, words=400) as load:
        system.until(lambda: load.ends()["done"] > 40 and load.streaming(victim) > 1)
        system.kill(f"engine {victim}")
        killed = time.monotonic()
        started = "SELECT outcome->>'replacement' FROM decision WHERE kind = 'instance_replaced' AND subject = %s"
        decided_s = system.until(lambda: system.query(started, victim))
        [(successor,)] = system.query(started, victim)
        ready_s = system.until(lambda: system.instances().get(successor) == "ready", within_s=30.0) + decided_s
        system.until(lambda: load.served(successor) > 0)
    ends = load.ends()
    cut = [sent for sent in load.sent if sent.ended == "error event"]
    assert set(ends) <= {"done", "error event"}, ends
    assert ends["error event"] > 0, "nothing was streaming from it: the test showed nothing"
    assert all("engine_failed" in sent.text and sent.instance == victim for sent in cut)
    waited = recorded(system, load.sent)
    ids = [sent.id for sent in load.sent]
    outcomes = dict(
        system.query("SELECT outcome, count(*) FROM request_record WHERE id = ANY(%s) GROUP BY outcome", ids)
    )
    assert outcomes == {"ok": ends["done"], "cut": len(cut)}
    [(retried,)] = system.query("SELECT count(*) FROM request_record WHERE id = ANY(%s) AND attempts > 1", ids)
    assert retried > 0, "no request was sent elsewhere"
    say(
        requests=len(load.sent), done=ends["done"], cut=len(cut), sent_elsewhere=retried, decided_s=round(decided_s, 1),
        replaced_s=round(ready_s, 1), records_after_s=round(waited, 1), p99_ms=round(quantile_ms(load.sent)),
        sent_after=len(load.between(killed, killed + 60)),
    )  # fmt: skip


def test_both_engines_killed_at_once_cost_time_and_no_request(system, say):
    """With no engine left, requests that can wait do wait, and are served by the replacements.

    One that the gateway sent to the second engine in the instant between the two kills was computed alone there, so as
    far as anybody can tell it has ended two engines: it is refused (decision 176).
    """
    with Load(system, rate=10, body={"max_tokens": 20, "slo_class": "batch"}) as load:
        system.until(lambda: load.ends()["done"] > 10)
        victims = set(system.instances())
        for engine in victims:
            system.kill(f"engine {engine}")
        killed = time.monotonic()
        ready_s = system.until(
            lambda: not victims & set(system.instances()) and list(system.instances().values()) == ["ready"] * 2,
            within_s=40.0,
        )
        system.until(lambda: any(sent.ended == "done" for sent in load.between(killed, math.inf)))
    after = load.between(killed, time.monotonic())
    assert {sent.ended for sent in load.sent} <= {"done", "error event", "503 no_capacity", "422 ends_engines"}
    assert sum(sent.ended == "422 ends_engines" for sent in load.sent) <= 1, "only one at a time is computed alone"
    recorded(system, load.sent)
    ends = load.ends()
    say(ready_s=round(ready_s, 1), **{end.replace(" ", "_"): count for end, count in ends.items()})
    assert sum(sent.ended == "done" for sent in after) > 0
