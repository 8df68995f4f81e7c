"""How long one decision of the coordinator of pruning takes: `Coordinator.decide` as its job calls it.

8,000 requests wait at two gateways for instances that both use, most of them too late: about 1,000 batches, since a
batch is what an instance prefills in one step of 2,048 tokens. The settings are those that the job has, with the drop
budget of `make bench-prune`.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import NamedTuple

from controller.core.pruning import ModelQueue, PrefillUnit, QueueReport, WaitingPrefill
from controller.flow.coordinator import Coordinated, Coordinator, CoordinatorConfig

GATEWAYS = ("gw-a", "gw-b")
REQUESTS, INSTANCES = 8_000, 8
DROP_BUDGET = 0.5
SECONDS_PER_TOKEN = 1e-4
PROMPT_TOKENS = (64, 432)  # seven or eight to a step
SLOT_TOKENS = (50, 400)
TOKEN_RATE = 1_500.0  # of each gateway's slots in an instance


class Decided(NamedTuple):
    """`wall_ms`, `cpu_ms`: medians of one decision."""

    wall_ms: float
    cpu_ms: float
    found: Coordinated


def reports(seed: int, requests: int = REQUESTS, instances: int = INSTANCES) -> list[QueueReport]:
    """What both gateways tell at moment 0. Deadlines are even over the time that the prefills alone take, on all of
    the instances; sequence slots take several times as long, so that the drop budget is used up."""
    rng = random.Random(seed)
    mean_s = SECONDS_PER_TOKEN * statistics.mean(PROMPT_TOKENS)
    latest = requests * mean_s / instances
    rows: dict[str, list[WaitingPrefill]] = {name: [] for name in GATEWAYS}
    for number in range(requests):
        tokens = rng.randint(*PROMPT_TOKENS)
        due = rng.uniform(0.05, latest)
        held = float(rng.randint(*SLOT_TOKENS))
        row = WaitingPrefill(f"r{number}", due, SECONDS_PER_TOKEN * tokens, tokens, held)
        rows[GATEWAYS[number % len(GATEWAYS)]].append(row)
    units = [PrefillUnit(f"e{number}", 0.8, rng.uniform(0.0, 0.1), TOKEN_RATE, 2) for number in range(instances)]
    return [QueueReport(name, 0.0, [ModelQueue("m", sorted(rows[name], key=lambda r: r.due), units)]) for name in rows]


def decide_ms(seed: int, passes: int, requests: int = REQUESTS) -> Decided:
    told = reports(seed, requests)
    coordinator = Coordinator(CoordinatorConfig(drop_budget=DROP_BUDGET))
    wall, cpu = [], []
    for _ in range(passes):
        began, used = time.perf_counter(), time.process_time()
        found = coordinator.decide(told, 0.0)
        wall.append(1e3 * (time.perf_counter() - began))
        cpu.append(1e3 * (time.process_time() - used))
    return Decided(statistics.median(wall), statistics.median(cpu), found)


def main() -> None:
    took = decide_ms(seed=1, passes=5)
    print(f"{took.found.waiting} requests in {took.found.batches} batches, {len(took.found.scavengers)} pruned:")
    print(f"{took.wall_ms:.0f} ms, {took.cpu_ms:.0f} ms of processor time")


if __name__ == "__main__":
    main()
