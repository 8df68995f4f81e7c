"""`kill -9` of worker and beat while the scaler acts: they come back, and nothing is done twice."""

import time

import pytest

from tests.faults.load import Load, recorded

pytestmark = [pytest.mark.db, pytest.mark.slow]

ROUNDS = 3


def test_no_decision_is_applied_twice(system, say):
    [(before,)] = system.query("SELECT coalesce(max(id), 0) FROM decision")
    kills = []
    with Load(system, rate=30, body={"max_tokens": 60, "slo_class": "batch"}, words=300) as load:
        for _ in range(ROUNDS):  # the load asks for more engines; each kill falls into the decisions about them
            for name in ("worker", "beat"):
                time.sleep(1.2)
                killed = system.kill(name)
                kills.append(system.until(lambda name=name, killed=killed: system.pid(name) not in (None, killed)))
        scaled = "SELECT kind, outcome->'started' FROM decision WHERE id > %s AND kind = 'scale_out'"
        acted_s = system.until(lambda: system.query(scaled, before), within_s=30.0)
    assert set(load.ends()) <= {"done", "504 waiting_time_exceeded"}, load.ends()
    recorded(system, load.sent)
    made = nothing_twice(system, before)
    say(
        restarts_s=[round(s, 1) for s in kills], acted_s=round(acted_s, 1), scale_outs=len(made), ends=dict(load.ends())
    )


def nothing_twice(system, before):
    """The ids of new instances, after every check that each decision was applied once."""
    rows = system.query("SELECT id, outcome->'started' FROM decision WHERE id > %s AND kind = 'scale_out'", before)
    decided = [id for _, started in rows for id in started or ()]
    assert len(decided) == len(set(decided)), "one instance decided twice"
    existing = {id for (id,) in system.query("SELECT id FROM instance WHERE id = ANY(%s)", decided)}
    assert existing == set(decided), "decided and not made"
    keys = system.query(
        "SELECT idempotency_key FROM decision WHERE idempotency_key IS NOT NULL GROUP BY 1 HAVING count(*) > 1"
    )
    assert keys == []
    replaced = system.query(
        "SELECT subject FROM decision WHERE kind = 'instance_replaced' GROUP BY 1 HAVING count(*) > 1"
    )
    assert replaced == []
    overlapping = system.query(
        "SELECT a.instance_id FROM instance_interval a JOIN instance_interval b ON a.instance_id = b.instance_id"
        " AND a.id < b.id AND a.started_at < coalesce(b.ended_at, 'infinity')"
        " AND b.started_at < coalesce(a.ended_at, 'infinity')"
    )
    assert overlapping == [], "an instance is paid for twice"
    dangling = system.query(
        "SELECT i.id FROM instance i JOIN instance_interval v ON v.instance_id = i.id"
        " WHERE i.observed_state IN ('stopped', 'failed') AND v.ended_at IS NULL"
    )
    assert dangling == [], "paid for after its end"
    [(most,)] = system.query("SELECT max(max_instances) FROM scaling_policy")
    assert len(system.instances()) <= most
    return decided


def test_the_fleet_shrinks_again(system, say):
    """`system` waits for two engines: the instances added above have been drained and stopped by the scaler."""
    stopped = system.query(
        "SELECT count(*) FROM instance i WHERE desired_state = 'stopped' AND observed_state = 'stopped'"
        " AND NOT EXISTS (SELECT 1 FROM instance_interval v WHERE v.instance_id = i.id AND v.ended_at IS NULL)"
    )
    say(stopped=stopped[0][0])
    assert stopped[0][0] > 0
