"""The client of bench-workflows against a small server: later calls wait for the answers of their parents."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from aiohttp import web

from benchmarks.workflows.client import WorkflowRun, WorkflowTarget, drive, last_due_s
from benchmarks.workflows.plan import COMPOUND, LATENCY, PlannedCall, PlannedWorkflow, WorkflowTargets

TARGETS = WorkflowTargets(ttft_s=0.5, tbt_s=0.1, e2e_s=2.0)
ANSWER_S = 0.05


def compound(at: float = 0.0) -> PlannedWorkflow:
    """Two calls side by side, then one, then one."""
    stages = tuple(tuple(PlannedCall((10 * stage + i,), 2) for i in range(n)) for stage, n in enumerate((2, 1, 1)))
    return PlannedWorkflow(0, at, COMPOUND, "app", stages, (0.1, 0.0))


async def served(
    plan: list[PlannedWorkflow], refuse: int | None, until_s: float = 5.0
) -> tuple[WorkflowRun, dict[int, list[float]]]:
    """The run, and when each prompt's call began and ended at the server. `refuse`: the prompt to answer with 429."""
    seen: dict[int, list[float]] = {}

    async def complete(request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = await request.json()
        prompt = body["prompt"][0]
        seen[prompt] = [time.perf_counter()]
        if prompt == refuse:
            return web.json_response({"error": {}}, status=429)
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(2):
            await asyncio.sleep(ANSWER_S)
            await response.write(b'data: {"choices": [{"text": "a"}]}\n\n')
        await response.write(b"data: [DONE]\n\n")
        seen[prompt].append(time.perf_counter())
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        return await drive(plan, WorkflowTarget([f"http://{host}:{port}"], "m"), until_s), seen
    finally:
        await runner.cleanup()


def test_a_stage_begins_when_the_one_before_has_answered_and_its_tool_has_run() -> None:
    run, seen = asyncio.run(served([compound()], None))
    (found,) = run.workflows
    assert found.done
    assert [call.outcome for call in found.calls] == ["ok"] * 4
    assert [len(call.events) for call in found.calls] == [2] * 4
    assert seen[1][0] < seen[0][1]  # side by side
    assert seen[10][0] >= max(seen[0][1], seen[1][1]) + 0.09
    assert seen[20][0] >= seen[10][1]
    later = found.calls[2]
    assert later.due >= max(call.events[-1] for call in found.calls[:2]) + 0.1
    assert later.e2e_s >= ANSWER_S


def test_a_refused_call_ends_its_workflow() -> None:
    run, seen = asyncio.run(served([compound()], 10))
    (found,) = run.workflows
    assert not found.done
    assert [call.outcome for call in found.calls] == ["ok", "ok", "refused"]
    assert found.calls[2].refusal.startswith("429")
    assert 20 not in seen


def test_what_is_open_at_the_end_is_cut() -> None:
    run, _ = asyncio.run(served([compound(), compound(0.5)], None, until_s=0.4))
    assert [each.done for each in run.workflows] == [False, False]
    assert any(call.outcome == "cut" for call in run.workflows[0].calls)
    assert not run.workflows[1].calls


def test_a_run_lasts_until_nothing_can_be_in_time() -> None:
    paced = PlannedWorkflow(1, 3.0, LATENCY, "app", ((PlannedCall((1,), 50),),), ())
    assert last_due_s([compound(1.0)], TARGETS) == 1.0 + 3 * 2.0
    assert last_due_s([paced], TARGETS) == 3.0 + 0.5 + 50 * 0.1
