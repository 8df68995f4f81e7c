"""Commands on all that match a filter: found in the gateways' queues, told in parts, counted, audited."""

from __future__ import annotations

import json
import time

import pytest
from asgiref.sync import sync_to_async
from django.db import connections
from django.test import AsyncClient

from console.live import queue_commands as queue_all
from console.live.queue_commands import Matching, Order, RunningCommand
from controller.models import Decision
from controller.services.actors import Actor
from controller.wording.sentences import sentence
from tests import factories
from tests.console.live.live_data import fleet, queue_row, queue_state
from workers import live

ALL = "/queue/command/all/"


def now_rows(count, ago_s=1.0, **fields):
    arrived = time.time() - ago_s
    return [queue_row(f"req-{n:05}", arrived + 1, arrived_at=arrived, **fields) for n in range(count)]


def waiting(live_store, *states):
    """Published whenever somebody asks, but by one whose `asked` is 0."""
    live_store.queues = [state | {"asked": state["asked"] and 1000} for state in states]
    live_store.fleets = [fleet(gateway=state["gateway"], at=time.time(), period_s=10.0) for state in states]


def said_by(gateway, ids, **outcomes):
    """One gateway's answer: what is not named is gone."""
    answer = {"command": f"c-{ids[0]}", "gateway": gateway, "applied": [], "too_late": [], **outcomes}
    told = {*answer["applied"], *answer["too_late"]}
    return {**answer, "gone": [each for each in ids if each not in told]}


def asked(**fields):
    return {"kind": "cancel", "until": f"{time.time():.3f}", **fields}


def lines(answer):
    return [json.loads(line) for line in b"".join(answer.streaming_content).splitlines()]


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(queue_all, "LOOK_S", 0.1)
    monkeypatch.setattr(queue_all, "LOOK_EVERY_S", 0.01)


@pytest.fixture
async def thread_left_clean(transactional_db):
    """Views run in a thread that later tests share: their connection must not stay open there."""
    yield
    await sync_to_async(connections.close_all)()


@pytest.fixture
async def person(thread_left_clean):
    client = AsyncClient()
    await client.aforce_login(await sync_to_async(factories.user)("operator"))

    async def post(form):
        answer = await client.post(ALL, form)
        if not answer.streaming:
            return answer.status_code, answer.json()
        parts = b"".join([part async for part in answer.streaming_content])
        return answer.status_code, [json.loads(line) for line in parts.splitlines()]

    return post


@pytest.mark.django_db(transaction=True)
async def test_ten_thousand_are_told_in_parts_with_progress_and_one_record(person, live_store):
    waiting(live_store, queue_state(*now_rows(10_000)))
    live_store.answer = lambda ids: [said_by("gateway-1", ids, applied=ids[:-2], too_late=ids[-2:-1])]
    status, told = await person(asked(kind="reprioritise", priority="7"))
    assert status == 200
    assert max(len(ids) for _, _, ids in live_store.commands) == queue_all.IDS_AT_ONCE
    assert len({each for _, _, ids in live_store.commands for each in ids}) == 10_000
    assert [line["told"] for line in told] == [*range(0, 10_001, queue_all.IDS_AT_ONCE), 10_000]
    end = told[-1]
    assert (end["applied"], end["too_late"], end["gone"], end["ok"]) == (9920, 40, 40, True)
    assert end["message"] == ("9920 reprioritised, 40 already sent to an engine, 40 no longer in the queue.")
    decision = await Decision.objects.aget(kind="queue_reprioritise")
    assert (decision.inputs["matched"], decision.inputs["priority"]) == (10_000, 7)
    assert (decision.outcome["applied"], decision.outcome["ended"], decision.outcome["gateways"]) == (9920, "all", 1)
    assert len(decision.outcome["commands"]) == 40


