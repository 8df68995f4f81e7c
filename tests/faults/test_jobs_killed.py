"""`kill -9` of worker and beat while the scaler acts: they come back, and what was decided takes effect once."""

import itertools

import pytest

from tests.faults.kills import Kills, Processes
from tests.faults.load import Load, recorded

pytestmark = [pytest.mark.db, pytest.mark.slow]

BLIND_ROUNDS = 2
SCALE_OUTS = 2
NEAR_S = 1.0  # a scale-out takes effect (a row, a process, telemetry) for longer than this
STARTED_AS = ("scale_out", "scale_warm", "instance_replaced")
COOLDOWN_S = 2.0  # as `hurry_scaler` sets it


def test_what_was_decided_takes_effect_once(system, say):
    [(after,)] = system.query("SELECT coalesce(max(id), 0) FROM decision")
    before = {id for (id,) in system.query("SELECT id FROM instance")}
    kills = Kills(system, after)
    body = {"max_tokens": 60, "slo_class": "batch"}
    with Processes(system) as processes:
        with Load(system, rate=30, body=body, words=300) as load:  # asks for more engines than two
            kills.blindly(BLIND_ROUNDS)
            kills.at_each("scale_out", SCALE_OUTS, within_s=60.0)
            kills.blindly(1)
        assert set(load.ends()) <= {"done", "504 waiting_time_exceeded"}, load.ends()
        recorded(system, load.sent)
        system.until(lambda: settled(system, decided_ids(kills)))
    gaps = kills.gaps_s("scale_out")
    assert gaps, f"no scale-out between two kills: {kills.times}, {kills.decided('scale_out')}"
    assert min(gaps) < NEAR_S, gaps
    made = effects(system, kills, before, processes)
    nothing_is_paid_twice(system)
    say(
        restarts_s=[round(s, 1) for s in kills.back_s], killed_after_s=[round(gap, 2) for gap in gaps],
        scale_outs=len(kills.decided("scale_out")), instances=len(made), ends=dict(load.ends()),
    )  # fmt: skip


def decided_ids(kills):
    """Of all instances that some decision says it started, with repetitions."""
    found = []
    for kind in STARTED_AS:
        for decision in kills.decided(kind):
            outcome = decision["outcome"]
            found += outcome.get("started") or [outcome[name] for name in ("replacement",) if outcome.get(name)]
    return found


def settled(system, ids):
    """Nothing decided is still on its way."""
    sql = "SELECT count(*) FROM instance WHERE id = ANY(%s) AND observed_state IN ('pending', 'starting')"
    return system.query(sql, list(ids)) == [(0,)]


def effects(system, kills, before, processes):
    """The new instances, after every check that each was decided once, made once and started once."""
    decided = decided_ids(kills)
    assert decided, "nothing was started: nothing was tested"
    existing = {id for (id,) in system.query("SELECT id FROM instance")} - before
    assert sorted(decided) == sorted(existing), "decided and not made once, or made and not decided"
    started = {id: pids for id, pids in processes.pids.items() if id not in before}
    assert started.keys() <= existing, "a process for no instance"
    assert started.keys() >= set(scaled_out(kills)), "decided and never started"
    assert {id: len(pids) for id, pids in started.items() if len(pids) != 1} == {}, "an engine started twice"
    looked_for = dict(
        system.query(
            "SELECT instance_id, count(*) FROM action WHERE kind = 'first_served' AND instance_id = ANY(%s) GROUP BY 1",
            decided,
        )
    )
    assert looked_for == dict.fromkeys(scaled_out(kills), 1), "an action for each that was scaled out, once"
    told = (
        "SELECT count(*) FROM decision WHERE kind IN ('scale_out_served', 'scale_out_unserved') AND id > %s"
        " GROUP BY inputs->>'instance'"
    )
    assert all(count == 1 for (count,) in system.query(told, kills.after))
    each_saw_the_one_before(kills)
    return existing


def scaled_out(kills):
    return [id for decision in kills.decided("scale_out") for id in decision["outcome"].get("started", ())]


def each_saw_the_one_before(kills):
    """A tick done again after a kill would decide on the same figures once more, at once."""
    shrunk = [each["at"] for kind in ("scale_in", "instance_replaced") for each in kills.decided(kind)]
    for earlier, later in itertools.pairwise(kills.decided("scale_out")):
        assert later["at"] - earlier["at"] >= COOLDOWN_S - 0.1, (earlier, later)
        assert later["inputs"]["tick"] > earlier["inputs"]["tick"]
        if not any(earlier["at"] < at < later["at"] for at in shrunk):
            fleet = [each["inputs"]["ready"] + each["inputs"]["starting"] for each in (earlier, later)]
            assert fleet[1] > fleet[0], (earlier, later)


def nothing_is_paid_twice(system):
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


def test_the_fleet_shrinks_again(system, say):
    """The instances added above are drained and stopped by the scaler, and paid for no longer."""
    stopped = (
        "SELECT count(*) FROM instance i WHERE desired_state = 'stopped' AND observed_state = 'stopped'"
        " AND NOT EXISTS (SELECT 1 FROM instance_interval v WHERE v.instance_id = i.id AND v.ended_at IS NULL)"
    )
    took_s = system.until(lambda: system.query(stopped)[0][0] > 0, within_s=60.0)
    [(count,)] = system.query(stopped)
    say(stopped=count, took_s=round(took_s, 1))
    assert count > 0
