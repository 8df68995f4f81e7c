"""Actions against a real database and a scripted engine: carried out once, whatever happens to whoever looks."""

import threading
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
from django.utils import timezone

from controller.models import Action, Decision, Instance
from controller.selectors.fleet.weights import weight_plan
from controller.services.fleet.actions import action_lease
from controller.services.fleet.instances import instance_stop
from tests import factories
from tests.workers.scripted_engine import Engine, order
from tests.workers.sleep_orders import OLGA, Killed, lease_runs_out
from workers.actions import runner as actions
from workers.actions.runner import advance_actions
from workers.actions.weights_client import EngineAway, EngineRefuses, EngineWeights

pytestmark = [pytest.mark.db, pytest.mark.django_db, pytest.mark.usefixtures("patient")]


def test_weights_come_from_the_engine_that_was_chosen(warm, holder, engine, look_once):
    action = order(warm)
    assert look_once() == []
    assert engine.orders == [(f"action-{action.pk}-1", [holder.url, "disk"])]
    assert look_once() == []  # it loads
    engine.ends(("engine", holder.url, ""))
    (decision,) = look_once()
    assert (decision.kind, decision.subject, decision.reason) == ("weights_load", "warm", "from_engine")
    assert (decision.inputs["source"], decision.inputs["reason"]) == ("holder", "same_host")
    assert (decision.outcome["from"], decision.outcome["load_s"], decision.outcome["bytes"]) == ("holder", 0.5, 100)
    action.refresh_from_db()
    assert (action.state, action.tries, action.decision) == ("done", 1, decision)
    assert [(each["kind"], each["source"], each["error"]) for each in action.attempts] == [("engine", "holder", "")]
    assert Instance.objects.get(pk="warm").weights == "present"
    assert look_once() == []
    assert len(engine.orders) == 1


def test_ready_is_when_the_engine_had_them_not_when_it_was_looked_at(warm, holder, engine, look_once):
    action = order(warm)
    look_once()
    Action.objects.filter(pk=action.pk).update(created_at=timezone.now() - timedelta(seconds=30))
    engine.ends(("engine", holder.url, ""))
    engine.said = replace(engine.said, present_s=20.0)
    (decision,) = look_once()
    assert decision.outcome["ready_s"] == pytest.approx(10.0, abs=0.5)
    assert decision.inputs["ordered_s"] == pytest.approx(30.0, abs=0.5)


def test_the_engine_that_sends_now_counts_as_sending_and_those_tried_before_do_not(warm, holder, engine, look_once):
    """For the next plan: two that are as near, and of them the one that sends nothing."""
    second = factories.instance(holder.model, id="second")
    other = factories.instance(holder.model, id="other", weights="absent")
    order(warm)
    look_once()
    assert engine.orders[0][1] == [holder.url, second.url, "disk"]

    def first_choice():
        assert look_once() == []
        plan = weight_plan(other, {})
        return plan.choices[0].id, plan.figures["source_transfers"]

    assert first_choice() == ("second", 0), "the holder sends"
    cut = {"kind": "engine", "url": holder.url, "seconds": 0.5, "bytes": 0, "error": "it broke off"}
    engine.said = replace(engine.said, attempts=[cut])
    assert first_choice() == ("holder", 0), "the second sends"
    engine.said = replace(engine.said, attempts=[cut, {**cut, "url": second.url}])
    assert first_choice() == ("holder", 0), "nobody does: the disk is read"
    assert weight_plan(other, {"holder": 0.5}).choices[0].id == "second"


def test_each_attempt_is_recorded(warm, holder, engine, look_once):
    action = order(warm)
    look_once()
    engine.ends(("engine", holder.url, "cut at 50 %"), ("disk", "", ""))
    (decision,) = look_once()
    assert decision.reason == "from_disk"
    action.refresh_from_db()
    assert [(each["kind"], each["error"]) for each in action.attempts] == [("engine", "cut at 50 %"), ("disk", "")]


def test_sources_that_were_named_are_what_is_tried(warm, engine, look_once):
    order(warm, sources=[{"kind": "disk"}])
    look_once()
    assert engine.orders[0][1] == ["disk"]


@pytest.mark.parametrize("when", ["look", "order", "after"])
def test_a_worker_killed_at_any_point_leaves_one_load_and_one_decision(warm, holder, engine, look_once, when):
    action = order(warm)
    engine.fails[when] = [Killed()]
    with pytest.raises(Killed):
        look_once()
    assert look_once() == []  # its lease runs still
    told = len(engine.orders)
    lease_runs_out()
    look_once()
    assert len(engine.orders) == 1
    assert told == (1 if when == "after" else 0)
    engine.ends(("engine", holder.url, ""))
    assert len(look_once()) == 1
    assert look_once() == []
    assert Decision.objects.filter(kind="weights_load").count() == 1
    assert Action.objects.get(pk=action.pk).state == "done"


