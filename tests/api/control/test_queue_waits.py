"""Who waits for gateways keeps no connection to PostgreSQL meanwhile: the console has a few for all requests."""

from __future__ import annotations

import pytest
from django.db import connection

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
