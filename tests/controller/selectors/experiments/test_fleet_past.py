"""A replay's fleet: as many instances at every moment as the scaler counted then."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.utils import timezone

from controller.core.errors import ConfigError
from controller.models import Instance, InstanceInterval, ScalingSample
from controller.selectors.experiments.fleet_model import fleet_today
from controller.selectors.experiments.fleet_past import (
    COUNTED_ELSE_TURNED,
    NOT_ON_RECORD,
    TURNED,
    TURNED_TOO,
    Span,
    fleet_then,
    spans_of,
)
from controller.services.experiments.reading import read
from controller.services.experiments.specs import resolved
from controller.simulator.fleet.presence import numbers
from tests import experiment_data as data
from tests import factories
from workers.experiments.preview_sample import newest

HOUR = timedelta(hours=1)


@pytest.mark.parametrize(
    ("counts", "spans"),
    [
        ([(5.0, 2)], [(0.0, None), (0.0, None)]),
        ([(0.0, 1), (10.0, 3), (20.0, 1)], [(10.0, 20.0), (10.0, 20.0), (0.0, None)]),
        ([(0.0, 2), (10.0, 0), (15.0, 1)], [(0.0, 10.0), (0.0, 10.0), (15.0, None)]),
        ([(0.0, 0), (7.0, 1)], [(7.0, None)]),
        ([(0.0, 0)], []),
        ([], []),
    ],
)
def test_counts_become_instances_that_come_and_go(counts, spans):
    assert sorted(spans_of(counts), key=str) == sorted((Span(*each) for each in spans), key=str)


def sampled(policy, start, *counts, load=0.5):
    """(seconds after the start, ready) of one policy."""
    for seconds, ready in counts:
        at = start + timedelta(seconds=seconds)
        ScalingSample.objects.create(
            policy=policy, at=at, load=load, ready=ready, starting=0, draining=0, mind="steady"
        )  # fmt: skip


def there(fleet):
    """(joined, left) of each; None: it stayed."""
    return sorted(((each["from_s"], each.get("until_s")) for each in fleet.groups), key=str)


@pytest.fixture
def start(db):
    return timezone.now() - HOUR


@pytest.fixture
def policy(db):
    return factories.scaling_policy(data.fleet(instances=2))


def then(start, *args, **fields):
    return fleet_then("demo", start, start + HOUR, *args, **fields)


def test_as_many_as_were_counted(policy, start):
    sampled(policy, start, (1, 2), (6, 2), (11, 3), (16, 3), (21, 1))
    found = then(start)
    assert there(found) == [(0.0, 21.0), (0.0, None), (11.0, 21.0)]
    assert found.note == "Uses the number of instances that the scaler recorded: 1 to 3."
    assert {each["model"] for each in found.groups} == {"demo"}


def test_one_less_and_one_more_at_every_moment_but_never_none(policy, start):
    sampled(policy, start, (0, 2), (10, 1), (20, 3))
    assert there(then(start, -1)) == [(0.0, None), (20.0, None)]
    assert there(then(start, 1)) == [(0.0, 10.0), (0.0, None), (0.0, None), (20.0, None), (20.0, None)]
    assert then(start, -1).note == then(start, 1).note


def test_a_look_without_telemetry_is_no_outage_and_an_outage_is_one(policy, start):
    sampled(policy, start, (0, 2), (10, 2))
    sampled(policy, start, (5, 0), load=None)
    assert there(then(start)) == [(0.0, None), (0.0, None)]
    sampled(policy, start, (20, 0), (30, 2), load=9.0)
    assert there(then(start)) == [(0.0, 20.0), (0.0, 20.0), (30.0, None), (30.0, None)]


def test_what_no_policy_counted_is_todays_and_said_to_be(policy, start):
    found = then(start)
    assert (found.note, [each["count"] for each in found.groups]) == (NOT_ON_RECORD, [2])
    assert [each["count"] for each in then(start, 1).groups] == [3]
    other = factories.scaling_policy(factories.served_model(name="other"))
    sampled(other, start, (1, 9))
    assert then(start).note == NOT_ON_RECORD


def test_roles_have_their_own_counts(start):
    model = data.fleet(instances=1)
    Instance.objects.update(role="prefill")
    factories.instance(model, device_kind="a100", role="decode")
    sampled(factories.scaling_policy(model, role="prefill"), start, (0, 1), (10, 2))
    sampled(factories.scaling_policy(model, role="decode"), start, (0, 2))
    found = then(start, 1, role="decode")
    by_role = {role: [each for each in found.groups if each["role"] == role] for role in ("prefill", "decode")}
    assert [each["from_s"] for each in by_role["prefill"]] == [0.0, 10.0]
    assert len(by_role["decode"]) == 3
    assert "3 to 4" in found.note


def turned(row, start, *roles):
    """(seconds after the start, role) of one instance, oldest first."""
    at = [start + timedelta(seconds=seconds) for seconds, _ in roles]
    for (_, role), began, ended in zip(roles, at, [*at[1:], None], strict=True):
        InstanceInterval.objects.create(instance=row, role=role, unit_cost=1.0, started_at=began, ended_at=ended)
    row.role = roles[-1][1]
    row.save()


def spans(fleet, role):
    return there(fleet._replace(groups=[each for each in fleet.groups if each.get("role", "collocated") == role]))


def test_todays_instances_have_the_roles_of_then_where_no_one_counted(start):
    first, second = data.fleet(instances=2).instances.order_by("id")
    turned(first, start, (-60, "collocated"), (100, "prefill"))
    turned(second, start, (-60, "collocated"), (100, "decode"))
    found = then(start)
    assert found.note == TURNED
    assert spans(found, "collocated") == [(0.0, 100.0), (0.0, 100.0)]
    assert spans(found, "prefill") == spans(found, "decode") == [(100.0, None)]


def test_a_turn_after_the_window_is_undone_and_one_before_it_stands(start):
    first, second, third = data.fleet(instances=3).instances.order_by("id")
    turned(first, start, (-60, "decode"), (HOUR.total_seconds() + 9, "prefill"))
    turned(second, start, (-60, "prefill"), (-30, "decode"))
    turned(third, start, (-60, "prefill"))
    found = then(start)
    assert found.note == TURNED
    assert (spans(found, "prefill"), spans(found, "decode")) == ([(0.0, None)], [(0.0, None), (0.0, None)])


def replayed(start):
    """The settings of a run on the fleet of then, and what is noted."""
    data.traffic(35, every_s=100.0)
    window = {"kind": "window", "since": start.isoformat(), "until": (start + HOUR).isoformat(), "model": "demo"}
    asked = {"workload": window, "instances": {"fleet": "then", "model": "demo"}, "policies": ["slackline"]}
    spec, notes = resolved({"name": "then", **asked}, data.no_profile)
    return read(spec)[0].settings, notes


def test_where_the_other_stage_of_then_is_gone_the_fleet_is_todays(start):
    """One stage alone is refused by the simulator."""
    first, second = data.fleet(instances=2).instances.order_by("id")
    turned(first, start, (-60, "decode"))
    turned(second, start, (-60, "decode"), (HOUR.total_seconds() + 9, "prefill"))
    found = then(start)
    assert (found.groups, found.note) == (fleet_today("demo"), NOT_ON_RECORD)
    settings, notes = replayed(start)
    assert (NOT_ON_RECORD in notes, {each.role for each in settings.instances}) == (True, {"prefill", "decode"})


def test_a_stage_that_is_alone_when_the_first_request_comes_is_replayed(start):
    """Two that served together turn one after the other, and it comes between."""
    first, second = data.fleet(instances=2).instances.order_by("id")
    turned(first, start, (-60, "prefill"), (100, "collocated"))
    turned(second, start, (-60, "decode"), (300, "collocated"))
    settings, _ = replayed(start)
    assert sorted((each.role, each.from_s > 0) for each in settings.instances if not each.left) == [
        ("collocated", False), ("collocated", True), ("decode", False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("before", "first_s"),
    [
        (None, 1799.9),
        (None, 1800.0),
        (None, 1805.0),
        ("off", None),
        ("silent", None),
        ("off", 1799.9),
        ("silent", 1805.0),
    ],
)
def test_policies_made_or_switched_off_at_a_role_change_count_no_instance_twice(start, before, first_s):
    """`before`: what the policy of the role that nobody has any more was after the turn. `first_s`: the first look of
    the others."""
    model = data.fleet(instances=2)
    for row, role in zip(model.instances.order_by("id"), ("prefill", "decode"), strict=True):
        turned(row, start, (-60, "collocated"), (1800, role))
        if first_s is not None:
            sampled(factories.scaling_policy(model, role=role), start, (first_s, 1), (3595, 1))
    if before is not None:
        policy = factories.scaling_policy(model)
        sampled(policy, start, (3, 2), (1795, 2))
        if before == "silent":
            sampled(policy, start, (1805, 0), (3595, 0), load=None)
    settings, notes = replayed(start)
    assert numbers(settings) == (2, 2)
    assert COUNTED_ELSE_TURNED in notes


def test_a_role_that_was_given_up_and_taken_again_is_not_held_between(start):
    model = data.fleet(instances=2)
    for row, role in zip(model.instances.order_by("id"), ("prefill", "decode"), strict=True):
        turned(row, start, (-60, "collocated"), (1000, role), (2000, "collocated"))
    sampled(factories.scaling_policy(model), start, (3, 2), (995, 2), (2005, 2), (3595, 2))
    settings, _ = replayed(start)
    assert numbers(settings) == (2, 2)


def test_what_the_scaler_counted_goes_before_what_turned(start):
    model = data.fleet(instances=3)
    first, *others = model.instances.order_by("id")
    for row in others:
        turned(row, start, (-60, "prefill"))
    turned(first, start, (-60, "prefill"), (100, "decode"))
    sampled(factories.scaling_policy(model, role="prefill"), start, (0, 4), (100, 3), (105, 3), (110, 3))
    found = then(start)
    assert found.note == COUNTED_ELSE_TURNED
    assert spans(found, "prefill") == [(0.0, 100.0), (0.0, 100.0), (0.0, None), (0.0, None), (105.0, None)]
    assert spans(found, "decode") == [(100.0, None)]


def test_a_role_in_which_no_one_turned_is_as_counted(start):
    model = data.fleet(instances=3)
    first, second, third = model.instances.order_by("id")
    turned(first, start, (-60, "prefill"))
    turned(second, start, (-60, "decode"))
    turned(third, start, (-60, "collocated"), (100, "decode"))
    sampled(factories.scaling_policy(model, role="prefill"), start, (0, 1), (100, 2))
    found = then(start)
    assert found.note == f"Uses the number of instances that the scaler recorded: 1 to 2. {TURNED_TOO}"
    assert spans(found, "prefill") == [(0.0, None), (100.0, None)]
    assert spans(found, "decode") == [(0.0, None), (100.0, None)]


@pytest.mark.parametrize(("left_s", "note"), [(HOUR.total_seconds() + 9, TURNED), (100, NOT_ON_RECORD)])
def test_a_role_that_cannot_be_simulated_matters_only_where_somebody_had_it_then(start, left_s, note):
    """It decoded after the window, or in it, under a scheduler whose simulated engine takes over no KV."""
    model = data.fleet(instances=2)
    told = {"spec": {"scheduler": "slackline"}, "started_role": "prefill"}
    odd = factories.instance(model, device_kind="a100", max_num_seqs=16, **told)
    turned(odd, start, (-60, "collocated"), (left_s, "decode"), (left_s + 60, "collocated"))
    found = then(start)
    assert found.note == note
    assert sum(each["count"] for each in found.groups) == 3


@pytest.mark.parametrize(("change", "role", "field"), [(65, None, "instances.change"), (1, "decode", "instances.role")])
def test_nonsense_is_refused_by_name(policy, start, change, role, field):
    sampled(policy, start, (0, 2))
    with pytest.raises(ConfigError) as refused:
        then(start, change, role=role)
    assert refused.value.field == field


def asked(start, **changes):
    window = {"kind": "window", "since": start.isoformat(), "until": timezone.now().isoformat(), "model": "demo"}
    fleet = {"fleet": "then", "model": "demo"}
    policies = [
        {"name": "slackline", "label": "then", "instances": fleet},
        {"name": "slackline", "label": "less", "instances": {**fleet, "change": -1}},
    ]
    return {"name": "then", "workload": window, "policies": policies, **changes}


def test_an_experiment_on_the_fleet_of_then(policy, start):
    sampled(policy, start, (0, 3), (3500, 2))
    data.traffic(30, every_s=10.0)
    spec, notes = resolved(asked(start), data.no_profile)
    assert notes == ["Uses the number of instances that the scaler recorded: 2 to 3."]
    then, less = read(spec)
    began = then.workload.began - start.timestamp()
    assert [each.until_s for each in then.settings.instances if each.until_s] == [pytest.approx(3500 - began)]
    assert (len(then.settings.instances), len(less.settings.instances)) == (3, 2)


def test_the_newest_requests_meet_the_instances_of_their_time(policy, start):
    """The run begins with the first request that is simulated."""
    data.traffic(100, every_s=1.0)
    spec, _ = resolved(asked(start), data.no_profile)
    first, _ = read(spec)
    began = first.workload.began - start.timestamp()
    sampled(policy, start, (0, 1), (began + 50, 2), (began + 80, 1))
    first, _ = read(resolved(asked(start), data.no_profile)[0])
    assert sorted((each.from_s, each.until_s or 0) for each in first.settings.instances) == [
        (0.0, 0), (pytest.approx(50, abs=0.1), pytest.approx(80, abs=0.1)),
    ]  # fmt: skip
    last = newest(first, 40)
    assert sorted((each.from_s, each.until_s or 0) for each in last.settings.instances) == [
        (0.0, 0), (0.0, pytest.approx(20, abs=0.1)),
    ]  # fmt: skip
    assert [each.left for each in newest(first, 10).settings.instances].count(False) == 1


def test_without_recorded_traffic_there_is_no_then(policy, start):
    with pytest.raises(ConfigError, match="recorded traffic") as refused:
        resolved(asked(start, workload=data.MIX), data.no_profile)
    assert refused.value.field == "policies[0].instances.fleet"


@pytest.mark.parametrize("stretched", [{"rates": [5.0]}, {"knee": {"policy": "round_robin"}}])
def test_traffic_that_is_stretched_to_a_rate_has_no_fleet_of_then(policy, start, stretched):
    data.traffic(5)
    with pytest.raises(ConfigError, match="original times") as refused:
        resolved(asked(start, **stretched), data.no_profile)
    assert [refused.value.field] == list(stretched)