def test_two_workers_do_not_look_at_the_same_action(warm, engine, look_once):
    action = order(warm)
    assert action_lease(action_id=action.pk) is not None
    assert action_lease(action_id=action.pk) is None
    assert look_once() == []
    assert engine.orders == []


def test_what_is_there_already_is_not_loaded_again(warm, engine, look_once):
    order(warm)
    engine.said = EngineWeights("present", "somebody", 100)
    (decision,) = look_once()
    assert (decision.reason, engine.orders) == ("present_already", [])
    assert Instance.objects.get(pk="warm").weights == "present"


def test_somebody_elses_load_is_waited_for(warm, engine, look_once):
    order(warm)
    engine.said = EngineWeights("loading", "somebody")
    assert look_once() == []
    assert engine.orders == []


def test_an_order_that_fails_leaves_the_instance_warm(warm, holder, engine, look_once):
    action = order(warm, OLGA)
    look_once()
    engine.ends(("engine", holder.url, "refused"), ("disk", "", "model.safetensors: truncated"))
    (decision,) = look_once()
    assert (decision.kind, decision.reason, decision.actor) == ("weights_load_failed", "no_source", "olga")
    action.refresh_from_db()
    assert action.error == "engine: refused; disk: model.safetensors: truncated"
    row = Instance.objects.get(pk="warm")
    assert (row.weights, row.desired_state) == ("absent", "running")


def test_of_a_scale_out_it_fails_the_instance(warm, holder, engine, look_once):
    order(warm, scale_out={"policy": "m/collocated", "decision": 1, "warm": True})
    look_once()
    engine.ends(("disk", "", "truncated"))
    look_once()
    row = Instance.objects.get(pk="warm")
    assert (row.desired_state, row.observed_state, row.error) == ("stopped", "failed", "disk: truncated")


def test_an_engine_that_refuses_ends_it_and_one_that_is_busy_does_not(warm, engine, look_once):
    action = order(warm)
    engine.fails["order"] = [EngineRefuses("loads already", busy=True), EngineRefuses("status 403: token")]
    assert look_once() == []
    (decision,) = look_once()
    assert (decision.reason, decision.outcome["error"]) == ("engine_refused", "status 403: token")
    action.refresh_from_db()
    assert action.state == "failed"


def test_an_engine_that_is_away_is_asked_again_until_time_is_up(warm, engine, look_once):
    action = order(warm)
    engine.fails["look"] = [EngineAway("ConnectionError at /weights")]
    assert look_once() == []
    action.refresh_from_db()
    assert (action.state, action.error) == ("queued", "ConnectionError at /weights")
    Action.objects.update(created_at=timezone.now() - timedelta(hours=1))
    (decision,) = look_once()
    assert decision.reason == "timeout"
    assert "ConnectionError" in decision.outcome["error"]


def test_time_in_which_a_load_was_held_is_not_counted(warm, engine, look_once):
    action = order(warm)
    look_once()
    engine.said = EngineWeights("loading", engine.said.order, 100, held_s=900.0)
    assert look_once() == []
    Action.objects.update(created_at=timezone.now() - timedelta(minutes=20))
    assert look_once() == []
    action.refresh_from_db()
    assert (action.state, action.params["held_s"]) == ("running", 900.0)
    Action.objects.update(created_at=timezone.now() - timedelta(minutes=26))
    (decision,) = look_once()
    assert decision.reason == "timeout"


def test_a_held_load_is_recorded_as_the_engine_says(warm, holder, engine, look_once):
    action = order(warm)
    look_once()
    engine.ends(("engine", holder.url, ""))
    (attempt,) = engine.said.attempts
    attempt |= {"flow": "scheduled", "held_s": 0.4, "level": 8}
    (decision,) = look_once()
    assert [decision.outcome[name] for name in ("flow", "held_s", "flow_level")] == ["scheduled", 0.4, 8]
    (row,) = action.transfers.all()
    assert (row.flow, row.held_s, row.flow_level, row.bytes_s) == ("scheduled", 0.4, 8, pytest.approx(1000.0))


@pytest.mark.parametrize(
    "wrong", [{"held_s": "nan"}, {"held_s": float("inf")}, {"level": -1}, {"level": 1e30}, {"flow": None}]
)
def test_what_no_record_can_hold_is_left_out(warm, holder, engine, look_once, wrong):
    order(warm)
    look_once()
    engine.ends(("engine", holder.url, ""))
    engine.said.attempts[0].update(wrong)
    (decision,) = look_once()
    assert decision.kind == "weights_load"


