"""Limits of the control API: for keys and people, each on its own."""

import pytest

from api.control.access import throttle

pytestmark = [pytest.mark.db, pytest.mark.usefixtures("db")]


@pytest.fixture
def three_a_minute(monkeypatch):
    monkeypatch.setattr(throttle.KeyThrottle, "rate", "3/min")
    monkeypatch.setattr(throttle.PersonThrottle, "rate", "3/min")


@pytest.mark.usefixtures("three_a_minute")
def test_a_key_is_told_when_to_come_back(tenant_key, other_key, viewer):
    for _ in range(3):
        assert tenant_key.get("/models").status_code == 200
    answer = tenant_key.get("/models")
    assert (answer.status_code, answer.data["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(answer["Retry-After"]) <= 61
    assert other_key.get("/models").status_code == 200
    assert viewer.get("/models").status_code == 200


@pytest.mark.usefixtures("three_a_minute")
def test_a_person_has_a_limit_too(viewer):
    statuses = [viewer.get("/models").status_code for _ in range(4)]
    assert statuses == [200, 200, 200, 429]


@pytest.mark.usefixtures("three_a_minute")
def test_the_limit_needs_no_redis(viewer, settings):
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    assert viewer.get("/models").status_code == 200
