"""A role that an engine must be told of: ordered, emptied, switched, recorded; or kept, with the reason."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.utils import timezone

from controller.core.types import InstanceSpec, Role
from controller.models import Action, Decision, Instance
from controller.selectors.snapshot import gateway_snapshot
from controller.services.actors import SYSTEM, Actor
from controller.services.fleet.actions import action_lease
from controller.services.fleet.role_switches import role_order
from tests import factories
from tests.waiting import until
from tests.workers.backends.sglang_requests import Job
from tests.workers.backends.sglang_server import SglangServer, serving
from workers.actions.long_calls import FRESH_S, LongCalls, this_process
from workers.actions.role_switches import TIMEOUT, Switch, advance, switch
from workers.actions.runner import advance_actions
from workers.backends.base import EngineError, RoleRefused

pytestmark = [pytest.mark.db, pytest.mark.django_db]

OLGA = Actor.person("olga")


def server(mode: str = "prefill", **options: Any) -> SglangServer:
    return SglangServer(disaggregation_mode=mode, enable_pd_role_switch=True, **options)


def row_of(made: SglangServer, name: str = "s1", model: Any = None) -> Instance:
    fields = {"id": name, "backend": "sglang", "provisioner": "static", "role": made.mode, "url": made.url}
    return factories.instance(model, **fields) if model is not None else factories.instance(**fields)


def settle() -> None:
    """Gateways have heard of it."""
    Action.objects.update(created_at=timezone.now() - timedelta(seconds=3))


def look_once() -> list[Decision]:
    return advance_actions([], calls=LongCalls(threads=False))


def look_with(call: Switch, calls: LongCalls | None = None) -> Decision | None:
    action = action_lease(action_id=Action.objects.get().pk)
    assert action is not None
    return advance(action, calls or LongCalls(threads=False), call)


def ended(calls: LongCalls, action: Action) -> None:
    """The action's call, in its thread."""
    call = calls.find(action.pk)
    assert call is not None
    until(lambda: call.done, every_s=0.01)


def told_long_ago(action: Action, **fields: Any) -> None:
    """Its engine was told, and its time is up."""
    at = timezone.now() - TIMEOUT - timedelta(seconds=1)
    Action.objects.update(params={**action.params, "told": True}, created_at=at, **fields)


def test_an_idle_engine_switches_with_the_graphs_of_a_peer() -> None:
    mine, peer = server("prefill"), server("decode")
    with serving(mine, peer):
        row = row_of(mine)
        row_of(peer, "s2", row.model)
        action = role_order(actor=OLGA, instance_id=row.pk, role="decode")
        assert action is not None
        assert gateway_snapshot().draining == (row.pk,), "nothing new is sent there"
        assert look_once() == [], "a gateway may not know yet"
        settle()
        (decision,) = look_once()
        assert (decision.kind, decision.reason, decision.subject) == ("role_switch", "switched", row.pk)
        assert (decision.inputs["from"], decision.inputs["to"], decision.actor) == ("prefill", "decode", "olga")
        assert (mine.mode, mine.graphs) == ("decode", peer.graphs)
        row.refresh_from_db()
        assert row.role == "decode"
        assert gateway_snapshot().draining == ()
        assert look_once() == []


def test_what_runs_there_ends_first() -> None:
    mine = server("decode")
    with serving(mine):
        row = row_of(mine)
        role_order(actor=OLGA, instance_id=row.pk, role="prefill")
        settle()
        mine.jobs["x"] = Job({"rid": "x"})
        assert look_once() == []
        action = Action.objects.get()
        assert "num_running_reqs 1" in action.error
        assert "/pd_role_switch" not in mine.asked
        mine.jobs.clear()
        (decision,) = look_once()
        assert (decision.kind, mine.mode) == ("role_switch", "prefill")


def test_a_refusal_is_on_the_decision_and_the_instance_serves_on() -> None:
    mine = server("prefill")  # no peer tells what graphs to capture
    with serving(mine):
        row = row_of(mine)
        role_order(actor=OLGA, instance_id=row.pk, role="decode")
        settle()
        (decision,) = look_once()
        assert (decision.kind, decision.reason) == ("role_switch_failed", "not_prepared")
        assert decision.outcome["field"] == "decode_cuda_graph_memory_gb"
        assert "never captured" in decision.outcome["error"]
        assert decision.outcome["safe_to_restore"]
        row.refresh_from_db()
        assert (row.role, row.desired_state, gateway_snapshot().draining) == ("prefill", "running", ())


@pytest.mark.parametrize(("told", "message"), [("switch_fails", "kv manager could not be rebuilt"),
                                               ("switch_fails", "could not be rebuilt: scheduler is not idle"),
                                               ("prepare_fails", "left half prepared, not idle")])  # fmt: skip
