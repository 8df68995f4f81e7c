"""Signs of life in a real Redis."""

import time

import pytest
import redis
from django.conf import settings

from controller.core.messages import HEARTBEAT_KEY
from tests.workers.tasks.consumers import Consumer
from workers.celery import app
from workers.tasks import heartbeat, reconcile
from workers.tasks.failures import failing_in_words, read_failing

pytestmark = pytest.mark.db


def test_the_worker_leaves_the_time_and_it_expires():
    heartbeat.heartbeat()
    client = redis.Redis.from_url(settings.REDIS_URL)
    key = HEARTBEAT_KEY.format(process="worker")
    assert abs(float(client.get(key)) - time.time()) < 5
    assert 0 < client.ttl(key) <= heartbeat.TTL_S


def test_without_redis_it_gives_up_quietly(monkeypatch):
    monkeypatch.setattr(settings, "REDIS_URL", "redis://127.0.0.1:1/0")
    began = time.monotonic()
    heartbeat.heartbeat_send("beat")
    assert time.monotonic() - began < 5


def test_the_worker_of_long_jobs_lives_whatever_its_child_is_at():
    client = redis.Redis.from_url(settings.REDIS_URL)
    key = HEARTBEAT_KEY.format(process="analysis")
    client.delete(key)
    consumer = Consumer("analysis")
    step = heartbeat.AnalysisHeartbeat(consumer)
    step.start(consumer)
    assert abs(float(client.get(key)) - time.time()) < 5
    ((seconds, work, args),) = consumer.calls
    client.delete(key)
    work(*args)
    assert client.exists(key)
    assert seconds <= 2.0
    step.stop(consumer)
    assert consumer.cancelled == 1


def test_a_worker_of_other_queues_does_not_speak_for_it():
    client = redis.Redis.from_url(settings.REDIS_URL)
    client.delete(HEARTBEAT_KEY.format(process="analysis"))
    consumer = Consumer("control", "actions")
    step = heartbeat.AnalysisHeartbeat(consumer)
    step.start(consumer)
    step.stop(consumer)
    assert consumer.calls == []
    assert not client.exists(HEARTBEAT_KEY.format(process="analysis"))


@pytest.mark.django_db
def test_a_task_that_fails_again_and_again_is_told_until_it_succeeds(monkeypatch):
    """Through the signals of Celery, as in a worker."""

    def look(*args):
        raise ValueError("secret")

    redis.Redis.from_url(settings.REDIS_URL).flushdb()
    monkeypatch.setattr(reconcile, "reconcile_once", look)
    for _ in range(3):
        assert failing_in_words(read_failing()) == ""
        app.tasks[reconcile.RECONCILE].apply()
    assert failing_in_words(read_failing()) == "instances.reconcile failed 3 times in a row (ValueError)"
    monkeypatch.setattr(reconcile, "reconcile_once", lambda *args: None)
    app.tasks[reconcile.RECONCILE].apply()
    assert failing_in_words(read_failing()) == ""
