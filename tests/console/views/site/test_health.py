"""/healthz: what each answer of a component makes of the whole, and that nothing that hangs holds it up."""

import asyncio
import socket
import time

import pytest
import redis
from django.conf import settings
from django.test import Client

from console.live.ttl_cache import TtlCache
from console.views.site import health, metrics
from controller.core.messages import HEARTBEAT_KEY
from tests.factories import instance, scaling_policy, served_model
from workers.tasks.failures import EACH_SECOND

OK = {"state": "ok"}
TOKEN = "a-token-for-metrics"


@pytest.fixture(autouse=True)
def _recent(monkeypatch):
    """No state of another test."""
    monkeypatch.setattr(health, "RECENT", health.KeptState())
    monkeypatch.setattr(metrics, "WORKFLOWS", TtlCache(0.0))
    monkeypatch.setattr(metrics, "workflow_goodput", lambda **window: [])
    monkeypatch.setattr(metrics, "PAGE", TtlCache(1.0))


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


@pytest.fixture
def states(monkeypatch):
    """How often the state was made; it is always ok."""
    made = []

    async def whole_state():
        made.append(1)
        await asyncio.sleep(0.05)
        return {"status": "ok", "reason": "", "components": {"engines": {"state": "ok", "ready": 3}}}

    monkeypatch.setattr(health, "whole_state", whole_state)
    return made


def test_strangers_get_the_status_alone_and_no_figures(states):
    client = Client(REMOTE_ADDR="10.0.0.9")
    assert client.get("/healthz").json() == {"status": "ok"}
    refused = client.get("/metrics")
    assert (refused.status_code, refused["WWW-Authenticate"]) == (401, 'Bearer realm="slackline"')
    assert "slackline_" not in refused.text


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "::ffff:127.0.0.1"])
def test_without_a_token_the_same_machine_sees_all(states, address, monkeypatch):
    monkeypatch.setattr(metrics, "PAGE", TtlCache(1.0))
    monkeypatch.setattr(metrics.live, "read_fleet", list)
    client = Client(REMOTE_ADDR=address)
    assert "engines" in client.get("/healthz").json()["components"]
    assert b"slackline_live_available 1.0" in client.get("/metrics").content


def test_with_a_token_everybody_needs_it(states, monkeypatch, settings):
    settings.METRICS_TOKEN = TOKEN
    monkeypatch.setattr(metrics.live, "read_fleet", list)
    for address in ("127.0.0.1", "10.0.0.9"):
        client = Client(REMOTE_ADDR=address)
        for wrong in ("", "Bearer", f"Bearer {TOKEN}x", f"Basic {TOKEN}", "Bearer é"):
            head = {"Authorization": wrong} if wrong else {}
            assert client.get("/healthz", headers=head).json() == {"status": "ok"}, wrong
            assert client.get("/metrics", headers=head).status_code == 401, wrong
        right = {"Authorization": f"Bearer {TOKEN}"}
        assert "components" in client.get("/healthz", headers=right).json()
        assert client.get("/metrics", headers=right).status_code == 200


async def test_a_hundred_who_ask_at_once_cost_one_check(states):
    recent = health.KeptState()
    answers = await asyncio.gather(*(recent.get() for _ in range(100)))
    assert {answer["status"] for answer in answers} == {"ok"}
    await recent.get()
    assert len(states) == 1


async def test_a_caller_who_hangs_up_does_not_end_the_check_of_others(states):
    recent = health.KeptState()
    first, second = asyncio.create_task(recent.get()), asyncio.create_task(recent.get())
    await asyncio.sleep(0.01)
    first.cancel()
    assert (await second)["status"] == "ok"


def test_the_figures_are_made_once_a_second(monkeypatch):
    made = []
    monkeypatch.setattr(metrics.live, "read_fleet", lambda: made.append(1) or [])
    for _ in range(5):
        assert Client().get("/metrics").status_code == 200
    assert len(made) == 1


def test_a_gateway_that_hides_its_instances_is_named():
    assert "METRICS_TOKEN" in health.gateway_state(200, {"status": "ok"})["detail"]


@pytest.mark.parametrize("host", ["10.1.2.3", "anything.example"])
async def test_liveness_needs_nothing_and_tells_nothing(host, monkeypatch, settings):
    """Not even a host name that is allowed, which probes by address do not have."""
    from console.asgi import application

    settings.METRICS_TOKEN = TOKEN
    monkeypatch.setattr(health, "whole_state", None)
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "http", "path": "/livez", "method": "GET", "headers": [(b"host", host.encode())], "client": None}
    await application(scope, None, send)
    assert (sent[0]["status"], sent[1]["body"]) == (200, b"ok\n")
