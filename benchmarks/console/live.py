"""Event to browser: how long after a request's end each open Overview shows it, and what showing costs the gateway.

The whole of `make up` runs on ports of its own. A steady load keeps it busy; beside it, probe requests of a class of
their own end one by one. A probe is *seen* by a WebSocket client in the first frame whose count of that class has
reached it, and by Chromium when the cell of the page's table shows that count (a MutationObserver notes the time).
The gateway's cost is its CPU time with all dashboards less that with none, at the same rate, in shares of one core: a
gateway serves on one core, so that share is throughput it no longer has.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

PROBE = "probe"
PROBE_EVERY_S = 0.5
LATE_S = 5.0  # a probe nobody has shown by then is counted with that time
OPEN_AT_ONCE = 10


@dataclass(slots=True)
class Watcher:
    """One dashboard's WebSocket. `seen[n]`: wall time of the first frame that counts n probes. `frames`: how many."""

    seen: dict[int, float] = field(default_factory=dict)
    frames: int = 0
    bytes: int = 0

    async def watch(self, session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> None:
        async with session.ws_connect(url, headers=headers, max_msg_size=0) as socket:
            async for message in socket:
                at = time.time()
                self.frames += 1
                self.bytes += len(message.data)
                frame = orjson.loads(message.data)
                for row in frame.get("data", {}).get("classes", ()):
                    if row["slo_class"] == PROBE:
                        self._reached(row["finished"], at)

    def _reached(self, count: int, at: float) -> None:
        for number in range(max(self.seen, default=0) + 1, count + 1):
            self.seen[number] = at


async def load(gateway: str, headers: Mapping[str, str], body: Mapping[str, Any], rate: float, seconds: float) -> int:
    """Evenly spaced requests, not waited for; returns how many were answered 200."""
    start, ok = time.monotonic(), 0
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers) as session:

        async def one(due: float) -> None:
            nonlocal ok
            await asyncio.sleep(max(0.0, start + due - time.monotonic()))
            async with session.post(f"{gateway}/v1/completions", json=body) as answer:
                await answer.read()
                ok += answer.status == 200

        await asyncio.gather(*(one(number / rate) for number in range(int(rate * seconds))))
    return ok


async def probes(gateway: str, headers: Mapping[str, str], body: Mapping[str, Any], count: int) -> list[float]:
    """Wall times at which each probe's answer had ended. One after the other, so that their order is their number."""
    ended = []
    async with aiohttp.ClientSession(headers=headers) as session:
        for _ in range(count):
            next_at = time.monotonic() + PROBE_EVERY_S
            async with session.post(f"{gateway}/v1/completions", json={**body, "slo_class": PROBE}) as answer:
                await answer.read()
                if answer.status != 200:
                    raise RuntimeError(f"a probe was answered {answer.status}: {await answer.text()}")
            ended.append(time.time())
            await asyncio.sleep(max(0.0, next_at - time.monotonic()))
    return ended


async def dashboards(console: str, cookie: str, count: int) -> tuple[list[Watcher], list[asyncio.Task[None]], Any]:
    """`count` sockets on the Overview's topic, opened a few at a time."""
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    url, headers = console.replace("http", "ws") + "/ws/overview", {"Cookie": cookie, "Origin": console}
    watchers = [Watcher() for _ in range(count)]
    tasks = []
    for first in range(0, count, OPEN_AT_ONCE):
        tasks += [
            asyncio.create_task(each.watch(session, url, headers)) for each in watchers[first : first + OPEN_AT_ONCE]
        ]
        await asyncio.sleep(0.2)
    return watchers, tasks, session


def delays(ended: list[float], seen: Mapping[int, float]) -> list[float]:
    """Seconds from each probe's end to its being shown; what was never shown counts LATE_S."""
    return [
        min(LATE_S, max(0.0, seen[number] - at)) if number in seen else LATE_S for number, at in enumerate(ended, 1)
    ]


def cpu_s(pid: int) -> float:
    """User and system seconds of a process so far."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
