"""Loads that nobody waits for: what became of them is there for whoever asks, under the name they were given."""

import asyncio
import os

import aiohttp
import pytest

from tests.workers.engine.client import post
from tests.workers.engine.process import EngineProcess

TOKEN = "fleet-secret"


@pytest.fixture(scope="module")
def fleet_token():
    os.environ["FLEET_TOKEN"] = TOKEN
    yield
    del os.environ["FLEET_TOKEN"]


@pytest.fixture
def absent(fleet_token):
    options = ("--weights", "absent", "--emulated-load-s", "engine=0.2,host=0.3,disk=0.4")
    with EngineProcess("--profile", "constant:2ms", "--model", "tiny", *options) as process:
        yield process


@pytest.fixture(scope="module")
def warm(fleet_token):
    """An engine that has its weights from the start: a test may run alone, or in any order."""
    with EngineProcess("--profile", "constant:2ms", "--model", "tiny") as process:
        yield process


async def state(http):
    async with http.get("/weights") as answer:
        return await answer.json()


async def ended(http):
    for _ in range(100):
        said = await state(http)
        if said["state"] != "loading":
            return said
        await asyncio.sleep(0.05)
    raise AssertionError("it loads forever")


async def test_a_load_in_the_background_is_seen_under_its_name(absent):
    async with aiohttp.ClientSession(absent.url) as http:
        order = {"token": TOKEN, "background": True, "order": "a1", "sources": [{"kind": "host"}]}
        status, said = await post(http, "/weights/load", order)
        assert (status, said["loaded"], said["state"]) == (202, False, "loading")
        said = await ended(http)
        assert (said["state"], said["order"]) == ("absent", "a1")  # there is no copy
        assert [attempt["error"] for attempt in said["attempts"]] == ["there is no copy in host memory"]

        order |= {"order": "a2", "sources": [{"kind": "host"}, {"kind": "disk"}]}
        assert (await post(http, "/weights/load", order))[0] == 202
        status, said = await post(http, "/weights/load", {**order, "order": "a3"})
        assert (status, "already" in said["error"]["message"]) == (409, True)
        said = await ended(http)
        assert (said["state"], said["order"]) == ("present", "a2")
        assert [(each["kind"], bool(each["error"])) for each in said["attempts"]] == [("host", True), ("disk", False)]
        assert said["attempts"][1]["seconds"] > 0.35  # a timer may ring a little early
        assert 0 <= said["present_s"] < 10
        status, said = await post(http, "/weights/load", {**order, "order": "a4"})
        assert (status, said["loaded"], said["order"]) == (200, True, "a2")  # they are here already
        assert (await post(http, "/v1/completions", {"prompt": "x", "max_tokens": 1}))[0] == 200


@pytest.mark.parametrize(("field", "value"), [("background", "yes"), ("order", 7), ("sources", [])])
async def test_a_wrong_field_is_named(warm, field, value):
    body = {"token": TOKEN, "sources": [{"kind": "disk"}], field: value}
    async with aiohttp.ClientSession(warm.url) as http:
        status, said = await post(http, "/weights/load", body)
    assert (status, field in said["error"]["message"]) == (400, True)


async def test_emulated_weights_come_only_from_an_engine_that_has_them(warm):
    with (
        EngineProcess("--profile", "constant:2ms", "--model", "tiny", "--weights", "absent") as target,
        EngineProcess("--profile", "constant:2ms", "--model", "other") as other,
    ):
        sources = [{"kind": "engine", "url": url} for url in ("http://127.0.0.1:9", target.url, other.url)]
        order = {"token": TOKEN, "sources": [*sources, {"kind": "engine", "url": warm.url}]}
        async with aiohttp.ClientSession(target.url) as http:
            status, said = await post(http, "/weights/load", order)
        errors = [attempt["error"] for attempt in said["attempts"]]
    assert (status, said["state"]) == (200, "present")
    assert "could not be queried" in errors[0]
    assert errors[1].endswith("has no complete weights: loading")
    assert errors[2].endswith("serves other instead of tiny")
    assert errors[3] == ""
