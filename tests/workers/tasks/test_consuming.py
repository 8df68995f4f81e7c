"""A worker that is idle although messages wait drops its connection; its loop makes another (seen in tests/faults)."""

import pytest
import redis
from celery.worker import state
from django.conf import settings

from tests.workers.tasks.consumers import Consumer
from workers.tasks.consuming import LOOK_EVERY_S, LOOKS, StalledConsumer

pytestmark = pytest.mark.db
QUEUE = "queue-of-this-test"


@pytest.fixture
def client():
    client = redis.Redis.from_url(settings.REDIS_URL)
    yield client
    client.delete(QUEUE)


@pytest.fixture
def look():
    consumer = Consumer(QUEUE, "an-empty-one")
    step = StalledConsumer(consumer)
    step.start(consumer)
    ((seconds, work, args),) = consumer.calls
    assert seconds == LOOK_EVERY_S
    yield lambda: work(*args)
    step.stop(consumer)
    assert consumer.cancelled == 1


def test_messages_that_are_left_lying_end_the_connection(client, look):
    client.rpush(QUEUE, "a message")
    for _ in range(LOOKS - 1):
        look()
    with pytest.raises(OSError, match=QUEUE):  # what Celery's loop takes for a lost connection
        look()


def test_one_that_is_taken_in_between_does_not(client, look):
    for _ in range(3):
        client.rpush(QUEUE, "a message")
        for _ in range(LOOKS - 1):
            assert look() is None
        client.delete(QUEUE)
        assert look() is None


def test_a_worker_that_is_busy_may_leave_them(client, look, monkeypatch):
    client.rpush(QUEUE, "a message")
    monkeypatch.setattr(state, "active_requests", {"one"})
    for _ in range(LOOKS + 1):
        assert look() is None


def test_without_redis_there_is_nothing_to_say(look, monkeypatch):
    monkeypatch.setattr(settings, "REDIS_URL", "redis://127.0.0.1:1/0")
    for _ in range(LOOKS + 1):
        assert look() is None
