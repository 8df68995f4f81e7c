"""How long an arrival takes until the coordinator's order about it is enforced: real Redis, Celery and PostgreSQL.

Two schedulers with the queues of a gateway each, in this process, report and listen as gateways do. Beat and a worker
run the coordinator's job. In each round one long prompt more arrives than can be in time, until one is pruned; then all
leave. All processes take processor time of the same machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from api.openai.gateway import Gateway
from api.openai.pruning_feed import PruningFeed
from benchmarks.servers.engines import ROOT
from benchmarks.servers.stack import Stack, StackFleet
from controller.core import events as ev
from controller.core.messages import HEARTBEAT_KEY
from controller.core.types import InstanceSpec, LatencyCoefficients, Request, Targets
from controller.dispatch import build_scheduler
from workers.live import Dialogue, LiveState, follow
from workers.shared_clock import SharedClock
from workers.tasks.names import PRUNING_PROCESS

START_S, ROUND_S = 30.0, 2.0
SLOW = LatencyCoefficients(0.01, 1e-3, 0.0, 0.02, 0.0, 0.001)  # a prompt of 800 tokens takes 0.8 s
BUDGET = "from controller.services.actors import SYSTEM;from controller.services.slo.flow_settings import *;"
SET_BUDGET = BUDGET + "flow_settings_create(actor=SYSTEM, drop_budget=0.5)"


class _Queue:
    """One gateway as far as pruning sees it. Its instance has one slot, which is taken."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.board = LiveState(url, name)
        self.scheduler = build_scheduler("slackline", {})
        self.options = SimpleNamespace(name=name)
        self.snapshot = SimpleNamespace(pruning=True)
        self.runtime = self
        self.clock = time.monotonic
        self.shared = SharedClock(self.clock)
        self.feed = PruningFeed(cast(Gateway, self), self.board)
        self.pruned = asyncio.Event()
        self.waiting: list[str] = []
        up = ev.InstanceUp(InstanceSpec("e1", "m", latency=SLOW, max_num_seqs=1))
        self.push(up)
        self.push(ev.Arrived(self._request(f"{name}-running", wait_s=3600.0)))

    def _request(self, name: str, wait_s: float) -> Request:
        return Request(name, self.clock(), Targets(7.7, 0.1, None, wait_s), 800, 10, "m")

    def push(self, event: ev.Event) -> None:
        reply = self.scheduler.handle([event], self.clock())
        if any(isinstance(action, ev.Prune) and action.decision.kind == "prune" for action in reply.actions):
            self.pruned.set()

    def arrive(self, name: str) -> None:
        self.waiting.append(name)
        self.push(ev.Arrived(self._request(name, wait_s=60.0)))

    def leave(self) -> None:
        while self.waiting:
            self.push(ev.Cancelled(self.waiting.pop()))
        self.pruned.clear()

    async def join(self) -> None:
        message: Any = {"gateway": self.name, "at": time.time(), "seq": 1, "instances": [], "classes": []}
        await self.board.publish_fleet(message, 3600.0)
        sent = self.clock()
        self.shared.heard(await self.board.server_time(), sent, self.clock())


async def _rounds(url: str, rounds: int) -> list[float]:
    queues = [_Queue(name, url) for name in ("gw-a", "gw-b")]
    tasks: list[asyncio.Future[Any]] = []
    for queue in queues:
        await queue.join()
        tasks += [
            asyncio.ensure_future(follow(queue.board, lambda _: None, lambda _: None, queue.feed.enforce)),
            asyncio.ensure_future(queue.feed.run()),
        ]
    await _coordinated(queues[0].board)
    rng = random.Random(rounds)
    took = []
    for number in range(rounds):
        began = time.monotonic()
        for queue in queues:
            for each in range(2):
                queue.arrive(f"{queue.name}-{number}-{each}")
        waits = [asyncio.ensure_future(queue.pruned.wait()) for queue in queues]
        done, _ = await asyncio.wait(waits, timeout=ROUND_S, return_when="FIRST_COMPLETED")
        if not done:
            raise RuntimeError(f"round {number}: nothing was pruned within {ROUND_S:.0f} s")
        took.append(time.monotonic() - began)
        for wait in waits:
            wait.cancel()
        for queue in queues:
            queue.leave()
        await asyncio.sleep(0.2 + rng.uniform(0.0, 0.2))  # not in step with the reports
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for queue in queues:
        await queue.board.close()
    return took


async def _coordinated(board: LiveState) -> None:
    """Wait until beat and worker run the coordinator's job. Raises TimeoutError."""

    def heard() -> Dialogue[bool]:
        return (yield ("GET", HEARTBEAT_KEY.format(process=PRUNING_PROCESS))) is not None

    async with asyncio.timeout(START_S):
        while not await board.run(heard()):
            await asyncio.sleep(0.1)


@contextlib.contextmanager
def _celery(environment: dict[str, str], folder: Path) -> Iterator[None]:
    app = [sys.executable, "-m", "celery", "-A", "workers.celery:app"]
    worker = [*app, "worker", "-P", "prefork", "-c", "1", "-Q", "pruning", "-l", "WARNING", "--without-gossip"]
    beat = [*app, "beat", "-l", "WARNING", "-s", str(folder / "schedule"), "--pidfile="]
    env = {**os.environ, **environment, "SLACKLINE_ROLE": "worker", "CELERY_SKIP_CHECKS": "1"}
    with (folder / "celery.log").open("wb") as log:
        started = [subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log) for command in (worker, beat)]
    try:
        yield
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(timeout=20)


def order_seconds(rounds: int) -> list[float]:
    """Sorted. Raises RuntimeError if an order does not come."""
    fleet = StackFleet("m", ["http://127.0.0.1:9"], "vllm", 1, ())
    with tempfile.TemporaryDirectory() as name, Stack(Path(name), fleet) as stack:
        stack.manage("manage.py", "shell", "-c", SET_BUDGET)
        with _celery(stack.environment, Path(name)):
            return sorted(asyncio.run(_rounds(stack.environment["REDIS_URL"], rounds)))
