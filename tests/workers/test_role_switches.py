"""A role that an engine must be told of: ordered, emptied, switched, recorded; or kept, with the reason."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.utils import timezone

from controller.core.types import InstanceSpec
from controller.models import Action, Decision, Instance
from controller.selectors.snapshot import gateway_snapshot
from controller.services.actors import SYSTEM, Actor
from controller.services.role_switches import role_ask
from tests import factories
from tests.workers.backends.sglang_server import Job, SglangServer, serving
from workers.actions import look
from workers.backends.base import EngineError, RoleRefused
from workers.long_calls import LongCalls
from workers.role_switches import TIMEOUT, switch

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
    return look([], calls=LongCalls(threads=False))


def test_an_idle_engine_switches_with_the_graphs_of_a_peer() -> None:
    mine, peer = server("prefill"), server("decode")
    with serving(mine, peer):
        row = row_of(mine)
        row_of(peer, "s2", row.model)
        action = role_ask(actor=OLGA, instance_id=row.pk, role="decode")
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
        role_ask(actor=OLGA, instance_id=row.pk, role="prefill")
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
        role_ask(actor=OLGA, instance_id=row.pk, role="decode")
        settle()
        (decision,) = look_once()
        assert (decision.kind, decision.reason) == ("role_switch_failed", "not_prepared")
        assert decision.outcome["field"] == "decode_cuda_graph_memory_gb"
        assert "never captured" in decision.outcome["error"]
        assert decision.outcome["safe_to_restore"]
        row.refresh_from_db()
        assert (row.role, row.desired_state, gateway_snapshot().draining) == ("prefill", "running", ())


def test_an_engine_that_broke_is_out_of_the_fleet() -> None:
    mine = server("decode")
    mine.switch_fails = "kv manager could not be rebuilt"
    with serving(mine):
        row = row_of(mine)
        role_ask(actor=OLGA, instance_id=row.pk, role="prefill")
        settle()
        (decision,) = look_once()
        assert (decision.reason, decision.outcome["safe_to_restore"]) == ("unsafe_to_restore", False)
        row.refresh_from_db()
        assert (row.observed_state, row.desired_state) == ("failed", "stopped")
        assert "could not be rebuilt" in row.error
        assert gateway_snapshot().instances == ()


def test_one_that_never_empties_serves_on_after_its_time() -> None:
    mine = server("decode")
    with serving(mine):
        row = row_of(mine)
        role_ask(actor=OLGA, instance_id=row.pk, role="prefill")
        Action.objects.update(created_at=timezone.now() - TIMEOUT - timedelta(seconds=1), error="num_running_reqs 1")
        (decision,) = look_once()
        assert (decision.reason, "num_running_reqs 1" in decision.outcome["error"]) == ("timeout", True)


def test_said_twice_it_is_one_order_and_what_cannot_be_is_refused() -> None:
    mine = server("prefill")
    with serving(mine):
        row = row_of(mine)
        first = role_ask(actor=OLGA, instance_id=row.pk, role="decode")
        assert role_ask(actor=OLGA, instance_id=row.pk, role="decode") == first
        Action.objects.all().delete()
        with pytest.raises(ValidationError, match="knows prefill and decode only"):
            role_ask(actor=OLGA, instance_id=row.pk, role="collocated")


def test_a_lost_answer_is_asked_for_again() -> None:
    """The worker died or the answer came too late: an engine that has the role says so."""
    mine = server("decode")
    with serving(mine):
        row = row_of(mine)
        role_ask(actor=OLGA, instance_id=row.pk, role="prefill")
        settle()
        mine.mode = "prefill"
        (decision,) = look_once()
        assert (decision.kind, mine.asked) == ("role_switch", [])


def test_engines_that_take_either_stage_need_no_switch() -> None:
    row = factories.instance(id="v1", backend="vllm")
    assert role_ask(actor=SYSTEM, instance_id=row.pk, role="decode") is None
    row.refresh_from_db()
    assert row.role == "decode"
    assert not Action.objects.exists()


def test_a_server_that_is_away_raises() -> None:
    spec = InstanceSpec("s", "demo", url="http://127.0.0.1:1", backend="sglang")
    with pytest.raises((EngineError, RoleRefused)):
        switch(spec, spec.role, None)