def test_an_engine_that_broke_is_out_of_the_fleet(told: str, message: str) -> None:
    mine = server("decode")
    setattr(mine, told, message)
    with serving(mine):
        row = row_of(mine)
        role_order(actor=OLGA, instance_id=row.pk, role="prefill")
        settle()
        (decision,) = look_once()
        assert (decision.reason, decision.outcome["safe_to_restore"]) == ("unsafe_to_restore", False)
        row.refresh_from_db()
        assert (row.observed_state, row.desired_state) == ("failed", "stopped")
        assert message in row.error
        assert gateway_snapshot().instances == ()


@pytest.mark.parametrize("dies_at", ["prepare", "switch"])
def test_an_engine_that_was_lost_while_it_was_told_is_out_of_the_fleet(dies_at: str) -> None:
    mine = server("decode")
    mine.dies_at = dies_at
    with serving(mine):
        row = row_of(mine)
        role_order(actor=OLGA, instance_id=row.pk, role="prefill")
        settle()
        (decision,) = look_once()
        assert (decision.reason, decision.outcome["safe_to_restore"]) == ("connection_lost", False)
        row.refresh_from_db()
        assert (row.observed_state, row.desired_state) == ("failed", "stopped")


def test_an_engine_that_refuses_and_is_sound_serves_on() -> None:
    mine = server("decode")
    mine.switch_refused = "transfer threads are busy"
    with serving(mine):
        row = row_of(mine)
        role_order(actor=OLGA, instance_id=row.pk, role="prefill")
        settle()
        (decision,) = look_once()
        assert (decision.reason, decision.outcome["safe_to_restore"]) == ("engine_refused", True)
        row.refresh_from_db()
        assert (row.role, row.desired_state, gateway_snapshot().draining) == ("decode", "running", ())
        assert [spec.id for spec in gateway_snapshot().instances] == [row.pk]


def test_one_that_never_empties_serves_on_after_its_time() -> None:
    mine = server("decode")
    with serving(mine):
        row = row_of(mine)
        role_order(actor=OLGA, instance_id=row.pk, role="prefill")
        Action.objects.update(created_at=timezone.now() - TIMEOUT - timedelta(seconds=1), error="num_running_reqs 1")
        (decision,) = look_once()
        assert (decision.reason, "num_running_reqs 1" in decision.outcome["error"]) == ("timeout", True)


def test_said_twice_it_is_one_order_and_what_cannot_be_is_refused() -> None:
    mine = server("prefill")
    with serving(mine):
        row = row_of(mine)
        first = role_order(actor=OLGA, instance_id=row.pk, role="decode")
        assert role_order(actor=OLGA, instance_id=row.pk, role="decode") == first
        Action.objects.all().delete()
        with pytest.raises(ValidationError, match="only between prefill and decode"):
            role_order(actor=OLGA, instance_id=row.pk, role="collocated")


def test_a_lost_answer_is_asked_for_again() -> None:
    """The worker died or the answer came too late: an engine that has the role says so."""
    mine = server("decode")
    with serving(mine):
        row = row_of(mine)
        role_order(actor=OLGA, instance_id=row.pk, role="prefill")
        settle()
        mine.mode = "prefill"
        (decision,) = look_once()
        assert (decision.kind, mine.asked) == ("role_switch", [])


def test_another_workers_call_is_left_to_it() -> None:
    """Two workers take turns at the looks: only the one whose call it is makes it."""
    mine = server("prefill")
    calls: list[Role] = []

    def slow(spec: InstanceSpec, role: Role, peer: InstanceSpec | None) -> None:
        calls.append(role)

    with serving(mine):
        row = row_of(mine)
        role_order(actor=OLGA, instance_id=row.pk, role="decode")
        settle()
        mark = {"by": "another:1", "at": time.time()}
        ordered = Action.objects.get().params
        Action.objects.update(params={**ordered, "call": mark})
        assert look_with(slow) is None
        assert calls == [], "its call goes on"
        Action.objects.update(created_at=timezone.now() - TIMEOUT - timedelta(seconds=1))
        assert look_with(slow) is None, "and is not given up on while it does"
        settle()
        mark["at"] -= FRESH_S
        Action.objects.update(params={**ordered, "call": mark})
        decision = look_with(slow)
        assert decision is not None
        assert (decision.kind, calls) == ("role_switch", ["decode"])


def test_a_call_under_way_carries_the_mark_of_its_worker_and_an_ended_one_none() -> None:
    release = threading.Event()
    calls = LongCalls()

    def busy(spec: InstanceSpec, role: Role, peer: InstanceSpec | None) -> None:
        release.wait(10.0)
        raise RoleRefused("not_idle", "num_running_reqs 1", again=True)

    mine = server("prefill")
    with serving(mine):
        row = row_of(mine)
        role_order(actor=OLGA, instance_id=row.pk, role="decode")
        settle()
        assert look_with(busy, calls) is None
        action = Action.objects.get()
        assert (action.params["call"]["by"], action.lease_until) == (this_process(), None)
        release.set()
        ended(calls, action)
        assert look_with(busy, calls) is None
        action.refresh_from_db()
        assert (action.error, "call" in action.params) == ("num_running_reqs 1", False), "anybody may try next"


