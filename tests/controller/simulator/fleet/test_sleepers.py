"""Sleepers in virtual time: woken before anything is started, put to sleep instead of stopped, nothing lost."""

from dataclasses import replace

import pytest

from controller.core.errors import ConfigError
from controller.core.types import Outcome
from controller.simulator import ElasticSettings, SimulationSettings
from controller.simulator.experiment import parse_experiment
from controller.simulator.report.summary import report, time_to_scale
from tests.controller.simulator.fleet.test_elastic import QUICK, wave
from tests.controller.simulator.fleet.test_elastic_roles import DECODE, PREFILL, D, P, rush
from tests.controller.simulator.runs import SMALL, facts, simulate
from tests.controller.simulator.test_machine_speed import FILE

LOAD = {"device": 0.9, "host": 2.7, "disk": 4.1}
START_S = 6.0
LIGHT, DEEP = (replace(SMALL, sleep_level=level) for level in (1, 2))


def sleeping(*instances, source="device", **elastic):
    settings = ElasticSettings(QUICK, source, LOAD, start_s=START_S, **elastic)
    return simulate(wave(), "slackline", (SMALL, *instances), elastic=settings)


def times(result):
    return {each.id: each.up_at - each.asked_at for each in result.scaled_out}


def figures(result, name):
    return [decision.figures[name] for decision in result.decisions if name in decision.figures]


def test_a_sleeper_is_woken_before_a_new_instance_is_started():
    result = sleeping(LIGHT)
    first, second, *_ = result.scaled_out
    assert (first.id, first.woken) == ("engine-1", True)
    assert (second.id, second.woken, second.warm) == ("engine-2", False, False)
    assert figures(result, "woken") == ["engine-1"]
    assert figures(result, "started")[:2] == ["engine-1", "engine-2"]
    assert {record.instance for record in result.records} >= {"engine-0", "engine-1", "engine-2"}


def test_what_was_woken_serves_sooner_and_more_requests_attain_their_targets():
    woken, started = sleeping(LIGHT, LIGHT), sleeping()
    assert time_to_scale(woken) == pytest.approx(LOAD["host"])
    assert time_to_scale(started) == pytest.approx(START_S + LOAD["device"])
    assert sum(r.attained for r in woken.records) > sum(r.attained for r in started.records)


def test_the_nearest_weights_come_first_a_light_sleeper_then_a_warm_spare():
    """A deep sleeper's weights come from another engine as a warm spare's do; here it has waited as long, and its id is
    the lower one."""
    result = sleeping(DEEP, LIGHT, warm=1)
    assert [each.id for each in result.scaled_out][:2] == ["engine-2", "engine-1"]
    result = sleeping(LIGHT, warm=1)
    assert [(each.id, each.woken, each.warm) for each in result.scaled_out][:2] == [
        ("engine-1", True, True), ("engine-2", False, True),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("sleeper", "source", "wake_s", "seconds"),
    [
        (LIGHT, "device", None, 2.7),
        (LIGHT, "disk", None, 2.7),
        (DEEP, "device", None, 0.9),
        (DEEP, "disk", None, 4.1),
        (LIGHT, "device", 0.5, 0.5),
        (DEEP, "device", 0.0, 0.0),
    ],
)
def test_how_long_it_takes_to_wake(sleeper, source, wake_s, seconds):
    assert times(sleeping(sleeper, source=source, wake_s=wake_s))["engine-1"] == pytest.approx(seconds)


def test_it_serves_once_it_is_awake_and_not_before():
    result = sleeping(LIGHT, LIGHT)
    assert len(result.scaled_out) == 2
    for each in result.scaled_out:
        sent = [r.at + r.queue_s for r in result.records if r.instance == each.id]
        assert min(sent) >= each.up_at


def test_what_scales_in_falls_asleep_and_is_woken_again():
    result = sleeping(sleep_level=1)
    slept = figures(result, "asleep")
    assert slept
    assert [d.kind for d in result.decisions if "asleep" in d.figures] == ["scale_in"] * len(slept)
    again = simulate(
        [*wave(), *(replace(d, id=f"{d.id} again", at=d.at + 70.0) for d in wave())],
        "slackline",
        (SMALL,),
        elastic=ElasticSettings(QUICK, "device", LOAD, start_s=START_S, sleep_level=1),
    )
    woken = figures(again, "woken")
    assert woken
    assert set(woken) <= set(figures(again, "asleep"))
    assert len({use.id for use in again.instances}) == len(again.instances) == QUICK.max_instances
    late = [r for r in again.records if r.id.endswith("again")]
    assert {r.instance for r in late} & set(woken)


