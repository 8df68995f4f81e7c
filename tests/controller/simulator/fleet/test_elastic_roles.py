"""Scaling with prefill and decode on instances of their own."""

from dataclasses import replace

import numpy as np
import pytest

from controller.core.errors import ConfigError
from controller.core.types import Outcome
from controller.scale import ScalingConfig
from controller.simulator import Demand, ElasticSettings, Failure, SimulationSettings
from controller.simulator.fleet.elastic import Elastic
from tests.controller.simulator.runs import PATIENT, SMALL, facts, simulate

P, D = (replace(SMALL, role=role, kv_tokens=16_384) for role in ("prefill", "decode"))
PREFILL = ScalingConfig("model", role="prefill", min_instances=1, max_instances=6, sustain_s=2.0, cooldown_s=1.0)
DECODE = replace(PREFILL, role="decode")


def rush(prompt, output, count=300, rate=60.0, calm_s=0):
    at = np.cumsum(np.random.default_rng(5).exponential(1 / rate, count))
    busy = [Demand(f"r{i}", float(t), prompt, output, PATIENT, max_tokens=output) for i, t in enumerate(at)]
    return [*busy, *(Demand(f"calm{i}", at[-1] + 5.0 + i, 50, 5, PATIENT, max_tokens=5) for i in range(calm_s))]


def run(demands, instances=(P, P, D, D), policy="slackline", most=8, **elastic):
    settings = ElasticSettings(PREFILL, decode=DECODE, most=most, **elastic)
    return simulate(demands, policy, instances, elastic=settings)


def roles(result):
    found = {}
    for use in result.instances:
        found[use.role] = found.get(use.role, 0) + 1
    return found


def kinds(result, kind):
    return [decision for decision in result.decisions if decision.kind == kind]


def test_the_stage_that_has_too_much_grows_alone():
    grown = run(rush(700, 2))
    assert {decision.subject for decision in kinds(grown, "scale_out")} == {"model/prefill"}
    assert roles(grown)["prefill"] > 2
    assert all(record.outcome is Outcome.OK for record in grown.records)
    still = simulate(rush(700, 2), "slackline", (P, P, D, D))
    assert sum(r.attained for r in grown.records) > sum(r.attained for r in still.records)


def test_all_stages_together_never_have_more_than_most():
    result = run(rush(700, 40, rate=90.0), most=5)
    assert max(sample.instances for sample in result.samples) <= 5
    assert len(result.records) == 300


def test_an_idle_decode_instance_becomes_a_prefill_instance():
    result = run(rush(900, 2, count=500), (P, D, D, D), most=4)
    changes = kinds(result, "role_change")
    assert changes
    assert {decision.subject for decision in changes} <= {"model/decode", "model/prefill"}
    assert changes[0].figures["to"] == "prefill"
    assert max(sample.instances for sample in result.samples) <= 4
    assert roles(result)["prefill"] >= 2
    assert all(record.outcome is Outcome.OK for record in result.records)
    fixed = simulate(rush(900, 2, count=500), "slackline", (P, D, D, D))
    assert sum(r.attained for r in result.records) > sum(r.attained for r in fixed.records)


@pytest.mark.parametrize(("output", "rate"), [(4, 60.0), (20, 50.0)])
def test_stages_that_scale_attain_what_fixed_ones_do_whatever_the_thresholds_tolerate(output, rate):
    """Each prefill instance of two is 0.8 busy. The first tick sees 0.15 of that, and `upper` 2 tolerates twice what
    one can do, so the stage gave away what the rush needed: 243 and 270 of 300 requests attained (decision 309)."""
    lax = replace(PREFILL, upper=2.0, lower=0.8, sustain_s=1.0)
    settings = ElasticSettings(lax, decode=replace(lax, role="decode"), most=8)
    demands = rush(400, output, rate=rate)
    fixed, scaled = (simulate(demands, "slackline", (P, P, D, D), elastic=each) for each in (None, settings))
    assert sum(r.attained for r in scaled.records) >= sum(r.attained for r in fixed.records)
    left = [decision for decision in kinds(scaled, "scale_in") if decision.at < demands[-1].at]
    assert all(decision.subject == "model/decode" for decision in left), "decode had a spare one, prefill did not"


