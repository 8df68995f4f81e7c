"""Gateways are told of a change after it was committed; Redis being away does not undo it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from django.db import transaction

from workers import live
from workers.notices import announce_config

pytestmark = [pytest.mark.db, pytest.mark.django_db]


def test_gateways_hear_the_version_once_it_is_committed(
    monkeypatch: pytest.MonkeyPatch, django_capture_on_commit_callbacks: Any
) -> None:
    told: list[int] = []
    monkeypatch.setattr(live, "notify_config", told.append)
    with django_capture_on_commit_callbacks(execute=True), transaction.atomic():
        announce_config()
        assert told == []
    assert len(told) == 1


def test_without_redis_the_change_stands(
    monkeypatch: pytest.MonkeyPatch, django_capture_on_commit_callbacks: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def away(version: int) -> None:
        raise live.LiveUnavailable("Redis is unavailable: test")

    monkeypatch.setattr(live, "notify_config", away)
    with caplog.at_level(logging.INFO, "workers.notices"), django_capture_on_commit_callbacks(execute=True):
        announce_config()
    assert "gateways were not notified" in caplog.text
