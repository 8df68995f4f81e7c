"""*Flows* says whether waiting requests are pruned, by whom, and what became of those that were."""

from __future__ import annotations

import time

import orjson
import pytest
from django.conf import settings
from django.urls import reverse

from controller.core.messages import FLEET_KEY, GATEWAYS_KEY
from controller.core.pruning import PruneReason
from controller.models import Decision, FlowSettings
from controller.services.actors import SYSTEM
from controller.services.slo.flow_settings import flow_settings_create
from tests import factories
from tests.console.live.live_data import fleet
from workers import live
from workers.pruning import publish_orders
from workers.tasks.heartbeat import heartbeat_send
from workers.tasks.names import PRUNING_PROCESS

pytestmark = [pytest.mark.db, pytest.mark.django_db]
PRUNED = {"kind": "prune", "reason": "others_in_time", "at": 0.1, "figures": {}}


@pytest.fixture(autouse=True)
def empty(redis_server):
    live._client(settings.REDIS_URL).flushdb()


def shown(client):
    answer = client.get(reverse("flows"))
    assert answer.status_code == 200
    return " ".join(answer.content.decode().split())


def test_while_it_is_off_an_operator_sees_where_to_switch_it_on(viewer, operator):
    assert "an operator can set a drop budget" in shown(viewer)
    assert '<a href="/flows/settings/">a drop budget</a>' in shown(operator)


def test_a_coordinator_that_does_not_run_is_told(viewer):
    flow_settings_create(actor=SYSTEM, drop_budget=0.25)
    assert "The coordinator has not run yet, so nothing is pruned" in shown(viewer)
    heartbeat_send(PRUNING_PROCESS)
    assert "No request is pruned now" in shown(viewer)
    live._client(settings.REDIS_URL).set("slackline:heartbeat:pruning", time.time() - 20)
    assert "The coordinator has not run since" in shown(viewer)


def test_orders_in_force_are_counted(viewer):
    flow_settings_create(actor=SYSTEM, drop_budget=0.25)
    heartbeat_send(PRUNING_PROCESS)
    reasons = {name: PruneReason("e1", 5.0, 4.0) for name in ("a", "b")}
    live.run(publish_orders(reasons, time.time(), 9, 3, ["gw-a", "gw-b"]))
    text = shown(viewer)
    assert "2 of 9 requests that wait or whose KV is being sent, at 2 gateways, are served last now" in text
    assert "Drop budget 25" in text


@pytest.mark.parametrize(
    ("counted", "line"),
    [
        ({"taken": 9, "late": 2, "out_of_sequence": 1}, "gateway-1: 2 were too late, 1 was out of sequence"),
        ({"late": 1}, "gateway-1: 1 was too late."),
        ({"out_of_sequence": 1200}, "gateway-1: 1,200 were out of sequence."),
        ({"taken": 9, "expired": 3}, None),
        (None, None),  # a gateway of an older release
    ],
)
def test_orders_that_a_gateway_ignored_are_told(viewer, counted, line):
    flow_settings_create(actor=SYSTEM, drop_budget=0.25)
    heartbeat_send(PRUNING_PROCESS)
    message = fleet(at=time.time()) | ({} if counted is None else {"pruning_orders": counted})
    board = live._client(settings.REDIS_URL)
    board.sadd(GATEWAYS_KEY, "gateway-1")
    board.set(FLEET_KEY.format(gateway="gateway-1"), orjson.dumps(message))
    text = shown(viewer)
    assert ("Orders that changed nothing" in text) == (line is not None)
    assert line is None or line in text


def test_what_was_pruned_and_whether_it_made_it(viewer):
    flow_settings_create(actor=SYSTEM, drop_budget=0.25)
    now = time.time()
    factories.records_stored(
        factories.record(id="made-it", arrived_at=now - 5, decisions=[PRUNED], attained=True),
        factories.record(id="missed-it", arrived_at=now - 4, decisions=[PRUNED], attained=False),
        factories.record(id="never-pruned", arrived_at=now - 4, decisions=[]),
        factories.record(id="long-ago", arrived_at=now - 3600, decisions=[PRUNED]),
    )
    text = shown(viewer)
    assert "2 were pruned; 1 of them still met their targets" in text
    assert text.index("missed-it") < text.index("made-it")
    assert "not streamed" not in text
    assert "never-pruned" not in text
    assert "long-ago" not in text


def test_an_answer_that_was_not_streamed_has_no_ttft(viewer):
    """It is judged by its end, so it may have met its targets without one."""
    flow_settings_create(actor=SYSTEM, drop_budget=0.25)
    factories.records_stored(
        factories.record(arrived_at=time.time() - 5, decisions=[PRUNED], attained=True, streamed=False, ttft_s=None)
    )
    assert "not streamed" in shown(viewer)


def test_without_redis_it_says_what_gateways_do(viewer, monkeypatch):
    flow_settings_create(actor=SYSTEM, drop_budget=0.25)
    heartbeat_send(PRUNING_PROCESS)

    def away(dialogue):
        raise live.LiveUnavailable("Redis is unavailable: test")

    monkeypatch.setattr(live, "run", away)
    assert "Gateways end the coordinator's orders after 3 s" in shown(viewer).replace("&#x27;", "'")


def test_the_budget_is_a_percentage_in_the_form_and_audited(operator):
    assert operator.post(reverse("flow-settings"), {"flow_policy": "off", "drop_budget": "20"}).status_code == 302
    assert FlowSettings.objects.get().drop_budget == 0.2
    page = operator.get(reverse("flow-settings")).content.decode()
    assert 'name="drop_budget" value="20"' in page
    operator.post(reverse("flow-settings"), {"flow_policy": "off", "drop_budget": "0", "version": "1"})
    changed = Decision.objects.filter(subject_type="flow_settings").latest("at")
    assert changed.inputs == {"before": {"drop_budget": 0.2}, "after": {"drop_budget": 0.0}}


@pytest.mark.parametrize("value", ["", "-1", "101", "much"])
def test_a_bad_budget_is_refused_at_its_field(operator, value):
    answer = operator.post(reverse("flow-settings"), {"flow_policy": "off", "drop_budget": value})
    assert answer.status_code == 422
    assert 'aria-describedby="id_drop_budget' in answer.content.decode()
    assert not FlowSettings.objects.exists()