def test_what_was_tried_before_time_was_up_is_told(warm, engine, look_once):
    order(warm)
    look_once()
    tried = {"kind": "engine", "url": "http://gone", "seconds": 120.0, "bytes": 0, "error": "broke off"}
    engine.said = EngineWeights("loading", engine.said.order, 100, attempts=[tried])
    Action.objects.update(created_at=timezone.now() - timedelta(hours=1))
    (decision,) = look_once()
    assert decision.reason == "timeout"
    assert [each["error"] for each in decision.outcome["attempts"]] == ["broke off"]


def test_an_order_that_another_worker_gave_meanwhile_is_not_given_again(warm, engine, look_once, monkeypatch):
    """This worker heard "absent" before it had the lease."""
    action = order(warm)
    look_once()
    (told,) = engine.orders
    heard = iter([EngineWeights("absent"), engine.said])
    monkeypatch.setattr(engine, "look", lambda: next(heard, engine.said))
    assert look_once() == []
    assert engine.orders == [told]
    action.refresh_from_db()
    assert action.tries == 1


def test_an_engine_that_forgets_again_and_again_is_given_up(warm, engine, look_once):
    order(warm)
    for _ in range(3):
        look_once()
        engine.said = EngineWeights("absent")  # started again
    (decision,) = look_once()
    assert (decision.reason, len(engine.orders)) == ("engine_forgot", 3)


def test_an_instance_that_is_stopped_needs_no_weights(warm, engine, look_once):
    order(warm)
    instance_stop(actor=OLGA, instance_id="warm")
    (decision,) = look_once()
    assert (decision.reason, engine.orders) == ("instance_not_wanted", [])


def test_a_process_that_still_starts_is_waited_for(warm, engine, look_once):
    Instance.objects.filter(pk="warm").update(observed_state="starting", url="")
    order(warm)
    assert look_once() == []
    assert engine.orders == []


# ---- many at once ---------------------------------------------------------------------------------------------------


@pytest.fixture
def several(holder):
    """Warm instances with an order each, oldest first, and their engines by url."""
    rows = [factories.instance(holder.model, id=f"w{n}", weights="absent") for n in range(4)]
    return [order(row) for row in rows], {row.url: Engine() for row in rows}


def test_an_engine_that_hangs_holds_no_other_up(several, monkeypatch):
    orders, engines = several
    gate = threading.Event()
    first, *others = engines.values()
    monkeypatch.setattr(first, "look", gate.wait)
    monkeypatch.setattr(actions, "ASK_S", 1.0)
    assert advance_actions([], client=engines.__getitem__) == []
    assert [len(engine.orders) for engine in others] == [1, 1, 1]
    orders[0].refresh_from_db()
    found = (orders[0].state, orders[0].error, orders[0].lease_until)
    assert found == ("queued", "the engine has not responded yet", None)
    Action.objects.update(created_at=timezone.now() - timedelta(hours=1))
    assert {decision.reason for decision in advance_actions([], client=engines.__getitem__)} == {"timeout"}
    gate.set()


def test_one_that_fails_unexpectedly_fails_alone(several, monkeypatch):
    orders, engines = several
    first, *others = engines.values()
    first.said = EngineWeights("absent", attempts=None)
    monkeypatch.setattr(first, "order_load", lambda *told: 1 / 0)
    advance_actions([], client=engines.__getitem__)
    assert [len(engine.orders) for engine in others] == [1, 1, 1]
    orders[0].refresh_from_db()
    assert orders[0].error == "unexpected error: ZeroDivisionError: division by zero"
    assert orders[0].lease_until > timezone.now(), "not tried again at once"


def test_a_look_that_runs_out_of_time_goes_on_where_it_ended(several, monkeypatch):
    _, engines = several
    monkeypatch.setattr(actions, "TURN", actions.TurnOrder())
    looked, clock = [], [0.0]

    def slow(action_id, look_at):
        looked.append(action_id)
        clock[0] += actions.BUDGET_S + 1.0

    monkeypatch.setattr(actions, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    monkeypatch.setattr(actions, "_one", slow)
    for _ in range(6):
        advance_actions([], client=engines.__getitem__)
    known = [action.pk for action in Action.objects.order_by("pk")]
    assert looked == [*known, *known[:2]], "none is left out, none is preferred"


def test_more_than_one_look_holds_are_looked_at_in_turn(several, monkeypatch):
    _, engines = several
    monkeypatch.setattr(actions, "TURN", actions.TurnOrder())
    monkeypatch.setattr(actions, "MOST", 3)
    looked = []
    monkeypatch.setattr(actions, "_one", lambda action_id, look_at: looked.append(action_id))
    for _ in range(4):
        advance_actions([], client=engines.__getitem__)
    assert sorted(looked) == sorted(3 * [action.pk for action in Action.objects.all()])
