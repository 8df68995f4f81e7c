"""`make bench-flow`: the simulated network with 100,000 flows, and the order between 1,000 batches.

256 servers with 8 ports of 200 Gb/s each. Flows of all stages (reuse, collectives, KV transfers with 100 ms to their
deadline), Poisson arrivals at half of the ports' capacity, sizes exponential with a mean of 64 MB, senders and
receivers at random; policy `mfs`, one scheduler for each sending port. Then Alg. 1 over 1,000 batches of 8 requests
with loads on two ports each, a twentieth of which may be pruned, and the coordinator's decision about 1,000 batches as
its job makes it (benchmarks.flow.pruned_queues). Then 2,000 transfers/s at a real transfer daemon, from
submit to first permit, and as many lines to a process that echoes them. Then 100 arrivals, each from its event to the
enforced order of the coordinator of pruning. Goals: 120 s and 2 GB; 50 ms; 1 ms (99th percentile); 250 ms (95th).

QUICK=1: 10,000 flows and 20 arrivals. Last line: JSON with `sim_s`, `sim_peak_mb`, `coordinator_ms`, `links_order_ms`,
`permit_p99_ms`, `order_p95_ms`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import statistics
import time

from benchmarks.flow.orders import order_seconds
from benchmarks.flow.permits import echo_seconds, milliseconds, permit_seconds
from benchmarks.flow.pruned_queues import REQUESTS, decide_ms
from benchmarks.servers.engines import prefer
from controller.flow.batches import Batch, BatchRequest, order_batches
from controller.flow.flows import FlowStage, MsFlow
from controller.flow.policies import FLOW_POLICIES
from controller.simulator.flows.run import PlannedFlow, run_flows

SERVERS, PORTS = 256, 8
BANDWIDTH = 25e9
MEAN_BYTES = 64e6
LOAD = 0.5
FLOWS, QUICK_FLOWS = 100_000, 10_000
REPORT_S = 0.005
PERMITS_A_SECOND, PERMITS_S = 2_000.0, 5.0
ORDERS, QUICK_ORDERS = 100, 20
BATCHES, BATCH_REQUESTS = 1_000, 8
QUICK_REQUESTS = 800
STAGES = (FlowStage.REUSE, FlowStage.COLLECTIVE, FlowStage.KV_TRANSFER)


def plan(count: int, seed: int) -> list[PlannedFlow]:
    rng = random.Random(seed)
    hosts = SERVERS * PORTS
    at, found = 0.0, []
    for number in range(count):
        at += rng.expovariate(LOAD * hosts * BANDWIDTH / MEAN_BYTES)
        source, target = rng.sample(range(hosts), 2)
        stage = rng.choice(STAGES)
        due = at + 0.1 if stage is FlowStage.KV_TRANSFER else None
        size = 1.0 + rng.expovariate(1 / MEAN_BYTES)
        unit, layer = f"u{source}", rng.randrange(32)
        found.append(
            PlannedFlow(
                at,
                MsFlow(
                    f"f{number}", stage, size, f"out{source}", f"in{target}", unit, unit, (f"r{number}",), layer, due
                ),
            )
        )
    return found


def simulate(count: int, policy: str, seed: int) -> float:
    """Seconds of processor time for all flows. Raises RuntimeError if one is lost."""
    ports = {f"{side}{host}": BANDWIDTH for host in range(SERVERS * PORTS) for side in ("out", "in")}
    flows = plan(count, seed)
    began = time.process_time()
    ends = run_flows(flows, ports, FLOW_POLICIES[policy], report_s=REPORT_S)
    took_s = time.process_time() - began
    if len(ends) != count:
        raise RuntimeError(f"{count - len(ends)} flows did not end")
    return took_s


def batches(seed: int) -> list[Batch]:
    rng = random.Random(seed)
    found = []
    for number in range(BATCHES):
        requests = [
            BatchRequest(
                f"{number}.{each}",
                rng.uniform(0.2, 20.0),
                {f"out{number % 64}": rng.uniform(1e8, 4e9), f"in{rng.randrange(64)}": rng.uniform(1e8, 4e9)},
            )
            for each in range(BATCH_REQUESTS)
        ]
        found.append(Batch(f"b{number}", f"u{number % 64}", rng.uniform(0.05, 0.5), requests))
    return found


def order_links(seed: int, passes: int) -> tuple[float, int]:
    """Median milliseconds of one order, and how many requests it prunes."""
    waiting = batches(seed)
    bandwidth = {f"{side}{host}": BANDWIDTH for host in range(64) for side in ("out", "in")}
    budget = BATCHES * BATCH_REQUESTS // 20
    took, pruned = [], 0
    for _ in range(passes):
        began = time.perf_counter()
        pruned = len(order_batches(waiting, bandwidth, budget, 0.0).pruned)
        took.append(1e3 * (time.perf_counter() - began))
    return statistics.median(took), pruned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="mfs", choices=sorted(FLOW_POLICIES))
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if os.environ.get("BENCH_NICE"):
        with contextlib.suppress(PermissionError):  # it leads a session already
            os.setsid()
        prefer(os.getpid())  # the daemon is in the same session
    quick = os.environ.get("QUICK", "") not in ("", "0")
    count = QUICK_FLOWS if quick else FLOWS
    links_ms, links_pruned = order_links(args.seed, passes=5)
    print(f"order between {BATCHES} batches on links: {links_ms:.1f} ms, {links_pruned} pruned")
    decided = decide_ms(args.seed, passes=5, requests=QUICK_REQUESTS if quick else REQUESTS)
    waiting, batches_of_them = decided.found.waiting, decided.found.batches
    print(f"decision of the coordinator on {waiting} requests in {batches_of_them} batches: {decided.wall_ms:.1f} ms")
    took, echoed = permit_seconds(PERMITS_A_SECOND, PERMITS_S), echo_seconds(PERMITS_A_SECOND, PERMITS_S)
    permit_ms, echo_ms = ({share: milliseconds(each, share) for share in (50, 99)} for each in (took, echoed))
    print(f"{len(took)} permits at {PERMITS_A_SECOND:g}/s: {permit_ms[50]} ms median, {permit_ms[99]} ms at p99")
    print(f"{len(echoed)} echoes at that rate: {echo_ms[50]} ms median, {echo_ms[99]} ms at p99")
    orders = order_seconds(QUICK_ORDERS if quick else ORDERS)
    order_ms = {share: round(1e3 * orders[int(share / 100 * (len(orders) - 1))], 1) for share in (50, 95)}
    print(f"{len(orders)} orders of the coordinator: {order_ms[50]} ms median, {order_ms[95]} ms at p95")
    sim_s = simulate(count, args.policy, args.seed)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{count} flows under {args.policy}: {sim_s:.1f} s of processor time, {peak_mb:.0f} MB at most")
    figures = {
        "sim_s": round(sim_s, 2),
        "sim_peak_mb": round(peak_mb),
        "coordinator_ms": round(decided.wall_ms, 2),
        "coordinator_cpu_ms": round(decided.cpu_ms, 2),
        "batches": batches_of_them,
        "pruned": len(decided.found.scavengers),
        "links_order_ms": round(links_ms, 2),
        "links_pruned": links_pruned,
        "permit_p50_ms": permit_ms[50],
        "permit_p99_ms": permit_ms[99],
        "echo_p50_ms": echo_ms[50],
        "echo_p99_ms": echo_ms[99],
        "order_p50_ms": order_ms[50],
        "order_p95_ms": order_ms[95],
        "flows": count,
        "policy": args.policy,
        "seed": args.seed,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