@pytest.mark.django_db(transaction=True)
async def test_the_filter_is_the_pages_and_what_came_after_the_question_is_left_alone(person, live_store):
    now = time.time()
    rows = [
        queue_row("a", arrived_at=now - 5, slo_class="batch", tenant="globex"),
        queue_row("b", arrived_at=now - 5, slo_class="batch", tenant="acme"),
        queue_row("c", arrived_at=now - 5, slo_class="chat", tenant="globex"),
        queue_row("new", arrived_at=now + 5, slo_class="batch", tenant="globex"),
    ]
    waiting(live_store, queue_state(*rows))
    live_store.answer = lambda ids: [said_by("gateway-1", ids, applied=ids)]
    await person(asked(key="globex/batch", until=f"{now:.3f}"))
    await person(asked(text="tenant:globex", until=f"{now:.3f}", kind="pause"))
    await person(asked(until=f"{now:.3f}", kind="resume"))
    assert [(kind, sorted(ids)) for _, kind, ids in live_store.commands] == [
        ("cancel", ["a"]), ("pause", ["a", "c"]), ("resume", ["a", "b", "c"]),
    ]  # fmt: skip
    decision = await Decision.objects.aget(kind="queue_cancel")
    assert decision.inputs["filter"] == {"key": "globex/batch", "text": "", "until": pytest.approx(now, abs=0.001)}
    assert decision.inputs["request_ids"] == ["a"]


@pytest.mark.django_db(transaction=True)
async def test_a_gateway_that_does_not_answer_is_not_told_the_rest_and_not_called_gone(person, live_store):
    hung = [{**row, "id": f"hung-{n}"} for n, row in enumerate(now_rows(600))]
    waiting(live_store, queue_state(*now_rows(300)), queue_state(*hung, gateway="gateway-2", feed="g"))
    live_store.answer = lambda ids: [said_by("gateway-1", ids, applied=[i for i in ids if i.startswith("req")])]
    _, told = await person(asked())
    end = told[-1]
    assert (end["applied"], end["gone"], end["unanswered"], end["told"], end["of"]) == (300, 0, 250, 550, 900)
    assert not end["ok"]
    assert "No answer for 250 requests, which may have been cancelled" in end["message"]
    assert "350 unchanged" in end["message"]


def test_who_answers_first_does_not_stand_for_the_one_that_is_waited_for(monkeypatch, impatient):
    late = [[queue_state(gateway="new")], [queue_state(gateway="new"), queue_state(gateway="known")]]
    monkeypatch.setattr(queue_all.live, "ask_queue", lambda: 0)
    monkeypatch.setattr(queue_all.live, "read_queue", lambda: late.pop(0) if len(late) > 1 else late[0])
    assert {state["gateway"] for state in queue_all._look({"known"})} == {"new", "known"}


@pytest.mark.django_db(transaction=True)
async def test_a_gateway_that_does_not_say_what_waits_is_named(person, live_store, impatient):
    waiting(live_store, queue_state(*now_rows(3)), queue_state(gateway="gateway-2", asked=0))
    live_store.answer = lambda ids: [said_by("gateway-1", ids, applied=ids)]
    _, told = await person(asked())
    missing = "Some gateways did not report their queue; their requests were not changed."
    assert told[-1]["message"] == f"3 cancelled. {missing}"
    live_store.queues = []
    status, said = await person(asked())
    assert (status, said["message"]) == (503, "No gateway reported its queue. No requests were changed.")


@pytest.mark.django_db(transaction=True)
async def test_redis_going_away_in_the_middle_is_said_and_recorded(person, live_store):
    waiting(live_store, queue_state(*now_rows(1000)))

    def answer(ids):
        if len(live_store.commands) == 2:
            raise live.LiveUnavailable("Redis is unavailable: test")
        return [said_by("gateway-1", ids, applied=ids)]

    live_store.answer = answer
    _, told = await person(asked())
    assert told[-1]["message"] == "250 cancelled. Redis is unavailable: 750 unchanged."
    assert not told[-1]["ok"]
    outcome = (await Decision.objects.aget(kind="queue_cancel")).outcome
    assert (outcome["applied"], outcome["ended"], outcome["error"]) == (250, "redis_away", "Redis is unavailable: test")


