"""Scaling: the production scaler in virtual time."""

from dataclasses import replace

import pytest

from controller.core.errors import ConfigError
from controller.core.types import Outcome
from controller.scale import ScalingConfig
from controller.scale.capacity_plan import StageCapacity
from controller.simulator import Demand, ElasticSettings, Failure, SimulationSettings
from tests.controller.simulator.runs import PATIENT, SMALL, facts, simulate, some_demands

QUICK = ScalingConfig("model", min_instances=1, max_instances=3, sustain_s=2.0, cooldown_s=1.0)


def wave():
    """Quiet, then far too much for one instance, then quiet again."""
    busy = some_demands(400, rate=60.0, seed=2)
    calm = [Demand(f"calm{i}", 20.0 + i, 50, 5, PATIENT) for i in range(40)]
    return [Demand("first", 0.0, 50, 5, PATIENT), *busy, *calm]


def scaled(**settings):
    settings = {"elastic": ElasticSettings(QUICK, "device"), **settings}
    return simulate(wave(), "slackline", (SMALL,), **settings)


def test_it_grows_under_load_and_shrinks_when_it_is_over():
    result = scaled()
    counts = [sample.instances for sample in result.samples]
    assert counts[0] == 1
    assert max(counts) == 3
    assert counts[-1] == 1
    kinds = [decision.kind for decision in result.decisions]
    assert kinds.count("scale_out") >= 2
    assert kinds.count("scale_in") >= 2
    assert all(record.outcome is Outcome.OK for record in result.records)


def test_more_instances_attain_more_and_cost_more():
    alone, grown = simulate(wave(), "slackline", (SMALL,)), scaled()
    assert sum(r.attained for r in grown.records) > sum(r.attained for r in alone.records)
    assert grown.cost > alone.cost


def test_a_new_instance_serves_after_its_load_time_and_costs_from_the_start():
    seconds = {"device": 3.0, "host": 3.0, "disk": 3.0}
    result = scaled(elastic=ElasticSettings(QUICK, "disk", seconds))
    asked = next(decision.at for decision in result.decisions if decision.kind == "scale_out")
    served = [record.at + record.queue_s for record in result.records if record.instance == "engine-1"]
    assert min(served) >= asked + 3.0
    use = next(use for use in result.instances if use.id == "engine-1")
    gone = next(s.at for s in result.samples if s.at > asked + 4 and s.instances == 1)
    assert use.provisioned_s == pytest.approx(gone - asked, abs=3.0)


def test_a_drained_instance_ends_what_it_has_and_gets_nothing_new():
    result = scaled()
    drained = next(decision.at for decision in result.decisions if decision.kind == "scale_in")
    after = [r for r in result.records if r.queue_s is not None and r.at + r.queue_s > drained]
    assert {record.outcome for record in after} == {Outcome.OK}
    assert len({use.id for use in result.instances}) == len(result.instances) >= 3


def test_the_same_run_twice_is_the_same():
    assert facts(scaled()) == facts(scaled())
    assert scaled().decisions == scaled().decisions


def test_with_the_last_instance_dead_weights_come_from_disk():
    elastic = ElasticSettings(QUICK, "device", {"device": 0.1, "host": 0.1, "disk": 5.0})
    demands = [Demand(f"r{i}", 1.0 + i, 50, 5, PATIENT) for i in range(10)]
    result = simulate(demands, "slackline", (SMALL,), elastic=elastic, failures=(Failure(0, 1.5),))
    by_time = {record.at: record for record in result.records}
    asked = result.decisions[0].at
    assert (result.decisions[0].reason, asked) == ("below_min", 2.0)
    assert by_time[1.0].instance == "engine-0"
    for at, record in by_time.items():
        if at > asked:  # it waits for the one that is on its way, as it would at a gateway
            assert record.outcome is Outcome.OK
            assert record.instance != "engine-0"
            assert at + record.queue_s >= asked + 5.0


@pytest.mark.parametrize(("change", "field"), [({"source": "moon"}, "source"), ({"load_s": {"disk": 1.0}}, "load_s")])
def test_bad_settings_are_refused(change, field):
    with pytest.raises(ConfigError) as caught:
        ElasticSettings(QUICK, **change)
    assert caught.value.field == field


def test_more_instances_than_allowed_are_refused():
    with pytest.raises(ConfigError, match="max_instances"):
        SimulationSettings((SMALL,) * 4, elastic=ElasticSettings(QUICK))


@pytest.mark.simulated
def test_lulls_shorter_than_a_start_do_not_stop_an_instance(monkeypatch):
    """A rush every 30 s, and starts of 20 s: an instance stopped in a lull is back when the rush is over."""
    rushes = [
        replace(each, id=f"{each.id}-{k}", at=each.at + 30.0 * k)
        for k in range(8)
        for each in some_demands(600, rate=40.0, seed=k)
    ]
    settings = {"elastic": ElasticSettings(QUICK, "device", start_s=20.0)}
    kept = simulate(rushes, "slackline", (SMALL,), **settings)
    monkeypatch.setattr(StageCapacity, "replaced_after_s", None)
    stopped = simulate(rushes, "slackline", (SMALL,), **settings)
    starts = [[each.kind for each in run.decisions].count("scale_out") for run in (kept, stopped)]
    attained = [sum(record.attained for record in run.records) / len(rushes) for run in (kept, stopped)]
    assert starts == [2, 16]
    assert attained == [pytest.approx(0.978, abs=0.02), pytest.approx(0.784, abs=0.05)]
    assert kept.cost < 1.1 * stopped.cost


def test_the_first_request_after_a_scale_to_zero_waits_for_an_instance():
    from_none = replace(QUICK, min_instances=0)
    loads = {"device": 0.1, "host": 0.1, "disk": 5.0}
    demands = [Demand("a", 0.0, 50, 5, PATIENT), Demand("b", 60.0, 50, 5, PATIENT)]
    result = simulate(demands, "slackline", (SMALL,), elastic=ElasticSettings(from_none, "disk", loads))
    first, second = result.records
    assert min(sample.instances for sample in result.samples if sample.at < 60.0) == 0
    assert (first.outcome, second.outcome) == (Outcome.OK, Outcome.OK)
    assert first.instance != second.instance
    assert second.queue_s >= 5.0
