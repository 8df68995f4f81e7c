"""Decisions over their topic."""

from __future__ import annotations

import time

import pytest
from channels.db import database_sync_to_async
from django.db import OperationalError
from django.utils import timezone

from console.consumers import decisions
from console.consumers.decisions import DecisionsConsumer
from controller.core.messages import LIVE_DECISIONS, LIVE_TYPE
from controller.models import Decision
from controller.services.decisions import decision_record
from controller.wording.sentences import message_of
from tests import factories
from tests.console.consumers.test_base import frames, is_data


def message(ident):
    """As the announcer makes it."""
    row = Decision(
        pk=int(ident), at=timezone.now(), kind="scale_out", actor="scaler", subject="demo", reason="load_above_upper",
        inputs={"load": 1.25, "upper": 0.8, "ready": 2},
    )  # fmt: skip
    return message_of(row)


async def tell(layer, group, data):
    await layer.group_send(group, {"type": LIVE_TYPE, "message": {"topic": group, "data": data}})


@pytest.fixture
def stored(monkeypatch):
    """What the database holds, newest first."""
    items = []

    async def newest():
        return list(items)

    monkeypatch.setattr(decisions, "newest_items", newest)
    return items


async def test_decisions_start_with_the_newest_and_continue_with_each_new_one(browser, live_store, stored, layer):
    stored.append({"id": "1", "at": time.time(), "sentence": "olga changed it", "figures_text": ""})
    socket = browser(DecisionsConsumer)
    await socket.connect()
    first = (await frames(socket, is_data))[-1]
    assert [item["sentence"] for item in first["data"]["decisions"]] == ["olga changed it"]
    await tell(layer, LIVE_DECISIONS, message("2"))
    second = (await frames(socket, lambda f: is_data(f) and f["data"]["decisions"]))[-1]
    assert (second["type"], second["seq"]) == ("update", first["seq"] + 1)
    assert [item["id"] for item in second["data"]["decisions"]] == ["2"]
    assert second["data"]["decisions"][0]["sentence"] == "scaler scaled out demo: load 125 % is above 80 % with 2 ready"


async def test_with_the_database_away_a_page_says_so_and_goes_on_when_it_is_back(browser, live_store, monkeypatch):
    items = [{"id": "1", "at": time.time(), "sentence": "olga changed it", "figures_text": ""}]
    away = True

    async def newest():
        if away:
            raise OperationalError("the connection is closed")
        return items

    monkeypatch.setattr(decisions, "newest_items", newest)
    socket = browser(DecisionsConsumer)
    await socket.connect()
    frame = (await frames(socket, lambda f: f["reason"] == "The database is unavailable"))[-1]
    assert frame["stale"]
    away = False
    frame = (await frames(socket, lambda f: is_data(f) and f["data"]["decisions"]))[-1]
    assert (frame["stale"], frame["reason"]) == (False, "")


async def test_a_decision_that_came_live_and_is_stored_is_shown_once(browser, live_store, stored, layer):
    socket = browser(DecisionsConsumer)
    await socket.connect()
    await frames(socket, is_data)
    await tell(layer, LIVE_DECISIONS, message("7"))
    await frames(socket, lambda f: is_data(f) and f["data"]["decisions"])
    stored.insert(0, {"id": "7", "at": time.time(), "sentence": "the same", "figures_text": ""})
    await socket.say('{"type": "refetch"}')
    snapshot = (await frames(socket, lambda f: f["type"] == "snapshot"))[-1]
    assert [item["id"] for item in snapshot["data"]["decisions"]] == ["7"]


@pytest.mark.django_db(transaction=True)
async def test_what_pub_sub_lost_is_found_in_the_database(browser, live_store):
    socket = browser(DecisionsConsumer)
    await socket.connect()
    await frames(socket, is_data)
    await database_sync_to_async(decision_record)(
        actor=factories.ACTOR,
        kind="slo_class_created",
        subject_type="slo_class",
        subject="chat",
        reason="person_created",
    )
    frame = (await frames(socket, lambda f: is_data(f) and f["data"]["decisions"], within_s=5))[-1]
    assert frame["data"]["decisions"][0]["sentence"] == "olga created SLO class chat"
