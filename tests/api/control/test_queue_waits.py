"""Who waits for gateways keeps no connection to PostgreSQL meanwhile: the console has a few for all requests."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from django.db import connection

from console.live.queue_commands import Order, matching
from workers import live

pytestmark = [pytest.mark.db, pytest.mark.usefixtures("transactional_db", "redis_server")]


@pytest.mark.parametrize(
    ("call", "wait"),
    [
        (lambda who: who.get("/queue"), "read_queue"),
        (lambda who: who.post("/queue/cancel", {"request_ids": ["a"]}), "send_command"),
    ],
)
def test_a_wait_for_gateways_holds_no_connection(operator, monkeypatch, call, wait):
    held = []

    def waits(*_):
        held.append(connection.connection is not None)
        raise live.LiveUnavailable("away")

    monkeypatch.setattr(live, wait, waits)
    monkeypatch.setattr(live, "ask_queue", lambda: 1)
    monkeypatch.setattr("api.control.queue.fresh_fleets", lambda: [])
    assert call(operator).status_code == 503
    assert held == [False]


def test_nor_does_a_command_to_all_that_match(monkeypatch):
    held = []

    def waits():
        held.append(connection.connection is not None)
        raise live.LiveUnavailable("away")

    monkeypatch.setattr(live, "ask_queue", waits)
    monkeypatch.setattr("console.live.queue_commands.fleet_now", lambda: SimpleNamespace(fleets=[]))
    connection.ensure_connection()
    with pytest.raises(live.LiveUnavailable):
        matching(Order("cancel", "", "", 0.0))
    assert held == [False]
