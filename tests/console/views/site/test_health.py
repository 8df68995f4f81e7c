"""/healthz: what each answer of a component makes of the whole, and that nothing that hangs holds it up."""

import socket
import time

import pytest
import redis
from django.conf import settings
from django.test import Client

from console.views.site import health
from controller.core.messages import HEARTBEAT_KEY
from tests.factories import instance, scaling_policy, served_model
from workers.tasks.failures import EACH_SECOND

OK = {"state": "ok"}
ROLES = {"c": "collocated", "p": "prefill", "d": "decode"}


def engines(wanted, serving, *least):
    """`wanted`: of each instance a letter for its role, capital when it is ready. `least`: policies by letter."""
    rows = [(f"{n}", 1, ROLES[letter.lower()], letter.isupper()) for n, letter in enumerate(wanted)]
    bounds = [(1, ROLES[role], count, "demo") for role, count in least]
    return health.engines_state(
        {**OK, "engines": rows, "least": bounds}, {**OK, "serving": {f"{n}" for n in range(serving)}}
    )


@pytest.mark.parametrize(
    ("wanted", "serving", "least", "state"),
    [
        ("CC", 2, [("c", 2)], "ok"),
        ("Cc", 2, [("c", 2)], "degraded"),
        ("CC", 1, [("c", 2)], "degraded"),  # the gateway does not reach one
        ("cc", 2, [("c", 2)], "down"),
        ("CCc", 2, [("c", 2)], "ok"),  # the scaler has asked for a third
        ("", 0, [], "down"),  # nothing serves
        ("C", 1, [("c", 0)], "ok"),
        ("C", 1, [], "ok"),
        ("PP", 2, [("p", 1), ("d", 1)], "down"),  # two that prefill, none that decodes
        ("PD", 2, [("p", 1), ("d", 1)], "ok"),
        ("PD", 2, [("p", 1), ("d", 2)], "degraded"),
        ("PD", 2, [("c", 2)], "degraded"),  # collocated ones are wanted, but both stages are served
    ],
)
def test_enough_engines_of_each_kind_must_be_reached_by_the_gateway(wanted, serving, least, state):
    assert engines(wanted, serving, *least)["state"] == state


def test_the_kind_that_is_missing_is_named():
    said = engines("PP", 2, ("p", 1), ("d", 1))
    assert said == {"state": "down", "ready": 2, "total": 2, "detail": "0 of 1 ready (demo, decode)"}


@pytest.mark.parametrize(
    ("states", "status"),
    [
        (["ok", "ok"], "ok"),
        (["ok", "degraded"], "degraded"),
        (["degraded", "down"], "unavailable"),
        (["unknown", "ok"], "unavailable"),
    ],
)
def test_the_whole_is_as_good_as_its_worst_component(states, status):
    assert health.status_of({str(n): {"state": state} for n, state in enumerate(states)}) == status


def test_engines_are_unknown_while_the_database_or_the_gateway_is_away():
    away = {"state": "down"}
    assert health.engines_state(away, {**OK, "serving": {"0"}})["state"] == "unknown"
    assert health.engines_state({**OK, "engines": [], "least": []}, away)["state"] == "unknown"


@pytest.mark.parametrize(("age_s", "state"), [(1.0, "ok"), (11.0, "down"), (None, "down")])
def test_a_heartbeat_that_stopped_is_down(age_s, state):
    raw = None if age_s is None else str(time.time() - age_s).encode()
    assert health.heartbeat_state({**OK, "beat": raw}, "beat")["state"] == state


def failing(**counts):
    return [{b"count": b"%d" % counts[task], b"error": b"ValueError"} if task in counts else {} for task in TASKS]


TASKS = [name.replace(".", "_") for name in EACH_SECOND]


@pytest.mark.parametrize(
    ("counts", "state", "detail"),
    [
        ({}, "ok", ""),
        ({"instances_reconcile": 2}, "ok", ""),  # a hiccup
        ({"instances_reconcile": 3}, "down", "instances.reconcile failed 3 times in a row (ValueError)"),
    ],
)
def test_a_job_that_fails_each_time_is_down_although_its_worker_lives(counts, state, detail):
    assert health.jobs_state({**OK, "failing": failing(**counts)}) == {"state": state, "detail": detail}


def test_of_jobs_nothing_is_known_without_redis():
    assert health.jobs_state({"state": "down"})["state"] == "unknown"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({}, ""),
        ({"config_age_s": 0.5}, ""),
        ({"config_age_s": 31.2}, "has not read its configuration for 31 s"),
        ({"config_age_s": None}, "has not read its configuration from the database yet"),
    ],
)
def test_a_gateway_that_cannot_read_its_configuration_is_down(body, told):
    assert health.config_old(body) == told


async def test_its_engines_are_still_counted():
    ready = {"state": "ok", "engines": [("0", 1, "c", True)], "least": []}
    assert health.engines_state(ready, {"state": "down", "serving": {"0"}})["state"] == "ok"


async def test_a_check_that_hangs_is_cut_off(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never says a word
        monkeypatch.setattr(settings, "GATEWAY_URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(settings, "REDIS_URL", f"redis://127.0.0.1:{silent.getsockname()[1]}/0")
        monkeypatch.setattr(health, "CHECK_TIMEOUT_S", 0.3)
        began = time.monotonic()
        for check in (health.check_gateway, health.check_redis):
            assert (await health._bounded(check))["state"] == "down"
        assert time.monotonic() - began < 5


@pytest.mark.db
@pytest.mark.django_db(transaction=True)
def test_503_names_what_is_missing_and_tells_no_secret(monkeypatch):
    model = served_model()
    instance(model)
    scaling_policy(model)
    monkeypatch.setattr(settings, "GATEWAY_URL", "http://127.0.0.1:1")
    redis.Redis.from_url(settings.REDIS_URL).set(HEARTBEAT_KEY.format(process="worker"), time.time(), ex=30)
    answer = Client().get("/healthz")
    components = answer.json()["components"]
    assert (answer.status_code, answer.json()["status"]) == (503, "unavailable")
    assert "gateway: ClientConnectorError" in answer.json()["reason"]
    assert components["postgres"]["state"] == components["redis"]["state"] == components["worker"]["state"] == "ok"
    assert components["gateway"] == {"state": "down", "detail": "ClientConnectorError"}
    assert components["engines"]["state"] == "unknown"
    assert components["jobs"] == {"state": "ok", "detail": ""}
    assert settings.REDIS_URL not in answer.text