@pytest.mark.django_db(transaction=True)
async def test_a_part_whose_answer_is_lost_is_told_and_not_known(person, live_store):
    waiting(live_store, queue_state(*now_rows(1000)))

    def answer(ids):
        answers = [said_by("gateway-1", ids, applied=ids)]
        if len(live_store.commands) == 2:
            raise live.AnswersLost("Redis went away: test", live.Answers())
        return answers

    live_store.answer = answer
    _, told = await person(asked())
    assert told[-1]["message"] == (
        "250 cancelled. No answer for 250 requests, which may have been cancelled, or may be within 5 seconds. "
        "Redis is unavailable: 500 unchanged."
    )
    decision = await Decision.objects.aget(kind="queue_cancel")
    counted = {name: decision.outcome[name] for name in ("told", "of", "applied", "unanswered", "ended")}
    assert counted == {"told": 500, "of": 1000, "applied": 250, "unanswered": 250, "ended": "redis_away"}
    assert sentence(decision).endswith("cancelled 250 of 1000 requests: 250 not acknowledged, 500 not sent")


ORDER = "0123456789abcdef" * 2


@pytest.mark.django_db(transaction=True)
async def test_what_came_of_a_stopped_command_is_said_to_who_gave_it(live_store, thread_left_clean):
    live_store.answer = lambda ids: [said_by("gateway-1", ids, applied=ids)]
    user = await sync_to_async(factories.user)("operator")
    owner, other = AsyncClient(), AsyncClient()
    await owner.aforce_login(user)
    await other.aforce_login(await sync_to_async(factories.user)("operator"))
    order = Order("cancel", "", "", 0.0, id=ORDER)
    ids = [f"r{n}" for n in range(1000)]
    telling = RunningCommand(order, Matching({"gateway-1": ids}, 0), Actor.person(user.get_username()))
    parts = telling.run()
    await anext(parts)
    assert (await owner.get(f"{ALL}{ORDER}/")).json() == {"known": False}
    await parts.aclose()
    said = (await owner.get(f"{ALL}{ORDER}/")).json()
    assert (said["known"], said["ok"], said["message"]) == (True, False, "Stopped. 250 cancelled. 750 unchanged.")
    assert (await other.get(f"{ALL}{ORDER}/")).json() == {"known": False}
    assert (await owner.get(f"{ALL}nonsense/")).status_code == 404


@pytest.mark.django_db(transaction=True)
async def test_who_stops_in_the_middle_leaves_a_record_of_what_was_done(live_store, thread_left_clean):
    live_store.answer = lambda ids: [said_by("gateway-1", ids, applied=ids)]
    ids = [f"r{n}" for n in range(1000)]
    telling = RunningCommand(Order("cancel", "", "", 0.0), Matching({"gateway-1": ids}, 0), Actor.person("olga"))
    parts = telling.run()
    assert (await anext(parts))["told"] == 250
    await parts.aclose()
    decision = await Decision.objects.aget(kind="queue_cancel")
    assert (decision.outcome["applied"], decision.outcome["ended"], decision.outcome["of"]) == (250, "stopped", 1000)
    assert len(live_store.commands) == 1


def test_redis_away_is_a_refusal_that_is_audited(operator, live_store):
    live_store.away = True
    answer = operator.post(ALL, asked())
    assert (answer.status_code, "No requests were cancelled" in answer.json()["message"]) == (503, True)
    assert "Redis is unavailable" in Decision.objects.get(kind="queue_cancel").outcome["error"]


@pytest.mark.parametrize(
    "bad",
    [
        {"kind": "explode"},
        {"until": ""},
        {"until": "soon"},
        {"until": "nan"},
        {"until": "1e5"},
        {"text": "x" * 101},
        {"key": "x" * 201},
        {"kind": "reprioritise", "priority": "-1"},
        {"kind": "reprioritise"},
        {"order": "x" * 32},
    ],
)
def test_nonsense_is_refused_before_any_gateway_hears_of_it(operator, live_store, bad):
    waiting(live_store, queue_state(*now_rows(3)))
    assert operator.post(ALL, asked(**bad)).status_code == 400
    assert (live_store.commands, live_store.asked) == ([], 0)


def test_a_viewer_cannot_and_that_is_audited(viewer, live_store):
    assert viewer.post(ALL, asked()).status_code == 403
    assert live_store.commands == []
    assert Decision.objects.get().kind == "access_refused"
