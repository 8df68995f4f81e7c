"""Processor time of one step of a transfer daemon's gate, by how many transfers are open: no sockets, a virtual clock.

2,000 short transfers/s, as in `permits`, each of which ends one step after its permit, beside those that stay open:

- `held`: the first one fills the link and the others are held behind it. Sizes, deadlines and hosts are at random.
- `waiting`: they wait for their prefills, and none has anything to send yet.

`python -m benchmarks.flow.steps` prints a table and, as its last line, JSON: microseconds by kind and number.
"""

from __future__ import annotations

import argparse
import json
import random
import time

from controller.flow.flows import FlowStage, MsFlow
from controller.flow.gate import GATED, Gate
from controller.flow.policies import FLOW_POLICIES
from controller.flow.scheduler import FlowScheduler, FlowSchedulerConfig
from workers.flowd.daemon import PERIOD_S

BANDWIDTH = 1.25e9
STEP_S, SHORT = 0.001, 2  # time between steps, and how many short transfers begin in each
HOSTS = 16
NEWS_S = 1.0  # how often each transfer says that it is still there


class Open:
    """A gate with transfers that stay open."""

    def __init__(self, policy: str, kind: str, count: int, seed: int) -> None:
        self.gate = Gate(FlowScheduler(FLOW_POLICIES[policy](), FlowSchedulerConfig(PERIOD_S, lazy=True)), BANDWIDTH)
        self.waiting = kind == "waiting"
        self._rng = random.Random(seed)
        self._left = {f"open{number}": self._rng.uniform(1e6, 1e8) for number in range(count)}
        self._left["open0"] = 1e12  # it sends as long as this lasts
        for flow_id, size in self._left.items():
            self.submit(flow_id, size, 5.0 if flow_id == "open0" else self._rng.uniform(20.0, 300.0), 0.0)
            if self.waiting:
                self.gate.progress(flow_id, size, True, 0.0)

    def submit(self, flow_id: str, size: float, due_in_s: float, now: float) -> None:
        host = f"in:{self._rng.randrange(HOSTS)}"
        flow = MsFlow(flow_id, FlowStage.KV_TRANSFER, size, "out", host, deadline=now + due_in_s)
        if (wrong := self.gate.submit(flow, now)) is not None:
            raise RuntimeError(wrong.message)

    def news(self, number: int, now: float) -> None:
        """What clients say of open transfers before step `number`: the first moves, the others are still there."""
        steps = round(NEWS_S / STEP_S)
        for each in range(number % steps, len(self._left), steps):
            self.gate.progress(f"open{each}", self._left[f"open{each}"], self.waiting, now)
        if not self.waiting and number % 10 == 0:
            self._left["open0"] -= 10 * STEP_S * BANDWIDTH
            self.gate.progress("open0", self._left["open0"], False, now)


def step_seconds(policy: str, kind: str, count: int, steps: int, seed: int) -> list[float]:
    """Processor time of each step, sorted."""
    of, took, ending = Open(policy, kind, count, seed), [], list[str]()
    of.gate.step(0.0)
    for number in range(1, steps + 1):
        now = number * STEP_S
        of.news(number, now)
        for flow_id in ending:
            of.gate.end(flow_id)
        ending = [f"short{number}.{each}" for each in range(SHORT)]
        for flow_id in ending:
            of.submit(flow_id, 1e5, 1.0, now)
        began = time.thread_time_ns()
        of.gate.step(now)
        took.append((time.thread_time_ns() - began) / 1e9)
    return sorted(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="mfs", choices=sorted(GATED))
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    figures: dict[str, dict[str, float]] = {}
    for kind in ("held", "waiting"):
        for count in (1, 100, 500, 2000):
            took = step_seconds(args.policy, kind, count, args.steps, args.seed)
            found = {"mean": sum(took) / len(took), "p50": took[len(took) // 2], "p99": took[len(took) * 99 // 100]}
            figures[f"{kind}_{count}"] = {name: round(1e6 * value, 1) for name, value in found.items()}
            print(f"{kind:8} {count:5} open: {figures[f'{kind}_{count}']}")
    print(json.dumps({**figures, "policy": args.policy, "steps": args.steps, "seed": args.seed}))


if __name__ == "__main__":
    main()
