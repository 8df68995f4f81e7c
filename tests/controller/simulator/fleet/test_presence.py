"""Instances that are there for a part of a run: who joins serves, who leaves ends what it has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controller.core.errors import ConfigError
from controller.core.types import Outcome
from controller.dispatch import build_dispatcher
from controller.scale import ScalingConfig
from controller.simulator import Demand, Simulation, SimulationSettings
from controller.simulator.experiment import parse_experiment
from controller.simulator.fleet.presence import drain, from_second, numbers
from controller.simulator.heap import EventKind
from controller.simulator.settings import ElasticSettings, Failure
from tests.controller.simulator.runs import FAST, PATIENT, SMALL, facts, simulate, some_demands


def there(from_s=0.0, until_s=None, role="collocated"):
    return replace(SMALL, from_s=from_s, until_s=until_s, role=role)


def served_by(result):
    return {record.id: record.instance for record in result.records}


def test_one_that_joins_serves_from_then_on():
    result = simulate(some_demands(200), "round_robin", [SMALL, there(5.0)])
    seconds = {record.id: record.at for record in result.records}
    first = min(seconds[name] for name, where in served_by(result).items() if where == "engine-1")
    assert 5.0 <= first < 6.0
    assert {record.outcome for record in result.records} == {Outcome.OK}


def test_one_that_leaves_ends_what_it_has_and_gets_nothing_new():
    result = simulate(some_demands(200), "round_robin", [SMALL, there(0.0, 5.0)])
    there_last = max(record.at for record in result.records if record.instance == "engine-1")
    assert 4.0 < there_last < 5.0
    assert {record.outcome for record in result.records} == {Outcome.OK}


def test_it_costs_while_it_is_there():
    result = simulate(some_demands(200), "round_robin", [SMALL, there(2.0, 5.0)])
    (use,) = [use for use in result.instances if use.id == "engine-1"]
    assert 3.0 <= use.provisioned_s < 5.0, "it drains for a while"


def test_one_that_would_join_after_the_end_costs_nothing():
    result = simulate(some_demands(50), "round_robin", [SMALL, there(1e6)])
    assert [use.id for use in result.instances] == ["engine-0"]


def test_two_after_each_other_are_one():
    """The second is there before the first drains."""
    result = simulate(some_demands(100), instances=[there(0.0, 2.0), there(1.9)])
    assert {record.outcome for record in result.records} == {Outcome.OK}
    assert set(served_by(result).values()) == {"engine-0", "engine-1"}


def test_requests_wait_for_the_first_and_over_a_gap():
    demands = [Demand(f"r{at:g}", at, 100, 5, PATIENT) for at in (0.0, 3.5)]
    result = simulate(demands, instances=[there(1.0, 3.0), there(4.0)])
    found = {record.id: record for record in result.records}
    assert {record.outcome for record in found.values()} == {Outcome.OK}
    assert found["r0"].ttft_s == pytest.approx(1.0, abs=0.2)
    assert found["r3.5"].ttft_s == pytest.approx(0.5, abs=0.2)


def test_after_the_last_has_left_requests_are_refused():
    demands = [Demand("r0", 0.0, 100, 5, PATIENT), Demand("late", 5.0, 100, 5, PATIENT)]
    found = {record.id: record for record in simulate(demands, instances=[there(0.0, 3.0)]).records}
    assert (found["r0"].outcome, found["late"].outcome) == (Outcome.OK, Outcome.REFUSED)
    assert found["late"].reason == "no_instance"


def test_present_throughout_is_as_before():
    demands = some_demands(150)
    assert facts(simulate(demands)) == facts(simulate(demands, instances=[SMALL, there(0.0, 1e6)]))


def test_prefill_and_decode_instances_come_and_go():
    apart = [replace(there(0.0, 4.0), role="prefill"), replace(there(3.0), role="prefill")]
    apart += [replace(there(), role="decode"), replace(there(2.0, 5.0), role="decode")]
    result = simulate(some_demands(150), instances=apart)
    assert {record.outcome for record in result.records} == {Outcome.OK}
    assert {record.prefill_instance for record in result.records if record.prefill_instance} == {"engine-0", "engine-1"}
    assert {"engine-2", "engine-3"} <= {record.instance for record in result.records}


def test_a_scaler_starts_others_beside_them():
    scaling = ElasticSettings(ScalingConfig("model", min_instances=1, max_instances=6, sustain_s=1.0, cooldown_s=2.0))
    demands = some_demands(400, rate=60.0)
    result = simulate(demands, instances=[SMALL, there(3.0, 6.0)], elastic=scaling)
    assert len(result.records) == len(demands)
    names = [use.id for use in result.instances]
    assert len(names) == len(set(names)) > 2


def test_what_a_scaler_drains_is_not_ended_with_those_that_leave():
    """It may be on its way to another role."""
    chosen = SimulationSettings((SMALL, there(0.0, 2.0), SMALL))
    run = Simulation(chosen, build_dispatcher("round_robin"), some_demands(100))
    run.heap.push(1.0, EventKind.TICK, lambda: drain(run, "engine-2"))
    names = {use.id: use.provisioned_s for use in run.run().instances}
    assert names["engine-1"] < 4.0
    assert names["engine-2"] == names["engine-0"], "it stays until whoever drained it ends it"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"from_s": -1.0}, "from_s"),
        ({"from_s": float("nan")}, "from_s"),
        ({"until_s": 0.0}, "until_s"),
        ({"from_s": 5.0, "until_s": 5.0}, "until_s"),
        ({"until_s": float("inf")}, "until_s"),
    ],
)
def test_nonsense_is_refused_by_name(changes, field):
    with pytest.raises(ConfigError) as refused:
        replace(SMALL, **changes)
    assert refused.value.field == field


def test_from_a_later_second_on():
    settings = SimulationSettings((there(), there(0.0, 4.0), there(3.0, 9.0), there(20.0)))
    later = from_second(settings, 5.0)
    seen = [(each.from_s, each.until_s) for each in later.instances if not each.left]
    assert seen == [(0.0, None), (0.0, 4.0), (15.0, None)]
    assert [each.left for each in from_second(later, 5.0).instances] == [False, True, True, False]
    assert numbers(later) == (1, 2)
    with pytest.raises(ConfigError, match="no instance was there"):
        from_second(SimulationSettings((there(0.0, 4.0),)), 4.0)


LEFT_ALONE = [
    [there(0.0, 4.0, "prefill"), there(0.0, None, "decode"), there()],
    [there(0.0, None, "prefill"), there(0.0, 4.0, "decode"), there()],
    # Both turn to another role, one of them half a second after the other.
    [there(0.0, 4.0, "prefill"), there(0.0, 4.5, "decode"), there(4.0), there(4.5)],
    [there(0.0, 4.5, "prefill"), there(0.0, 4.0, "decode"), there(4.0), there(4.5)],
]


@pytest.mark.parametrize("instances", LEFT_ALONE)
def test_one_stage_may_be_left_alone_by_then_as_in_the_whole_run(instances):
    """Requests that come after the other stage has left are served as they are where it is seen to leave."""
    demands = [replace(each, at=each.at + 4.25) for each in some_demands(100)]
    whole = simulate(demands, instances=instances)
    later = from_second(SimulationSettings(tuple(instances)), 4.25)
    shifted = [replace(each, at=each.at - 4.25) for each in demands]
    rest = Simulation(later, build_dispatcher("slackline"), shifted).run()
    assert {record.outcome for record in rest.records} == {Outcome.OK}
    assert prefilled_apart(rest) == prefilled_apart(whole)


def prefilled_apart(result):
    """Requests that another instance decoded."""
    return {record.id for record in result.records if record.prefill_instance}


@pytest.mark.parametrize(("alone", "other"), [("prefill", "decode"), ("decode", "prefill")])
def test_one_stage_that_is_left_with_no_one_else_serves_nothing(alone, other):
    settings = SimulationSettings((there(role=alone), there(0.0, 4.0, other)))
    with pytest.raises(ConfigError, match=f"only {alone} instances were still there"):
        from_second(settings, 4.25)


def test_a_run_that_is_not_the_rest_of_another_needs_both_stages():
    with pytest.raises(ConfigError, match="prefill instances need decode instances") as refused:
        SimulationSettings((there(role="prefill"), there()))
    assert refused.value.field == "instances.role"


def test_instances_keep_their_numbers():
    """A failure, a port and a measured speed are given by number: the second one's are the second one's still."""
    failures = (Failure(1, 1.0, None),)
    whole = SimulationSettings((there(0.0, 4.0), there(), there()), failures=failures)
    rest = Simulation(from_second(whole, 5.0), build_dispatcher("round_robin"), some_demands(100)).run()
    assert {use.id for use in rest.instances} == {"engine-1", "engine-2"}
    late = {record.instance for record in rest.records if record.at > 1.0}
    assert late == {"engine-2"}


def test_a_scaler_may_start_the_first_of_all():
    """Those of the settings come later."""
    scaling = ScalingConfig("model", min_instances=1, max_instances=3, sustain_s=1.0, cooldown_s=2.0)
    result = simulate(some_demands(50), instances=[there(50.0)], elastic=ElasticSettings(scaling))
    assert {record.instance for record in result.records} >= {"engine-1"}
    assert "engine-0" not in {use.id for use in result.instances}


@pytest.mark.parametrize(
    ("instances", "expected"),
    [([there()], (1, 1)), ([there(), there(2.0, 5.0)], (1, 2)), ([there(0.0, 2.0), there(2.0)], (1, 1)),
     ([there(0.0, 2.0), there(3.0, 4.0), there(3.5)], (0, 2))],
)  # fmt: skip
def test_how_many_are_there_at_once(instances, expected):
    assert numbers(SimulationSettings(tuple(instances))) == expected


def test_in_an_experiment_file():
    group = {"profile": dict(zip(FAST._fields, FAST, strict=True)), "from_s": 1.5, "until_s": 7}
    raw = {"instances": [group], "workload": {"kind": "mix", "mix": "2-task", "per_task": 1}, "policies": ["slackline"]}
    (made,) = parse_experiment(raw, None, None).settings.instances
    assert (made.from_s, made.until_s) == (1.5, 7)
    raw["policies"] = [{"name": "slackline", "engine": {"from_s": 2.0}}]
    with pytest.raises(ConfigError, match="from_s"):
        parse_experiment(raw, None, None)
