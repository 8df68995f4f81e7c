"""An engine is told to sleep by what it says then, not by what it said when it was asked some looks ago."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from controller.models import Action, Instance
from controller.services.actors import SYSTEM
from controller.services.fleet.sleeping import sleep_order
from tests import factories
from tests.workers.sleeping_vllm import SleepingVllm
from workers.actions import runner as actions
from workers.actions import sleep_client, sleeping
from workers.actions.long_calls import LongCalls
from workers.actions.parallel_calls import ThreadCalls
from workers.actions.sleep_client import SleepClient, SleepState

pytestmark = [pytest.mark.db, pytest.mark.django_db]


class Late(SleepClient):
    """Its first answer is kept back until `gate` opens; what it says was true when it was asked."""

    heard: threading.Event  # that answer is there
    gate: threading.Event
    asked: int

    def look(self) -> SleepState:
        Late.asked += 1
        first, said = Late.asked == 1, super().look()
        if first:
            self.heard.set()
            self.gate.wait()
        return said


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Late]]:
    monkeypatch.setattr(sleeping, "SETTLE_S", 0.0)
    monkeypatch.setattr(sleeping, "LOOK_S", 60.0)
    monkeypatch.setattr(sleep_client, "CALL_S", 60.0)
    monkeypatch.setattr(actions, "PARALLEL", ThreadCalls(patience_s=60.0, fresh_s=60.0))
    Late.heard, Late.gate, Late.asked = threading.Event(), threading.Event(), 0
    yield Late
    Late.gate.set()


def look(client: type[SleepClient], monkeypatch: pytest.MonkeyPatch, within_s: float) -> list[str]:
    monkeypatch.setattr(actions, "ASK_S", within_s)
    return [decision.kind for decision in actions.advance_actions([], sleep=client, calls=LongCalls(threads=False))]


def test_what_was_sent_since_it_was_asked_is_not_cut(
    vllm: SleepingVllm, late: type[Late], monkeypatch: pytest.MonkeyPatch
) -> None:
    factories.instance(id="v1", backend="vllm", provisioner="static", url=vllm.url)
    action = sleep_order(actor=SYSTEM, instance_id="v1")
    assert look(late, monkeypatch, 0.5) == []
    assert late.heard.wait(60.0), "it was idle when it was asked"
    vllm.running = 1
    late.gate.set()
    assert look(late, monkeypatch, 60.0) == []
    action.refresh_from_db()
    assert (vllm.verbs, action.error, late.asked) == ([], "1 requests are still running", 2)
    vllm.running = 0
    assert look(late, monkeypatch, 60.0) == ["instance_asleep"]
    assert Instance.objects.get(pk="v1").weights == "asleep"


def test_one_that_is_silent_when_it_is_asked_again_is_not_told(
    vllm: SleepingVllm, late: type[Late], monkeypatch: pytest.MonkeyPatch
) -> None:
    factories.instance(id="v1", backend="vllm", provisioner="static", url=vllm.url)
    action = sleep_order(actor=SYSTEM, instance_id="v1")
    assert look(late, monkeypatch, 0.5) == []
    assert late.heard.wait(60.0)
    vllm.away = True
    late.gate.set()
    assert look(late, monkeypatch, 60.0) == []
    action.refresh_from_db()
    assert (vllm.verbs, action.state, action.tries) == ([], Action.State.QUEUED, 0)
    assert "/metrics" in action.error