def test_a_drain_does_not_cross_a_call_under_way() -> None:
    """The engine switches whatever is decided meanwhile: its row must say what it became."""
    release = threading.Event()
    calls = LongCalls()
    mine = server("prefill")

    def slow(spec: InstanceSpec, role: Role, peer: InstanceSpec | None) -> None:
        release.wait(10.0)
        mine.mode = role.value

    with serving(mine):
        row = row_of(mine)
        role_order(actor=OLGA, instance_id=row.pk, role="decode")
        settle()
        assert look_with(slow, calls) is None
        Instance.objects.update(desired_state="draining")
        assert advance_actions([], calls=calls) == [], "it is being told"
        release.set()
        ended(calls, Action.objects.get())
        (decision,) = advance_actions([], calls=calls)
        assert (decision.kind, decision.reason) == ("role_switch", "switched")
        row.refresh_from_db()
        assert row.role == "decode"


@pytest.mark.parametrize(("mode", "kind", "role"), [("decode", "role_switch", "decode"),
                                                    ("prefill", "role_switch_failed", "prefill")])  # fmt: skip
def test_an_order_that_ran_out_of_time_ends_with_the_role_that_the_engine_has(mode: str, kind: str, role: str) -> None:
    """Its call was lost with its worker, after the engine had begun."""
    mine = server("prefill")
    with serving(mine):
        row = row_of(mine)
        role_order(actor=OLGA, instance_id=row.pk, role="decode")
        told_long_ago(Action.objects.get(), error="no answer in time")
        mine.mode = mode
        (decision,) = look_once()
        assert (decision.kind, "/pd_role_switch" in mine.asked) == (kind, False)
        row.refresh_from_db()
        assert row.role == role


def test_an_order_whose_engine_was_told_is_not_given_up_while_it_does_not_say_its_role() -> None:
    mine = server("prefill")
    with serving(mine):
        row = row_of(mine)
        role_order(actor=OLGA, instance_id=row.pk, role="decode")
    told_long_ago(Action.objects.get())
    assert look_once() == []
    assert "does not report its role" in Action.objects.get().error
    Instance.objects.update(desired_state="draining")
    (decision,) = look_once()
    assert decision.kind == "role_switch_failed"


def test_engines_that_take_either_stage_need_no_switch() -> None:
    row = factories.instance(id="v1", backend="vllm")
    assert role_order(actor=SYSTEM, instance_id=row.pk, role="decode") is None
    row.refresh_from_db()
    assert row.role == "decode"
    assert not Action.objects.exists()


def test_a_server_that_is_away_raises() -> None:
    spec = InstanceSpec("s", "demo", url="http://127.0.0.1:1", backend="sglang")
    with pytest.raises((EngineError, RoleRefused)):
        switch(spec, spec.role, None)


def test_an_order_ends_also_where_its_engine_is_away_and_was_never_told() -> None:
    """An endpoint of somebody else's that is gone is not replaced: only its time-out ends what waits for it."""
    mine = server("prefill")
    with serving(mine):
        row = row_of(mine)
        role_order(actor=OLGA, instance_id=row.pk, role="decode")
    Instance.objects.update(observed_state="unreachable")
    settle()
    assert look_once() == []
    assert Action.objects.get().error == "its process is unreachable"
    Action.objects.update(created_at=timezone.now() - TIMEOUT - timedelta(seconds=1))
    (decision,) = look_once()
    assert (decision.kind, decision.reason) == ("role_switch_failed", "timeout")
    assert "its process is unreachable" in decision.outcome["error"]
    row.refresh_from_db()
    assert row.role == "prefill"


def test_a_call_that_ended_is_heard_also_while_its_engine_is_away() -> None:
    mine = server("prefill")
    with serving(mine):
        row = row_of(mine)
        role_order(actor=OLGA, instance_id=row.pk, role="decode")
    settle()
    calls, release = LongCalls(), threading.Event()

    def lost(spec: InstanceSpec, role: Role, peer: InstanceSpec | None) -> None:
        release.wait(5.0)
        raise EngineError("the engine hung up")

    assert look_with(lost, calls) is None
    release.set()
    ended(calls, Action.objects.get())
    Instance.objects.update(observed_state="unreachable")
    assert advance_actions([], calls=calls) == []
    action = Action.objects.get()
    assert (action.tries, "the engine hung up" in action.error, calls.find(action.pk)) == (1, True, None)
