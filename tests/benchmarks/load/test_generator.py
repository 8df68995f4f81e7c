"""The load generator against a scripted server: on time, counted, cut, refused, failed."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.load.generator import LoadRun, Target, drive, gateway_target
from benchmarks.load.workloads import FOUR_TASKS, PlannedArrival

QA = FOUR_TASKS[0]
EVENT = b'data: {"choices":[{"text":"x"}]}\n\n'
DONE = b"data: [DONE]\n\n"


def arrival(at: float, first_token: int, output: int = 3) -> PlannedArrival:
    """The prompt's first token tells the scripted server what to do."""
    return PlannedArrival(at, QA, (first_token, 5, 6), output)


BODIES = web.AppKey("bodies", list)
SERVE, HANG, REFUSE, BREAK, ERROR = 10, 11, 12, 13, 14


async def scripted(request: web.Request) -> web.StreamResponse:
    body = await request.json()
    request.app[BODIES].append((body, request.headers.get("Authorization")))
    script = body["prompt"][0]
    if script == REFUSE:
        return web.json_response({"error": {"code": "slo_infeasible"}}, status=429)
    response = web.StreamResponse(headers={"x-slackline-instance": "engine-7"})
    await response.prepare(request)
    if script == HANG:
        await asyncio.sleep(30)
    if script == ERROR:
        await response.write(EVENT + b'data: {"error":{"message":"engine failed"}}\n\n' + DONE)
        return response
    for _ in range(body["max_tokens"]):
        await response.write(EVENT)
        await asyncio.sleep(0.02)
    if script != BREAK:
        await response.write(DONE)
    return response


@pytest.fixture
async def server():
    app = web.Application()
    app[BODIES] = []
    app.router.add_post("/v1/completions", scripted)
    async with TestServer(app) as started:
        yield started


def target(server: TestServer) -> Target:
    return Target([str(server.make_url("")).rstrip("/")], "mid")


async def test_tokens_and_times(server):
    run = await drive([arrival(0.0, SERVE), arrival(0.05, SERVE, output=4)], target(server))
    assert [sample.outcome for sample in run.samples] == ["ok", "ok"]
    assert [sample.events for sample in run.samples] == [3, 4]
    for sample in run.samples:
        assert sample.due <= sample.sent <= sample.first < sample.last
        assert sample.tpot_s == pytest.approx(0.02, abs=0.1)
        assert 0 < sample.ttft_s < 1.0
    assert run.samples[0].instance == "engine-7"


@pytest.mark.parametrize(
    ("script", "outcome", "status"),
    [(REFUSE, "refused", 429), (BREAK, "failed", 200), (ERROR, "failed", 200)],
)
async def test_what_is_not_an_answer_is_a_miss(server, script, outcome, status):
    run = await drive([arrival(0.0, script)], target(server))
    assert (run.samples[0].outcome, run.samples[0].status) == (outcome, status)
    assert run.samples[0].error
    assert not run.samples[0].attained(QA.targets.ttft_s, QA.targets.tpot_s)


async def test_unfinished_requests_are_cut_after_the_last_arrival(server):
    run = await drive([arrival(0.0, HANG), arrival(0.1, SERVE)], target(server), cutoff_s=0.4)
    assert [sample.outcome for sample in run.samples] == ["cut", "ok"]
    assert run.ended == pytest.approx(0.5, abs=0.3)


async def test_load_is_open_loop(server):
    """A server that never answers does not slow the arrivals down."""
    run = await drive([arrival(0.05 * index, HANG) for index in range(10)], target(server), cutoff_s=0.5)
    assert {sample.outcome for sample in run.samples} == {"cut"}
    assert all(sample.due <= sample.sent < sample.due + 0.5 for sample in run.samples)
    assert len(server.app[BODIES]) == 10


async def test_a_gateway_gets_key_and_class(server):
    url = str(server.make_url("")).rstrip("/")
    await drive([arrival(0.0, SERVE)], gateway_target(url, "mid", "sk-test"))
    body, authorization = server.app[BODIES][0]
    assert (body["slo_class"], authorization) == (QA.name, "Bearer sk-test")


async def test_engines_take_turns(server):
    plan = [arrival(0.01 * index, SERVE, output=1) for index in range(4)]
    run = await drive(plan, Target([str(server.make_url("")).rstrip("/"), "http://127.0.0.1:9"], "mid"))
    assert [sample.outcome for sample in run.samples] == ["ok", "failed", "ok", "failed"]


def test_a_gap_makes_a_run_worthless():
    assert LoadRun([], 0.51, 1.0).stalled
    assert not LoadRun([], 0.49, 1.0).stalled
