"""How long one decision of the coordinator of pruning takes: `Coordinator.decide` as its job calls it.

8,000 requests wait at two gateways for instances that both use, most of them too late: about 1,000 batches, since a
batch is what an instance prefills in one step of 2,048 tokens. The settings are those that the job has, with the drop
budget of `make bench-prune`.

    python -m benchmarks.flow.pruned_queues --receivers 16

With `--receivers` the instances only prefill, one on each host, and send their KV to as many hosts: each gateway tells
five requests of each instance whose KV is on its way, and what a token takes of the ports.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Mapping
from typing import NamedTuple

from controller.core.pruning import KvPort, ModelQueue, OpenKv, OutgoingKv, PrefillUnit, QueueReport, WaitingPrefill
from controller.flow.coordinator import Coordinated, Coordinator, CoordinatorConfig

GATEWAYS = ("gw-a", "gw-b")
REQUESTS, INSTANCES = 8_000, 8
DROP_BUDGET = 0.5
SECONDS_PER_TOKEN = 1e-4
PROMPT_TOKENS = (64, 432)  # seven or eight to a step
SLOT_TOKENS = (50, 400)
TOKEN_RATE = 1_500.0  # of each gateway's slots in an instance
OUTGOING, KV_TOKENS = 5, 1_000
SENT_S, RECEIVED_S = 1e-6, 2e-5  # of a port for a token, for one gateway alone


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


def sending(told: list[QueueReport], receivers: int, seed: int) -> tuple[list[QueueReport], Mapping[str, OpenKv]]:
    """The same with KV that leaves and comes, and what daemons say of it."""
    rng = random.Random(seed)
    sent: dict[str, OpenKv] = {}
    found = []
    for report in told:
        (queue,) = report.queues
        units = []
        for unit in queue.units:
            rows = []
            for number in range(OUTGOING):
                name, to = f"{report.gateway} {unit.id} {number}", rng.randrange(receivers)
                rows.append(OutgoingKv(name, rng.uniform(0.2, 5.0), KV_TOKENS, target=f"d{to}"))
                sent[name] = OpenKv(f"host of {unit.id}", rng.random(), f"host of d{to}")
            units.append(unit._replace(port=KvPort(len(told) * SENT_S, 0.1, rows)))
        inbound = {f"d{number}": len(told) * RECEIVED_S for number in range(receivers)}
        found.append(QueueReport(report.gateway, report.at, [queue._replace(units=units, inbound=inbound)]))
    return found, sent


def decide_ms(seed: int, passes: int, requests: int = REQUESTS, receivers: int = 0) -> Decided:
    told = reports(seed, requests)
    sent: Mapping[str, OpenKv] | None = None
    if receivers:
        told, sent = sending(told, receivers, seed)
    coordinator = Coordinator(CoordinatorConfig(drop_budget=DROP_BUDGET))
    wall, cpu = [], []
    for _ in range(passes):
        began, used = time.perf_counter(), time.process_time()
        found = coordinator.decide(told, 0.0, sent)
        wall.append(1e3 * (time.perf_counter() - began))
        cpu.append(1e3 * (time.process_time() - used))
    return Decided(statistics.median(wall), statistics.median(cpu), found)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--receivers", type=int, default=0, help="hosts that receive KV (default: none is moved)")
    arguments = parser.parse_args()
    if arguments.receivers < 0:
        parser.error("--receivers must be at least 0")
    took = decide_ms(seed=1, passes=5, receivers=arguments.receivers)
    print(f"{took.found.waiting} requests in {took.found.batches} batches, {len(took.found.scavengers)} pruned:")
    print(f"{took.wall_ms:.0f} ms, {took.cpu_ms:.0f} ms of processor time")


if __name__ == "__main__":
    main()
