"""One measured run: a policy's gateway in front of idle engines, the load, and the score.

A run in which the ticker of the load generator stalled is repeated, up to `TRIES` runs. If all stalled, the least
disturbed one counts, and its gap is reported.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.load.generator import MAX_GAP_S, Target, direct_target, gateway_target, run_plan, without_lengths
from benchmarks.load.scoring import Score, score
from benchmarks.load.workloads import PlannedArrival, Task
from benchmarks.machine.processor import ProcessorShare
from benchmarks.servers.stack import Stack

TRIES = 3
IDLE_TIMEOUT_S = 60.0
_REQUESTS = re.compile(r"(?m)^vllm:num_requests_(?:running|waiting)\{[^}]*\} ([0-9.e+]+)")


def note(text: str) -> None:
    """Print progress for people, separate from the result."""
    print(text, file=sys.stderr, flush=True)


def open_requests(url: str) -> float:
    """Running and waiting requests of an engine, by its metrics."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:
        return sum(float(value) for value in _REQUESTS.findall(reply.read().decode()))


def wait_idle(urls: Sequence[str]) -> None:
    """Wait until the engines have dropped all requests of the last run. Raises RuntimeError after 60 s."""
    deadline = time.monotonic() + IDLE_TIMEOUT_S
    while any(open_requests(url) for url in urls):
        if time.monotonic() > deadline:
            raise RuntimeError(f"the engines are still busy {IDLE_TIMEOUT_S:.0f} s after the last run")
        time.sleep(0.25)


class Bench:
    """Engines and stack under test; counts the runs that were dropped. `tries`: most runs per measurement.
    `own_targets`: requests through the gateway name their targets themselves. `lengths_hidden`: no request of any
    contender tells the length of its answer (of real engines; see `load.lengths`).
    """

    def __init__(
        self, stack: Stack, tries: int = TRIES, own_targets: bool = False, lengths_hidden: bool = False
    ) -> None:
        self.stack = stack
        self.tries = tries
        self.own_targets, self.lengths_hidden = own_targets, lengths_hidden
        self.dropped = 0

    def through_gateway(
        self, policy: str, overrides: Mapping[str, Any], plan: Sequence[PlannedArrival], tasks: Sequence[Task]
    ) -> Score:
        def once() -> Score:
            fleet = self.stack.fleet
            wait_idle(fleet.urls)
            with self.stack.gateway(policy, overrides) as gateway:
                target = gateway_target(gateway.url, fleet.model, self.stack.api_key, self.own_targets)
                share = ProcessorShare(self.stack.processes(gateway))
                run = run_plan(plan, self._sent_to(target, tasks))
                return replace(score(run, tasks), cpu_share=share.read())

        return self.undisturbed(once)

    def direct(self, by_class: bool, plan: Sequence[PlannedArrival], tasks: Sequence[Task]) -> Score:
        """Round robin by the client itself while nothing of Slackline runs. `by_class`: with vLLM's priorities."""

        def once() -> Score:
            fleet = self.stack.fleet
            wait_idle(fleet.urls)
            with self.stack.stopped():
                target = direct_target(fleet.urls, fleet.model, tasks, by_class)
                return score(run_plan(plan, self._sent_to(target, tasks)), tasks)

        return self.undisturbed(once)

    def _sent_to(self, target: Target, tasks: Sequence[Task]) -> Target:
        return without_lengths(target, tasks) if self.lengths_hidden else target

    def undisturbed(self, once: Any) -> Any:
        """The first run without a stall, by the `largest_gap_s` of `once`'s result."""
        found: list[Any] = []
        for left in reversed(range(self.tries)):
            found.append(once())
            if found[-1].largest_gap_s <= MAX_GAP_S:
                return found[-1]
            self.dropped += bool(left)
            what = "dropped" if left else "the least disturbed run counts"
            note(f"    {what}: the machine stalled for {found[-1].largest_gap_s:.2f} s")
        return min(found, key=lambda score: score.largest_gap_s)


@contextlib.contextmanager
def timed(what: str) -> Any:
    started = time.monotonic()
    yield
    note(f"{what}: {time.monotonic() - started:.0f} s")
