"""Signs of life in a real Redis."""

import time

import pytest
import redis
from django.conf import settings

from controller.core.messages import HEARTBEAT_KEY
from workers.tasks import heartbeat

pytestmark = pytest.mark.db


@pytest.fixture(autouse=True)
def fresh_client():
    heartbeat._redis.cache_clear()
    yield
    heartbeat._redis.cache_clear()


def test_the_worker_leaves_the_time_and_it_expires():
    heartbeat.heartbeat()
    client = redis.Redis.from_url(settings.REDIS_URL)
    key = HEARTBEAT_KEY.format(process="worker")
    assert abs(float(client.get(key)) - time.time()) < 5
    assert 0 < client.ttl(key) <= heartbeat.TTL_S


def test_without_redis_it_gives_up_quietly(monkeypatch):
    monkeypatch.setattr(settings, "REDIS_URL", "redis://127.0.0.1:1/0")
    began = time.monotonic()
    heartbeat.sign_of_life("beat")
    assert time.monotonic() - began < 5