def test_a_sleeper_costs_as_long_as_it_sleeps_and_counts_as_no_capacity():
    result = sleeping(LIGHT)
    slept = next(use for use in result.instances if use.id == "engine-1")
    first = next(each for each in result.scaled_out if each.id == "engine-1")
    assert slept.provisioned_s > first.asked_at
    assert slept.generated_tokens > 0
    assert max(sample.instances for sample in result.samples) == QUICK.max_instances
    assert result.samples[0].instances == 1
    for use in result.instances:
        assert 0 <= use.provisioned_s <= result.ended_at


@pytest.mark.parametrize("sleep_level", [0, 1, 2])
def test_no_request_is_lost_or_doubled(sleep_level):
    result = sleeping(LIGHT, DEEP, sleep_level=sleep_level)
    assert sorted(r.id for r in result.records) == sorted(demand.id for demand in wave())
    assert all(r.outcome is Outcome.OK for r in result.records)
    assert facts(result) == facts(sleeping(LIGHT, DEEP, sleep_level=sleep_level))


def test_a_sleeper_is_woken_by_the_stage_of_its_role():
    """Prefill has too much to do; the decode instance that sleeps is none of its sources."""
    sleepers = (replace(D, sleep_level=1), replace(P, sleep_level=1))
    settings = ElasticSettings(PREFILL, "device", LOAD, DECODE, most=8, start_s=START_S)
    result = simulate(rush(700, 2), "slackline", (P, P, D, D, *sleepers), elastic=settings)
    assert [each.id for each in result.scaled_out if each.woken] == ["engine-5"]
    assert result.scaled_out[0].id == "engine-5"
    roles = {use.id: use.role for use in result.instances}
    assert (roles["engine-4"], roles["engine-5"]) == ("decode", "prefill")
    assert all(record.outcome is Outcome.OK for record in result.records)


def test_the_result_names_what_was_woken_and_what_fell_asleep():
    told = report(sleeping(LIGHT, sleep_level=2))["decisions"]
    assert {"kind": "scale_out", "reason": "load_above_upper", "woken": "engine-1"}.items() <= told[0].items()
    assert [each["asleep"] for each in told if each["kind"] == "scale_in"]
    assert all(set(each) == {"at_s", "kind", "reason"} for each in report(sleeping())["decisions"])


# ---- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: ElasticSettings(QUICK, sleep_level=3), "sleep_level"),
        (lambda: ElasticSettings(QUICK, wake_s=-1.0), "wake_s"),
        (lambda: ElasticSettings(QUICK, wake_s=float("inf")), "wake_s"),
        (lambda: replace(SMALL, sleep_level=3), "sleep_level"),
        (lambda: replace(SMALL, sleep_level=True), "sleep_level"),
        (lambda: replace(SMALL, sleep_level=1, from_s=5.0), "sleep_level"),
        (lambda: replace(SMALL, sleep_level=1, until_s=5.0), "sleep_level"),
        (lambda: SimulationSettings((SMALL, LIGHT)), "instances.sleep_level"),
        (lambda: SimulationSettings((LIGHT,), elastic=ElasticSettings(QUICK)), "instances.sleep_level"),
    ],
)
def test_wrong_settings_name_their_field(build, field):
    with pytest.raises(ConfigError) as caught:
        build()
    assert caught.value.field == field


def test_sleepers_count_toward_no_bound():
    made = SimulationSettings((SMALL, *[LIGHT] * 5), elastic=ElasticSettings(QUICK, most=2))
    assert len(made.instances) == 6


def from_file(elastic, **sleeper):
    first = FILE["instances"]
    settings = {} if elastic is None else {"elastic": elastic}
    raw = {**FILE, "instances": [first, {**first, **sleeper}], "settings": settings}
    return parse_experiment(raw, lambda path: {}, lambda path: []).settings


def test_an_experiment_file_may_have_sleepers():
    settings = from_file({"sleep_level": 2, "wake_s": 1.5}, sleep_level=1)
    assert [each.sleep_level for each in settings.instances] == [0, 1]
    assert (settings.elastic.sleep_level, settings.elastic.wake_s) == (2, 1.5)
    assert from_file({}).elastic.wake_s is None


@pytest.mark.parametrize(
    ("elastic", "sleeper", "field"),
    [
        ({"sleep_level": 3}, {}, "settings.elastic.sleep_level"),
        ({"sleep_level": "deep"}, {}, "settings.elastic.sleep_level"),
        ({"wake_s": -2}, {}, "settings.elastic.wake_s"),
        ({"wake_s": "soon"}, {}, "settings.elastic.wake_s"),
        ({}, {"sleep_level": 7}, "instances[1].sleep_level"),
        (None, {"sleep_level": 1}, "instances.sleep_level"),
    ],
)
def test_an_experiment_file_with_wrong_sleepers_names_the_field(elastic, sleeper, field):
    with pytest.raises(ConfigError) as caught:
        from_file(elastic, **sleeper)
    assert caught.value.field == field
