"""What a gateway is given of its settings as it is started."""

from __future__ import annotations

import pytest

from api.openai import __main__ as gateway


@pytest.fixture
def started(monkeypatch, tmp_path):
    """The service of a gateway that is started and serves nobody."""
    made = []
    monkeypatch.setattr(gateway, "serve", lambda service, *_: made.append(service))
    monkeypatch.setattr(gateway.gc, "freeze", lambda: None)
    monkeypatch.setattr(gateway.gc, "set_threshold", lambda *_: None)
    monkeypatch.setattr(gateway.sys, "setswitchinterval", lambda _: None)
    monkeypatch.setenv("SLACKLINE_ROLE", "gateway")

    def start():
        assert gateway.main(["--port", "1", "--name", "gw"]) == 0
        return made.pop()

    return start


def test_the_bounds_of_records_are_those_of_the_settings(started, settings):
    settings.RECORDS_BUFFER_MIB, settings.RECORDS_SPOOL_MIB = 3, 7
    bounds = started()._options.records
    assert (bounds.buffer_bytes, bounds.spool_bytes) == (3 << 20, 7 << 20)


def test_the_shares_of_the_queue_are_those_of_the_settings(started, settings):
    settings.QUEUE_BODY_MIB, settings.TENANT_QUEUE_SHARE = 5, 0.25
    queue = started()._options.queue
    assert (queue.body_bytes, queue.share) == (5 << 20, 0.25)
