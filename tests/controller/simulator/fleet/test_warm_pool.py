"""The warm pool in virtual time: what it spares, what it costs, that nothing is lost."""

import pytest

from controller.core.errors import ConfigError
from controller.core.types import Outcome
from controller.simulator import ElasticSettings
from controller.simulator.experiment import parse_experiment
from controller.simulator.fleet.cluster import Cluster
from controller.simulator.report.summary import report, time_to_scale
from tests.controller.simulator.fleet.test_elastic import QUICK, scaled, wave
from tests.controller.simulator.runs import SMALL, facts
from tests.controller.simulator.test_machine_speed import FILE

LOAD = {"device": 0.9, "host": 2.7, "disk": 4.1}


def pooled(warm, start_s=6.0, source="device", **settings):
    return scaled(elastic=ElasticSettings(QUICK, source, LOAD, start_s=start_s, warm=warm), **settings)


@pytest.mark.parametrize(("source", "seconds"), LOAD.items())
def test_a_warm_one_waits_for_its_weights_only(source, seconds):
    first, *_ = pooled(2, source=source).scaled_out
    assert first.warm
    assert first.up_at - first.asked_at == pytest.approx(seconds)


def test_without_a_pool_the_process_is_waited_for_as_well():
    result = pooled(0)
    assert not any(each.warm for each in result.scaled_out)
    assert time_to_scale(result) == pytest.approx(6.9)
    assert report(result)["time_to_scale_s"] == pytest.approx(6.9)


def test_it_serves_from_then_on_and_not_before():
    result = pooled(2)
    assert len(result.scaled_out) == 2
    for each in result.scaled_out:
        sent = [r.at + r.queue_s for r in result.records if r.instance == each.id]
        assert sent
        assert min(sent) >= each.up_at


def test_a_pool_attains_more_in_a_rush_and_costs_what_it_keeps():
    cold, warm = pooled(0), pooled(2)
    assert sum(r.attained for r in warm.records) > sum(r.attained for r in cold.records)
    assert time_to_scale(warm) < time_to_scale(cold)
    assert warm.cost > cold.cost
    for use in warm.instances:
        assert 0 <= use.provisioned_s <= warm.ended_at


def test_it_is_filled_up_again_and_costs_from_the_first_moment_to_the_last():
    result = pooled(1)
    names = {use.id for use in result.instances}
    assert {each.id for each in result.scaled_out} < names
    first = next(use for use in result.instances if use.id == "engine-1")
    assert result.scaled_out[0].id == "engine-1"
    assert first.provisioned_s > result.scaled_out[0].asked_at
    served = {each.id for each in result.scaled_out}
    unused = [use for use in result.instances if use.steps == 0 and use.id not in served]
    assert len(unused) == 1
    assert unused[0].generated_tokens == 0


def test_it_is_filled_up_as_the_service_does_at_a_later_look_and_beside_an_engine_that_starts(monkeypatch):
    filled, whole = [], Cluster.keep_warm

    def keep_warm(cluster, now, **how):
        filled.append((now, bool(cluster.starting)))
        return whole(cluster, now, **how)

    monkeypatch.setattr(Cluster, "keep_warm", keep_warm)
    result = pooled(1, start_s=30.0)
    decided = {decision.at for decision in result.decisions}
    assert len(filled) > 1
    assert not decided & {now for now, _ in filled if now}
    cold = [each for each in result.scaled_out if not each.warm]
    assert cold
    assert any(busy for _, busy in filled)  # only weights that load hold it up, not a process that starts


@pytest.mark.parametrize("warm", [0, 1, 3])
def test_no_request_is_lost_or_doubled(warm):
    result = pooled(warm)
    assert sorted(r.id for r in result.records) == sorted(demand.id for demand in wave())
    assert all(r.outcome is Outcome.OK for r in result.records)
    assert facts(result) == facts(pooled(warm))


def test_warm_ones_are_no_capacity():
    """Beside one that serves, three stand by: never more than the three of the policy serve."""
    assert max(sample.instances for sample in pooled(3).samples) == QUICK.max_instances


@pytest.mark.parametrize(
    ("change", "field"), [({"warm": -1, "start_s": 5.0}, "warm"), ({"warm": 1}, "warm"), ({"start_s": -1.0}, "start_s")]
)
def test_bad_pools_are_refused(change, field):
    with pytest.raises(ConfigError) as caught:
        ElasticSettings(QUICK, **change)
    assert caught.value.field == field


def test_an_experiment_file_may_ask_for_one():
    raw = {**FILE, "settings": {"elastic": {"start_s": 12.0, "warm": 2}}}
    elastic = parse_experiment(raw, lambda path: {}, lambda path: []).settings.elastic
    assert (elastic.start_s, elastic.warm) == (12.0, 2)
    raw["settings"]["elastic"]["start_s"] = 0.0
    with pytest.raises(ConfigError) as caught:
        parse_experiment(raw, lambda path: {}, lambda path: [])
    assert caught.value.field == "settings.elastic.warm"
    assert SMALL.max_num_seqs
