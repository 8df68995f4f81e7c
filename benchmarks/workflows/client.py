"""Sends planned workflows: each call once its parents have answered, whatever happens to others.

Times are seconds after the start of the run. A call counts from the moment it was due: its workflow's arrival, or the
last answer of the stage before and the tool between. A call that is refused or fails ends its workflow. What is open
once nothing can be in time any more is cut.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson
import uvloop

from benchmarks.load.generator import COMPLETIONS, TICK_S
from benchmarks.workflows.plan import PlannedWorkflow, SentCall, WorkflowTargets, body_of

CONNECT_S = 30.0


@dataclass(slots=True)
class CallTiming:
    """One call. `events`: when each token came. `outcome`: ok | refused | failed | cut. `refusal`: status and error."""

    stage: int
    prompt_tokens: int
    output_tokens: int
    due: float
    events: list[float] = field(default_factory=list)
    outcome: str = "cut"
    refusal: str = ""

    @property
    def ttft_s(self) -> float:
        return self.events[0] - self.due if self.events else math.inf

    @property
    def e2e_s(self) -> float:
        return self.events[-1] - self.due if self.outcome == "ok" else math.inf

    @property
    def tbt_s(self) -> float:
        """Mean; tokens that came together count each."""
        return (self.events[-1] - self.events[0]) / max(1, self.output_tokens - 1) if self.events else math.inf


@dataclass(slots=True)
class WorkflowTiming:
    """One workflow. `done`: whether all of its calls were answered."""

    workflow: PlannedWorkflow
    calls: list[CallTiming] = field(default_factory=list)
    done: bool = False

    @property
    def e2e_s(self) -> float:
        return max(call.events[-1] for call in self.calls) - self.workflow.at if self.done else math.inf


@dataclass(slots=True)
class WorkflowRun:
    """`largest_gap_s`: of a ticker, by which the machine stalled."""

    workflows: list[WorkflowTiming]
    largest_gap_s: float
    ended: float


@dataclass(frozen=True, slots=True)
class WorkflowTarget:
    """Where calls go: base URLs in turn, headers, and further fields of a call."""

    urls: Sequence[str]
    model: str
    headers: Mapping[str, str] = field(default_factory=dict)
    fields: Callable[[SentCall], Mapping[str, Any]] = lambda sent: {}


class _Run:
    def __init__(self, session: aiohttp.ClientSession, target: WorkflowTarget, start: float) -> None:
        self._session, self._target, self._start = session, target, start
        self._urls = itertools.cycle(f"{url}{COMPLETIONS}" for url in target.urls)

    def now(self) -> float:
        return time.perf_counter() - self._start

    async def workflow(self, timing: WorkflowTiming) -> None:
        workflow = timing.workflow
        due = workflow.at
        for stage in range(len(workflow.stages)):
            await asyncio.sleep(max(0.0, due - self.now()))
            sent = [SentCall(workflow, stage, place, due) for place in range(len(workflow.stages[stage]))]
            calls = await asyncio.gather(*(self._call(timing, each) for each in sent))
            if any(call.outcome != "ok" for call in calls):
                return
            due = max(call.events[-1] for call in calls) + (
                workflow.tools_s[stage] if stage < len(workflow.tools_s) else 0.0
            )
        timing.done = True

    async def _call(self, timing: WorkflowTiming, sent: SentCall) -> CallTiming:
        call = CallTiming(sent.stage, len(sent.call.prompt), sent.call.output_tokens, sent.at)
        timing.calls.append(call)
        body = orjson.dumps({**body_of(sent, self._target.model), **self._target.fields(sent)})
        try:
            async with self._session.post(next(self._urls), data=body) as response:
                if response.status == 200:
                    await self._read(response, call)
                else:
                    call.outcome = "refused" if response.status in (429, 503, 504) else "failed"
                    call.refusal = f"{response.status} {(await response.text())[:300]}"
        except (aiohttp.ClientError, OSError) as error:
            call.outcome, call.refusal = "failed", f"{type(error).__name__}: {error}"
        return call

    async def _read(self, response: aiohttp.ClientResponse, call: CallTiming) -> None:
        tail = b""
        async for chunk in response.content.iter_any():
            if events := chunk.count(b"data: {"):
                call.events += [self.now()] * events
            tail = (tail + chunk)[-400:]
            if b'data: {"error"' in tail:
                call.outcome, call.refusal = "failed", tail.decode(errors="replace")
                return
        call.outcome = "ok" if b"data: [DONE]" in tail and call.events else "failed"
        if call.outcome == "failed":
            call.refusal = "the stream ended early"


async def _tick(gaps: list[float]) -> None:
    before = time.perf_counter()
    while True:
        await asyncio.sleep(TICK_S)
        now = time.perf_counter()
        gaps[0] = max(gaps[0], now - before - TICK_S)
        before = now


async def drive(plan: Sequence[PlannedWorkflow], target: WorkflowTarget, until_s: float) -> WorkflowRun:
    """The whole plan, cut `until_s` after the start."""
    timings = [WorkflowTiming(workflow) for workflow in plan]
    gaps = [0.0]
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
    headers = {"Content-Type": "application/json", **target.headers}
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        ticking = asyncio.create_task(_tick(gaps))
        run = _Run(session, target, time.perf_counter() + 0.1)
        tasks = [asyncio.create_task(run.workflow(timing)) for timing in timings]
        _, open_ones = await asyncio.wait(tasks, timeout=until_s - run.now())
        ended = run.now()
        for task in open_ones:
            task.cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        ticking.cancel()
    for error in found:
        if isinstance(error, Exception):  # of this program; a cut task has a CancelledError, which is none
            raise error
    return WorkflowRun(timings, gaps[0], ended)


def last_due_s(plan: Sequence[PlannedWorkflow], targets: WorkflowTargets) -> float:
    """After which no workflow and no token of a latency request can be in time."""
    return max(
        workflow.at + min(targets.deadline_s(workflow), targets.ttft_s + targets.tbt_s * longest_answer(workflow))
        if workflow.kind == "latency"
        else workflow.at + targets.deadline_s(workflow)
        for workflow in plan
    )


def longest_answer(workflow: PlannedWorkflow) -> int:
    return max(call.output_tokens for stage in workflow.stages for call in stage)


def run_workflows(plan: Sequence[PlannedWorkflow], target: WorkflowTarget, until_s: float) -> WorkflowRun:
    """`drive` in its own event loop. Raises ValueError for an empty plan."""
    if not plan:
        raise ValueError("a plan without workflows cannot be run")
    return uvloop.run(drive(plan, target, until_s))
