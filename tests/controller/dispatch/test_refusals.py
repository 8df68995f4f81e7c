"""What the dispatcher refuses or drops, with field and figures that say why; and policy sets that are not built."""

import math

import pytest

from controller.core import events as ev
from controller.core.errors import ConfigError, UnknownName
from controller.core.types import InstanceSpec, LatencyCoefficients, Load
from controller.dispatch import build_dispatcher
from controller.dispatch.dispatcher import DispatchConfig
from tests.controller.dispatch.fleet import SPEED, kinds, request, sends, up


def test_waiting_time_ends_a_request_with_its_error():
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up(slots=1)], 0.0)
    dispatcher.handle([ev.Arrived(request("a"))], 0.0)
    reply = dispatcher.handle([ev.Arrived(request("b", wait=2.0))], 0.0)
    assert reply.wake_at is not None
    assert reply.wake_at <= 2.0
    assert kinds(dispatcher.handle([ev.Woke()], 1.9), ev.Drop) == []
    dropped = dispatcher.handle([ev.Woke()], 2.0)
    assert kinds(dropped, ev.Drop) == ["b"]
    decision = dropped.actions[0].decision
    assert decision.reason == "waiting_time"
    assert (decision.figures["instances"], decision.figures["outstanding"], decision.figures["queued"]) == (1, 1, 0)
    assert decision.rejected == {"w": {"outstanding": 1, "waiting_tokens": 100}}


def test_an_expiry_over_a_large_fleet_counts_it_and_names_none():
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up(f"w{number}", slots=1) for number in range(9)], 0.0)
    dispatcher.handle([ev.Arrived(request(f"a{number}")) for number in range(9)], 0.0)
    (dropped,) = dispatcher.handle([ev.Arrived(request("b", wait=0.0))], 0.0).actions
    assert (dropped.decision.figures["instances"], dropped.decision.figures["outstanding"]) == (9, 9)
    assert dropped.decision.rejected == {}


def test_a_waiting_time_of_nothing_means_now_or_never():
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up(slots=1)], 0.0)
    parsed_at = 0.001  # a millisecond after it came
    assert sends(dispatcher.handle([ev.Arrived(request("a", wait=0.0))], parsed_at)) == [("a", "w")]
    assert kinds(dispatcher.handle([ev.Arrived(request("b", wait=0.0))], parsed_at), ev.Drop) == ["b"]


def test_the_first_step_of_a_workflow_is_refused_if_the_whole_deadline_cannot_hold_it():
    """Its share may be too short, and so may those of later steps: others make up for that."""
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up()], 0.0)
    step = {"ttft": 0.1, "deadline": 0.1, "prompt": 20_000, "workflow": "w", "may_defer": True}
    (refusal,) = dispatcher.handle([ev.Arrived(request("a", **step, whole_s=0.3))], 0.0).actions
    assert (refusal.code, refusal.decision.reason) == ("slo_infeasible", "infeasible_alone")
    figures = refusal.decision.figures
    assert (figures["field"], figures["workflow_deadline_s"]) == ("workflow_deadline", 0.3)
    assert "deadline_s" not in figures
    for name, whole_s in (("b", 60.0), ("c", None)):
        reply = dispatcher.handle([ev.Arrived(request(name, **step, whole_s=whole_s))], 0.0)
        assert not kinds(reply, ev.Refuse), name


def test_infeasible_alone_is_refused_at_once_with_figures():
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up()], 0.0)
    reply = dispatcher.handle([ev.Arrived(request("a", ttft=0.2, prompt=20_000))], 0.0)
    (refusal,) = reply.actions
    assert (refusal.code, refusal.decision.reason) == ("slo_infeasible", "infeasible_alone")
    assert refusal.decision.figures["prefill_s"] == pytest.approx(2.01)
    assert refusal.decision.figures["field"] == "target_ttft"
    late = request("b", ttft=5.0, prompt=20_000, deadline=0.3)
    (too_late,) = dispatcher.handle([ev.Arrived(late)], 0.0).actions
    assert too_late.decision.figures["field"] == "deadline"
    cut = request("c", ttft=0.3, prompt=20_000, deadline=0.3)  # only the deadline was given: TTFT is cut to it
    (cut_too,) = dispatcher.handle([ev.Arrived(cut)], 0.0).actions
    assert cut_too.decision.figures["field"] == "deadline"
    assert len(dispatcher.queue()) == 0


