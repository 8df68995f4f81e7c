"""One server away under load: the same phases and the same questions for PostgreSQL and Redis, stopped or hanging."""

from __future__ import annotations

import math
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil

from tests.faults.load import Load, quantile_ms, recorded
from tests.faults.system import System
from tests.faults.watch import PAGE_TIMEOUT_S, Watch
from tests.faults.workflows import Workflows
from workers.supervisor.embedded import EmbeddedPostgres, EmbeddedRedis

RATE = 15.0
BODY = {"max_tokens": 12, "slo_class": "standard"}
BEFORE_S = 8.0
# 5 ms were seen on a quiet machine; the bound allows for a busy one. A data path that waited for either server would
# add seconds.
ADDED_P99_MS = 300
FRESH_AGAIN_S = 10.0  # the live page tries Redis again at least every five seconds
WORKFLOWS_AGAIN_S = 10.0  # a gateway tries Redis again after a second, and rounds of calls are a second apart
Server = EmbeddedPostgres | EmbeddedRedis


@contextmanager
def stopped(server: Server) -> Iterator[None]:
    server.stop()
    try:
        yield
    finally:
        server.start()


@contextmanager
def hanging(server: Server) -> Iterator[None]:
    """It takes connections and answers nothing: its processes are frozen."""
    assert server.pid is not None
    parent = psutil.Process(server.pid)
    frozen = [parent, *parent.children(recursive=True)]
    for process in frozen:
        process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in reversed(frozen):
            if process.is_running():
                process.send_signal(signal.SIGCONT)


@dataclass(slots=True)
class Seen:
    load: Load
    watch: Watch
    workflows: Workflows
    began: float
    ended: float

    @property
    def figures(self) -> dict[str, Any]:
        before = self.load.between(self.began - BEFORE_S + 1, self.began)
        during = self.load.between(self.began, self.ended)
        pages, frames = (
            self.watch.pages_between(self.began, self.ended),
            self.watch.frames_between(self.began, self.ended),
        )
        return {
            "requests": len(self.load.sent),
            "during": len(during),
            "p50_ms": (round(quantile_ms(before, 0.5)), round(quantile_ms(during, 0.5))),
            "p99_ms": (round(quantile_ms(before)), round(quantile_ms(during))),
            "pages": sorted({page.status for page in pages}),
            "slowest_page_s": round(max(page.took_s for page in pages), 2),
            "frames": len(frames),
            "stale_frames": sum(frame.stale for frame in frames),
            "first_stale_s": next((round(f.at - self.began, 1) for f in frames if f.stale), None),
            "longest_gap_s": round(max((frame.gap_s for frame in frames), default=-1), 1),
            "fresh_after_s": round(self.watch.frames[-1].at - self.ended, 1),
            "sockets_lost": len(self.watch.sockets_lost),
            "workflow_calls": len(self.workflows.sent),
            "forks": dict(Counter(each.status for each in self.workflows.told if each.kind == "fork")),
        }


def outage(system: System, fault: Callable[[], Any], seconds: float) -> Seen:
    """Load before, during and after; the pages are watched all the while."""
    with Watch(system) as watch, Workflows(system) as workflows, Load(system, rate=RATE, body=BODY) as load:
        time.sleep(BEFORE_S)
        began = time.monotonic()
        with fault():
            time.sleep(seconds)
        ended = time.monotonic()
        system.until(lambda: fresh_after(watch, ended), FRESH_AGAIN_S)
        system.until(lambda: any(each.ended == "done" for each in load.between(ended, math.inf)))
        system.until(lambda: served_again(workflows, ended), WORKFLOWS_AGAIN_S)
    return Seen(load, watch, workflows, began, ended)


def served_again(workflows: Workflows, ended: float) -> bool:
    """A fork and a workflow were opened."""
    return {"fork", "open"} <= {each.kind for each in workflows.between(ended, math.inf) if each.status == 201}


def fresh_after(watch: Watch, ended: float) -> bool:
    newest = watch.frames[-1]
    return newest.at > ended and not newest.stale


def check(system: System, seen: Seen, say: Callable[..., None]) -> None:
    """The data path did not notice, no record is lost or doubled, and every page answered."""
    sent = [*seen.load.sent, *seen.workflows.sent]
    waited = recorded(system, sent, within_s=30.0)
    well = system.until(system.healthy, within_s=40.0)
    figures = seen.figures
    say(**figures, records_after_s=round(waited, 1), healthy_after_s=round(waited + well, 1))
    assert Counter(each.ended for each in sent) == {"done": len(sent)}
    before, during = figures["p99_ms"]
    assert during <= before + ADDED_P99_MS, f"p99 {before} ms before, {during} ms during"
    pages = seen.watch.pages_between(seen.began, seen.ended)
    assert pages, "no page was asked for"
    assert {page.status for page in pages} <= {200, 503}
    assert max(page.took_s for page in pages) < PAGE_TIMEOUT_S / 2
