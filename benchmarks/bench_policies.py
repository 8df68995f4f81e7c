"""Cost of a decision of every registered policy at 100, 1,000 and 10,000 requests, in milliseconds.

    make bench-policies   (or: python -m benchmarks.bench_policies --kind batching)

One decision, by kind: ordering: rank all requests and sort them (the dispatcher ranks a request once, and again when
its rank expires); admission: judge all requests on one instance; routing: choose among 8 instances that hold them;
pacing: the room of the 8 instances; batching: compose one step, half decoding and half queued; preemption: weigh each
against a challenger; migration: order all prefilled requests and place the first on one of 8 decode instances that hold
as many; frame: rank all waiting requests again on 8 instances of two unlike kinds and move the first in the queue (only
of orderings that do); plan: choose which of the waiting requests, in order, are deferred on 8 full instances (only of
orderings that do); plan_starting: the same while ten more are starting. CALM is also measured at 5,000, where the aim
is 5 ms: `calm_5000` inside the engine, `calm_gateway_5000` in the gateway, also in processor time. Medians over
repeated decisions, with garbage collection off. `--cpu`: all in processor time, for a machine that does other work.
Last line: JSON, `ms` by policy ("kind/name") and size.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import controller.dispatch  # noqa: F401  (registers orderings, admissions, routings)
from benchmarks.bench_dispatch import INSTANCES, LATENCY, make_request
from controller.core.policy import ADMISSIONS, ORDERINGS, ROUTINGS, Cost
from controller.core.steps import Added, Seq, SeqState
from controller.core.types import InstanceSpec, LatencyCoefficients, Request
from controller.dispatch.disaggregation.placements import MIGRATIONS, Prefilled
from controller.dispatch.lane import replica_of
from controller.dispatch.pacing import PACINGS, RecentDemand
from controller.dispatch.queue import Entry, RequestQueue
from controller.dispatch.shadow_state import ShadowInstance
from controller.dispatch.supply import supply_of
from controller.policies.batching import BATCHINGS
from controller.policies.preemption.base import SequenceStanding
from controller.policies.preemption.cost_aware import CostAwarePreemption

SIZES = (100, 1_000, 10_000)
CALM_SIZE, CALM_AIM_MS = 5_000, 5.0
CALM = {("batching", "calm"): "calm_5000", ("frame", "calm"): "calm_gateway_5000"}
STARTING = 10  # instances, one every 0.1 s: nearly all that wait begins later
NOW = 1_000.0
LEAST_REPEATS, MOST_REPEATS, SECONDS = 5, 200, 0.5
Decide = Callable[[], Any]


class View:
    """The batching policy's view of an engine: half of `size` sequences decode, half are queued prompts."""

    def __init__(self, size: int, seed: int) -> None:
        rng = random.Random(seed)
        self.token_budget = 2048 + size
        self.max_num_seqs = size
        seqs = [self._sequence(rng, serial) for serial in range(size)]
        self.running, self.queue = seqs[: size // 2], seqs[size // 2 :]
        for seq in self.running:
            seq.state, seq.output_tokens = SeqState.RUNNING, rng.randint(1, seq.max_tokens - 1)
            seq.computed = seq.tokens - 1
            seq.first_token_at = NOW - seq.output_tokens * rng.uniform(0.01, 0.06)

    @staticmethod
    def _sequence(rng: random.Random, serial: int) -> Seq:
        arrival, ttft = NOW - rng.uniform(0, 4), rng.choice((0.7, 1.0, 2.0, 20.0))
        prompt, output = rng.randint(20, 8_000), rng.randint(8, 400)
        return Seq(f"s{serial}", arrival, prompt, output, due=arrival + ttft, ttft_s=ttft, tpot_s=rng.uniform(0.03, 1))

    def waiting(self) -> Iterator[Seq]:
        return iter(self.queue)

    def uncached(self, seq: Seq) -> int:
        return seq.tokens


def requests(size: int, seed: int) -> list[Request]:
    rng = random.Random(seed)
    return [make_request(rng, serial, NOW - rng.uniform(0, 2)) for serial in range(size)]


def instances(size: int, seed: int) -> list[ShadowInstance]:
    made = [ShadowInstance(InstanceSpec(f"w{i}", "m", latency=LATENCY, max_num_seqs=64)) for i in range(INSTANCES)]
    for serial, request in enumerate(requests(size, seed)):
        made[serial % INSTANCES].send(request, NOW, 0, serial + 1)
        if serial % 2:
            made[serial % INSTANCES].first_token(request.id, NOW)
    return made


def cost_of(request: Request) -> Cost:
    prefill = LATENCY.prefill_a + LATENCY.prefill_b * request.prompt_tokens
    return Cost(prefill, prefill + 0.012 * request.output_tokens, 0.012)


def ordering(name: str, size: int, seed: int) -> Decide:
    policy, waiting = ORDERINGS[name](), requests(size, seed)
    costs = [cost_of(request) for request in waiting]
    return lambda: sorted(policy.rank(r, c, NOW).key for r, c in zip(waiting, costs, strict=True))


def admission(name: str, size: int, seed: int) -> Decide:
    policy, waiting, (instance, *_) = ADMISSIONS[name](), requests(size, seed), instances(64, seed)
    costs = [cost_of(request) for request in waiting]
    return lambda: [policy.judge(r, c, instance, 0.2, NOW) for r, c in zip(waiting, costs, strict=True)]


def routing(name: str, size: int, seed: int) -> Decide:
    policy, offered = ROUTINGS[name](), instances(size, seed)
    return lambda: policy.choose(offered, NOW)


def pacing(name: str, size: int, seed: int) -> Decide:
    policy, offered = PACINGS[name](), instances(size, seed)
    return lambda: [
        policy.room(instance, RecentDemand(0.7), 0.2, NOW) for instance in offered if policy.ready(instance, NOW)
    ]


def batching(name: str, size: int, seed: int) -> Decide:
    policy, view = BATCHINGS[name](), View(size, seed)
    for seq in [*view.running, *view.queue]:
        policy.observe(Added(seq), NOW)
    return lambda: policy.compose(view, NOW)


def migration(name: str, size: int, seed: int) -> Decide:
    policy, offered = MIGRATIONS[name](), instances(size, seed)
    stages = [Prefilled(request, NOW - 0.1) for request in requests(size, seed + 1)]
    return lambda: policy.choose(min(stages, key=policy.order), offered, NOW)


def preemption(_: str, size: int, seed: int) -> Decide:
    policy, rng = CostAwarePreemption(), random.Random(seed)
    running = [SequenceStanding(rng.uniform(1, 50), rng.uniform(1, 400), rng.randint(20, 8_000)) for _ in range(size)]
    challenger = SequenceStanding(60.0, 500.0)
    return lambda: [policy.weigh(standing, challenger, 2_000.0) for standing in running]


def frame(name: str, size: int, seed: int) -> Decide:
    """A queue of the dispatcher, with all that it does between two frames of the ordering."""
    queue = RequestQueue(ORDERINGS[name](), ADMISSIONS["admit_all"]())
    slower = LatencyCoefficients(*(2 * each for each in LATENCY))
    fleet = instances(64, seed)
    for instance in fleet[::2]:
        instance.set_profile(slower)
    replicas = [replica_of(instance) for instance in fleet]
    for request in requests(size, seed):
        queue.add(Entry(request, cost_of(request), NOW), NOW)
    moments = count(1)

    def decide() -> list[Entry]:
        queue.weigh(replicas, NOW + 10.0 * next(moments), lambda _: {})  # each is a frame of its own
        return list(queue.ready_for(fleet[0].id))

    return decide


def plan(name: str, size: int, seed: int, starting: int = 0) -> Decide:
    policy, supply = ORDERINGS[name](), supply_of(instances(INSTANCES * 64, seed), NOW, serving_at(starting))
    waiting = [(request, cost_of(request)) for request in requests(size, seed + 1)]
    waiting.sort(key=lambda each: policy.rank(*each, NOW).key)
    return lambda: policy.defer(waiting, supply, NOW)


def serving_at(starting: int) -> list[float]:
    return [NOW + 0.1 * number for number in range(1, starting + 1)]


def plan_starting(name: str, size: int, seed: int) -> Decide:
    return plan(name, size, seed, STARTING)


PLANNING = [name for name in ORDERINGS if hasattr(ORDERINGS[name], "defer")]

KINDS: dict[str, tuple[Any, Callable[[str, int, int], Decide]]] = {
    "ordering": (ORDERINGS, ordering),
    "admission": (ADMISSIONS, admission),
    "routing": (ROUTINGS, routing),
    "pacing": (PACINGS, pacing),
    "batching": (BATCHINGS, batching),
    "migration": (MIGRATIONS, migration),
    "preemption": ([CostAwarePreemption.name], preemption),
    "frame": ([name for name in ORDERINGS if hasattr(ORDERINGS[name], "frames")], frame),
    "plan": (PLANNING, plan),
    "plan_starting": (PLANNING, plan_starting),
}


def measure(decide: Decide, clock: Callable[[], float] = time.perf_counter) -> float:
    """Median milliseconds of a decision, over as many repeats as fit into SECONDS (5 to 200). `clock`: in seconds."""
    decide()
    times: list[float] = []
    started = time.perf_counter()
    gc.collect()
    gc.disable()
    try:
        while len(times) < LEAST_REPEATS or (len(times) < MOST_REPEATS and time.perf_counter() - started < SECONDS):
            begin = clock()
            decide()
            times.append(clock() - begin)
    finally:
        gc.enable()
    return statistics.median(times) * 1e3


def sizes_of(kind: str, name: str) -> list[int]:
    return sorted([*SIZES, CALM_SIZE]) if (kind, name) in CALM else list(SIZES)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", action="append", choices=sorted(KINDS), help="only these; may be repeated")
    parser.add_argument("--cpu", action="store_true", help="processor time instead of wall time")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    clock = time.process_time if arguments.cpu else time.perf_counter
    chosen = {kind: KINDS[kind] for kind in KINDS if not arguments.kind or kind in arguments.kind}
    found: dict[str, dict[str, float]] = {}
    print(f"{'policy':38}" + "".join(f"{size:>12,}" for size in sorted([*SIZES, CALM_SIZE])) + "   ms a decision")
    for kind, (names, make) in chosen.items():
        for name in names:
            entry: dict[str, float] = {}
            for size in sizes_of(kind, name):
                print(f"\r{kind}/{name} at {size:,} ...   ", end="", file=sys.stderr, flush=True)
                entry[str(size)] = round(measure(make(name, size, arguments.seed), clock), 4)
            found[f"{kind}/{name}"] = entry
            cells = "".join(f"{entry.get(str(size), ''):>12}" for size in sorted([*SIZES, CALM_SIZE]))
            print(f"\r{'':60}\r", end="", file=sys.stderr, flush=True)
            print(f"{kind + '/' + name:38}{cells}", flush=True)
    report: dict[str, Any] = {"ms": found, "instances": INSTANCES, "seed": arguments.seed}
    for (kind, name), figure in CALM.items():
        calm = found.get(f"{kind}/{name}", {}).get(str(CALM_SIZE))
        if calm is not None:
            cpu = round(measure(KINDS[kind][1](name, CALM_SIZE, arguments.seed), time.process_time), 4)
            report[figure] = {"ms": calm, "cpu_ms": cpu, "aim_ms": CALM_AIM_MS, "reached": calm <= CALM_AIM_MS}
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