def test_a_switch_costs_no_second_instance():
    """Its two lives follow each other: provisioned time is that of four instances, not of five."""
    result = run(rush(900, 2, count=500), (P, D, D, D), most=4)
    assert sum(use.provisioned_s for use in result.instances) <= 4 * result.ended_at + 1e-6


def test_it_shrinks_when_it_is_over():
    result = run(rush(700, 30, calm_s=40))
    last = result.samples[-1].instances
    assert last < max(sample.instances for sample in result.samples)
    assert all(record.outcome is Outcome.OK for record in result.records)


def test_the_same_run_twice_is_the_same():
    assert facts(run(rush(700, 20))) == facts(run(rush(700, 20)))


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: ElasticSettings(DECODE), "scaling.role"),
        (lambda: ElasticSettings(PREFILL, decode=PREFILL), "scaling.role"),
        (lambda: ElasticSettings(PREFILL, decode=DECODE, most=0), "most"),
        (lambda: ElasticSettings(PREFILL, decode=DECODE, switch_s=-1), "switch_s"),
        (lambda: SimulationSettings((P, D), elastic=ElasticSettings(ScalingConfig("model"))), "elastic.decode"),
        (lambda: SimulationSettings((P, D), elastic=ElasticSettings(PREFILL, decode=DECODE, most=1)), "elastic.most"),
        (
            lambda: SimulationSettings(
                (P, P, D), elastic=ElasticSettings(replace(PREFILL, max_instances=1), decode=DECODE)
            ),
            "elastic.max_instances",
        ),
    ],
)
def test_wrong_settings_name_their_field(build, field):
    with pytest.raises(ConfigError) as caught:
        build()
    assert caught.value.field == field


def test_a_warm_instance_takes_the_role_of_the_stage_that_asks():
    """Its process is of no role: both of the pool go to prefill here, in the seconds that weights take."""
    result = run(rush(700, 2), start_s=20.0, warm=2)
    warm = [each for each in result.scaled_out if each.warm]
    assert [each.up_at - each.asked_at for each in warm] == pytest.approx([0.89] * 2)
    by_id = {use.id: use.role for use in result.instances}
    assert {by_id[each.id] for each in warm} == {"prefill"}
    assert all(record.outcome is Outcome.OK for record in result.records)
    assert len(result.records) == 300


def test_an_instance_that_fails_while_it_changes_its_role_is_replaced():
    """It was drained for prefill when it died: prefill must not count on it, and gets another."""
    settings = ElasticSettings(replace(PREFILL, max_instances=2), decode=DECODE, most=4)
    demands, fleet = rush(900, 2, count=500), (P, D, D, D)
    switch = kinds(simulate(demands, "slackline", fleet, elastic=settings), "role_change")[0]
    died = Failure(int(str(switch.figures["instance"]).removeprefix("engine-")), switch.at + 0.1)
    result = simulate(demands, "slackline", fleet, elastic=settings, failures=(died,))
    assert kinds(result, "role_change")[0] == switch
    assert roles(result)["prefill"] == 2
    assert all(record.outcome is Outcome.OK for record in result.records)


def test_each_stage_sees_its_own_traffic_beside_a_collocated_instance(monkeypatch):
    """As the gateway publishes it: what a collocated instance takes is no demand for prefill and no work of decode."""
    seen, whole = [], Elastic.observe

    def observe(elastic, stage, now):
        look = whole(elastic, stage, now)
        seen.append((stage.role, now, look.arrival_rate))
        return look

    monkeypatch.setattr(Elastic, "observe", observe)
    fixed = (replace(each, min_instances=2, max_instances=2) for each in (PREFILL, DECODE))
    first, second = fixed
    settings = ElasticSettings(first, decode=second, most=5)
    result = simulate(rush(100, 20, rate=20.0), "round_robin", (P, P, D, D, SMALL), elastic=settings)
    alone = {record.id for record in result.records if not record.prefill_instance}
    assert 50 < len(alone) < 150  # a third, since rounds go over three instances
    at = max(now for _, now, _ in seen if now <= 14.0)
    rates = {role: rate for role, now, rate in seen if now == at}
    recent = [record for record in result.records if at - 10.0 <= record.at <= at]
    apart = len([record for record in recent if record.id not in alone]) / 10.0
    assert rates["prefill"] == pytest.approx(apart, rel=0.1)
    assert rates["decode"] == pytest.approx(apart, rel=0.1)
    assert len(recent) / 10.0 > 1.3 * rates["prefill"]
