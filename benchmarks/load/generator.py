"""Open-loop streaming load generator: sends the requests of a plan on time, whatever comes back, and measures each.

Times are seconds after the start of the run. TTFT and E2E count from the moment a request was *due*, so that a slow
generator cannot make a server look better. Tokens are counted in the raw bytes, one per `data: ` event, without
parsing. A ticker every 10 ms measures how far the machine stalled; a run with a gap above `MAX_GAP_S` is not used.
Requests still open `cutoff_s` after the last arrival are cut and count as misses.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import orjson
import uvloop

from benchmarks.load.lengths import emulated, stopped
from benchmarks.load.workloads import PlannedArrival, Task

TICK_S = 0.01
MAX_GAP_S = 0.5
CUTOFF_S = 25.0
COMPLETIONS = "/v1/completions"


@dataclass(slots=True)
class RequestTiming:
    """One request's result. `outcome`: ok | refused (HTTP 429, 503, 504) | failed | cut."""

    task: str
    due: float
    prompt_tokens: int
    output_tokens: int
    sent: float = math.nan
    first: float = math.nan
    last: float = math.nan
    events: int = 0
    outcome: str = "cut"
    status: int = 0
    error: str = ""
    instance: str = ""

    @property
    def ttft_s(self) -> float:
        return self.first - self.due

    @property
    def tpot_s(self) -> float:
        """(last - first) / (n - 1); an answer of one token has none and meets any target."""
        return (self.last - self.first) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0

    @property
    def e2e_s(self) -> float:
        return self.last - self.due

    def attained(self, ttft_s: float, tpot_s: float) -> bool:
        """Both targets met (HyperFlexis eq. 4); unfinished, refused and failed requests are misses."""
        return self.outcome == "ok" and self.ttft_s <= ttft_s and self.tpot_s <= tpot_s


@dataclass(slots=True)
class LoadRun:
    """All samples of one run, the largest gap of the ticker, and when the run was cut or ended."""

    samples: list[RequestTiming]
    largest_gap_s: float
    ended: float

    @property
    def stalled(self) -> bool:
        return self.largest_gap_s > MAX_GAP_S


@dataclass(frozen=True, slots=True)
class Target:
    """Where and how requests are sent: base URLs used in turn, headers, and extra body fields of an arrival."""

    urls: Sequence[str]
    model: str
    headers: Mapping[str, str] = field(default_factory=dict)
    extra: Callable[[PlannedArrival], Mapping[str, Any]] = lambda arrival: {}


def gateway_target(url: str, model: str, api_key: str, own_targets: bool = False) -> Target:
    """Through Slackline: one URL, a key, and the task's name as the SLO class. `own_targets`: each request also names
    the task's targets, so that it may wait at least until its own TTFT target.
    """

    def extra(arrival: PlannedArrival) -> dict[str, Any]:
        named: dict[str, Any] = {"slo_class": arrival.task.name}
        if own_targets:
            named |= {"target_ttft": arrival.task.targets.ttft_s, "target_tbt": arrival.task.targets.tpot_s}
        return named

    return Target([url], model, {"Authorization": f"Bearer {api_key}"}, extra)


def direct_target(urls: Sequence[str], model: str, tasks: Sequence[Task], by_class: bool) -> Target:
    """Round robin at the engines themselves. `by_class`: with vLLM's `priority`, the tightest TTFT first; equal targets
    have equal priority.
    """
    if not by_class:
        return Target(urls, model)
    order = sorted({task.targets.ttft_s for task in tasks})
    return Target(urls, model, extra=lambda arrival: {"priority": order.index(arrival.task.targets.ttft_s)})


def without_lengths(target: Target, tasks: Sequence[Task], engines_emulated: bool = False) -> Target:
    """`target`, whose requests all have one cap, that of the longest answer that `tasks` can have."""
    cap, ending = max(task.output.high for task in tasks), emulated if engines_emulated else stopped

    def extra(arrival: PlannedArrival) -> dict[str, Any]:
        return {**target.extra(arrival), **ending(arrival.output_tokens, cap)}

    return replace(target, extra=extra)


class _Ticker:
    """Sleeps 10 ms again and again, and keeps the largest overshoot."""

    def __init__(self) -> None:
        self.largest_gap_s = 0.0

    async def run(self) -> None:
        before = time.perf_counter()
        while True:
            await asyncio.sleep(TICK_S)
            now = time.perf_counter()
            self.largest_gap_s = max(self.largest_gap_s, now - before - TICK_S)
            before = now


async def drive(plan: Sequence[PlannedArrival], target: Target, cutoff_s: float = CUTOFF_S) -> LoadRun:
    """Send the whole plan and wait for its end or the cut-off."""
    bodies = [orjson.dumps(arrival.body(target.model, **target.extra(arrival))) for arrival in plan]
    samples = [RequestTiming(a.task.name, a.at, len(a.prompt), a.output_tokens) for a in plan]
    headers = {"Content-Type": "application/json", **target.headers}
    ticker = _Ticker()
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
        ticking = asyncio.create_task(ticker.run())
        start = time.perf_counter() + 0.1
        urls = itertools.cycle(f"{url}{COMPLETIONS}" for url in target.urls)
        tasks = [
            asyncio.create_task(_one(session, next(urls), body, sample, start))
            for body, sample in zip(bodies, samples, strict=True)
        ]
        last_due = samples[-1].due if samples else 0.0
        wait_s = start + last_due + cutoff_s - time.perf_counter()
        _, unfinished = await asyncio.wait(tasks, timeout=max(0.0, wait_s))
        ended = time.perf_counter() - start
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        ticking.cancel()
    return LoadRun(samples, ticker.largest_gap_s, ended)


async def _one(session: aiohttp.ClientSession, url: str, body: bytes, sample: RequestTiming, start: float) -> None:
    """Send one request on time. Its outcome stays "cut" if the task is cancelled."""
    await asyncio.sleep(max(0.0, start + sample.due - time.perf_counter()))
    sample.sent = time.perf_counter() - start
    try:
        async with session.post(url, data=body) as response:
            sample.status = response.status
            sample.instance = response.headers.get("x-slackline-instance", "")
            if response.status == 200:
                await _read(response, sample, start)
            else:
                sample.outcome = "refused" if response.status in (429, 503, 504) else "failed"
                sample.error = (await response.text())[:300]
    except (aiohttp.ClientError, OSError) as error:
        sample.outcome, sample.error = "failed", f"{type(error).__name__}: {error}"


async def _read(response: aiohttp.ClientResponse, sample: RequestTiming, start: float) -> None:
    done, tail = False, b""
    async for chunk in response.content.iter_any():
        events = chunk.count(b"data: {")
        if events:
            sample.last = time.perf_counter() - start
            if not sample.events:
                sample.first = sample.last
            sample.events += events
        tail = (tail + chunk)[-400:]
        done = done or b"data: [DONE]" in tail
        if b'data: {"error"' in tail:
            sample.outcome, sample.error = "failed", tail.decode(errors="replace")
            return
    sample.outcome = "ok" if done and sample.events else "failed"
    if sample.outcome == "failed":
        sample.error = "stream ended early"


def run_plan(plan: Sequence[PlannedArrival], target: Target, cutoff_s: float = CUTOFF_S) -> LoadRun:
    """`drive` in its own event loop."""
    return uvloop.run(drive(plan, target, cutoff_s))
