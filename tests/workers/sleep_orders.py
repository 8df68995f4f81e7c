"""What tests of sleep and wake-up share: orders carried out, workers killed at them, what an engine then serves."""

from datetime import timedelta

import requests
from django.utils import timezone

from controller.models import Action, Instance
from controller.services.actors import Actor
from controller.services.fleet.sleeping import sleep_order
from workers.actions.long_calls import LongCalls
from workers.actions.runner import advance_actions
from workers.actions.sleep_client import SleepClient

OLGA = Actor.person("olga")


class Killed(BaseException):
    """What `kill -9` is to the worker: nothing after it runs."""


def looks(times=1, client=SleepClient):
    calls = LongCalls(threads=False)  # a process of its own: what another one waited for is not known here
    return [decision for _ in range(times) for decision in advance_actions([], sleep=client, calls=calls)]


def lease_runs_out():
    Action.objects.update(lease_until=timezone.now() - timedelta(seconds=1))


def put_to_sleep(row, level=1):
    sleep_order(actor=OLGA, instance_id=row.pk, level=level)
    (decision,) = looks()
    assert decision.kind == "instance_asleep", decision.outcome
    return Instance.objects.get(pk=row.pk)


def answer(vllm):
    return requests.post(f"{vllm.url}/v1/completions", json={}, timeout=5).json()["choices"][0]["text"]


def killed(when, verb):
    """A client whose worker dies before it looks, before it says the verb, or after it has said it."""

    class Client(SleepClient):
        def look(self):
            if when == "look":
                raise Killed
            return super().look()

        def _call(self, path, query, body, timeout_s):
            mine = path == f"/{verb}"
            if mine and when == verb:
                raise Killed
            found = super()._call(path, query, body, timeout_s)
            if mine and when == "after":
                raise Killed
            return found

    return Client