def test_no_instance_and_a_full_queue_are_refused():
    dispatcher = build_dispatcher("slackline", {"dispatch": {"max_queue": 1}})
    nobody = dispatcher.handle([ev.Arrived(request("a"))], 0.0)
    assert nobody.actions[0].code == "no_capacity"
    dispatcher.handle([up(slots=1), ev.Arrived(request("b")), ev.Arrived(request("c"))], 0.0)
    full = dispatcher.handle([ev.Arrived(request("d")), ev.Arrived(request("e"))], 0.0)
    assert [a.code for a in full.actions] == ["rate_limit_exceeded"] * len(full.actions)
    assert full.actions[0].retry_after_s >= 1


def test_an_unattainable_tpot_is_refused_by_name():
    dispatcher = build_dispatcher("slackline")
    reply = dispatcher.handle([up(), ev.Arrived(request("a", tpot=0.0015))], 0.0)
    assert reply.actions[0].decision.figures["field"] == "target_tbt"


def test_a_class_that_may_be_late_is_not_refused():
    dispatcher = build_dispatcher("slackline")
    late = request("late", ttft=0.1, prompt=20_000, may_defer=True)
    assert sends(dispatcher.handle([up(), ev.Arrived(late)], 0.0)) == [("late", "w")]


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        ({"pacing": {"windw": 3}}, "pacing.windw"),
        ({"pacing": {"window": 0}}, "window"),
        ({"order": {}}, "order"),
        ({"dispatch": {"engine_rank": "fast"}}, "engine_rank"),
        ({"dispatch": {"infeasible_margin": 0}}, "infeasible_margin"),
        ({"dispatch": {"infeasible_margin": -1.5}}, "infeasible_margin"),
        ({"dispatch": {"traffic_window_s": 0}}, "traffic_window_s"),
        ({"dispatch": {"traffic_window_s": -30.0}}, "traffic_window_s"),
        ({"ordering": {"name": "alphabetical"}}, "ordering"),
    ],
)
def test_bad_overrides_are_refused_by_name(overrides, field):
    with pytest.raises(ConfigError) as caught:
        build_dispatcher("fcfs_window", overrides)
    assert caught.value.field == field


@pytest.mark.parametrize("field", ["infeasible_margin", "traffic_window_s", "tightest_share"])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_setting_that_is_no_number_is_refused(field, value):
    with pytest.raises(ConfigError) as caught:
        DispatchConfig(**{field: value})
    assert caught.value.field == field


def test_unknown_policy_set_lists_the_valid_ones():
    with pytest.raises(UnknownName, match="hyperflexis"):
        build_dispatcher("best")


SLOW = LatencyCoefficients(*(40 * each for each in SPEED))


@pytest.mark.parametrize("left", [ev.InstanceDraining("quick"), ev.Telemetry("quick", Load(0.0, awake=False))])
def test_an_instance_that_drains_or_sleeps_keeps_no_target_of_a_new_request(left):
    """Beside one that serves, which is too slow for it. A client that waited for the first would wait in vain."""
    dispatcher = build_dispatcher("slackline")
    slow = ev.InstanceUp(InstanceSpec("slow", "m", latency=SLOW, max_num_seqs=32))
    dispatcher.handle([up("quick"), slow], 0.0)
    asked = {"ttft": 0.5, "prompt": 2000}
    assert sends(dispatcher.handle([ev.Arrived(request("before", **asked))], 0.0)) == [("before", "quick")]
    dispatcher.handle([left], 0.1)
    assert kinds(dispatcher.handle([ev.Arrived(request("after", 0.1, **asked))], 0.1), ev.Refuse) == ["after"]
    dispatcher.handle([ev.InstanceUp(InstanceSpec("other", "m", latency=SPEED, max_num_seqs=32))], 0.2)
    assert sends(dispatcher.handle([ev.Arrived(request("then", 0.2, **asked))], 0.2)) == [("then", "other")]


def test_who_waits_is_judged_again_when_the_only_quick_instance_leaves():
    """It was in time to wait for the quick one's slot; without it, it is late already and goes to the slow one."""
    dispatcher = build_dispatcher("slackline")
    slow = ev.InstanceUp(InstanceSpec("slow", "m", latency=SLOW, max_num_seqs=32))
    dispatcher.handle([up("quick", slots=1), slow, ev.Arrived(request("first", ttft=5.0, output=100))], 0.0)
    asked = {"ttft": 3.0, "prompt": 2000}
    assert sends(dispatcher.handle([ev.Arrived(request("waits", 0.1, **asked))], 0.1)) == []
    reply = dispatcher.handle([ev.InstanceDown("quick")], 0.2)
    assert ("waits", "slow") in sends(reply)
