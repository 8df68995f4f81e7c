"""Where a prediction is made: what it adds to a request on the event loop or in a thread beside it.

One process, whose loop does what a gateway's does for its requests, as far as it matters here: each takes `WORK_MS` of
processor time at its arrival, so little that the loop is mostly idle and queues say nothing. They arrive as a Poisson
process. Every 0.25 s a batch of running answers is predicted again. Ways, in turn, so that what else the machine does
is shared:

- `off`: nothing is predicted.
- `loop`: at the arrival on the loop, batches in a thread. So a gateway does it.
- `thread`: both in a thread.
- `loop_only`: both on the loop.

`latency_ms`: from when a request was due until it has been predicted and worked on, p50 and p99. `cpu_ms`: processor
time of the process for each request. Medians of the turns; `added_*` against `off`.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from typing import Any

import numpy as np
import uvloop

from controller.predict.answer_lengths import LOWER, MEDIAN, TARGET
from controller.predict.length_forest import LengthForest

WAYS = ("off", "loop", "thread", "loop_only")
RATE = 200.0  # requests/s
WORK_MS = 0.5
PERIOD_S = 0.25  # of batches
BATCH = 10  # answers: a tenth of the requests have 110 tokens, and are asked about at 50 and at 100
TURNS, SECONDS = 8, 4.0  # of each way
Features = Sequence[Sequence[float]]


def arrivals_told(forest: LengthForest, features: Features, *, turns: int, seconds: float) -> dict[str, Any]:
    """By way. `features`: of requests, in their order, from the start again after the last one."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for turn in range(turns):
        for way in WAYS if turn % 2 == 0 else reversed(WAYS):
            rng = np.random.default_rng(turn)  # the same arrivals for each way
            due = np.cumsum(rng.exponential(1.0 / RATE, int(RATE * seconds))).tolist()
            found[way].append(uvloop.run(_block(way, forest, cycle(features), due)))
    names = ("latency_p50_ms", "latency_p99_ms", "cpu_ms")
    told = {way: {name: statistics.median(each[name] for each in of) for name in names} for way, of in found.items()}
    for way in WAYS[1:]:
        told[way] |= {f"added_{name}": told[way][name] - told["off"][name] for name in names}
    return {way: {name: round(value, 3) for name, value in of.items()} for way, of in told.items()}


async def _block(way: str, forest: LengthForest, features: Iterator[Sequence[float]], due: Sequence[float]) -> Any:
    loop = asyncio.get_running_loop()
    latencies: list[float] = []

    def first() -> None:
        forest.quantiles(next(features), (LOWER, MEDIAN, TARGET))

    def again() -> None:
        for _ in range(BATCH):
            forest.quantiles(next(features), (LOWER, TARGET), 50)

    async def batches() -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            if way == "loop_only":
                again()
            elif way != "off":
                await loop.run_in_executor(pool, again)

    async def one(at: float) -> None:
        await asyncio.sleep(max(0.0, start + at - time.perf_counter()))
        if way == "thread":
            await loop.run_in_executor(pool, first)
        elif way != "off":
            first()
        _work()
        latencies.append(time.perf_counter() - start - at)

    with ThreadPoolExecutor(1) as pool:
        refining = asyncio.ensure_future(batches())
        start, began = time.perf_counter(), time.process_time()
        await asyncio.gather(*(one(at) for at in due))
        cpu_s = time.process_time() - began
        refining.cancel()
    p50, p99 = np.quantile(latencies, (0.5, 0.99)) * 1e3
    return {"latency_p50_ms": float(p50), "latency_p99_ms": float(p99), "cpu_ms": cpu_s / len(due) * 1e3}


def _work() -> None:
    end = time.thread_time() + WORK_MS / 1e3
    while time.thread_time() < end:
        pass
