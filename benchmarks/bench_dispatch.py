"""Cost of one pass of the scheduler with 100, 1,000 and 10,000 queued requests, and with as many decode stages waiting.

    make bench-dispatch   (or: python -m benchmarks.bench_dispatch --policy hyperflexis)

Four classes, 20 % explicit targets, 10 % hopeless from the start. A pass is what the gateway does at each event:
`handle` gets a batch (one arrival, one request finished by an engine) and dispatches what fits. 1,000 passes per size,
each with one arrival, so the queue keeps its size. Then the instances become a fifth slower or faster every 50 passes,
as when their fits change: the costs of all that waits are predicted again, in parts.

Then eight disaggregated models, each with one prefill and two decode instances that are full, and that many prefilled
requests in all that wait for a decode instance. In a pass a prefill ends or KV arrives, and an answer ends. Last line:
JSON with `pass_ms`, `max_pass_ms` (the longest while the instances' latencies change) and `migrate_pass_ms` by size.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time

from controller.core import events as ev
from controller.core.types import InstanceSpec, LatencyCoefficients, Request, Role, Targets
from controller.dispatch import POLICY_SETS, build_scheduler

SIZES = (100, 1_000, 10_000)
PASSES = 1_000
CHANGED_EVERY = 50  # passes
CLASSES = (
    Targets(0.7, 0.5, None, 600),
    Targets(1, 0.7, None, 600),
    Targets(2, 0.9, None, 600),
    Targets(20, 1, None, 600),
)
LATENCY = LatencyCoefficients(0.0066, 5.54e-5, 1.52e-9, 0.0115, 8.2e-8, 3.66e-5)  # Llama-3.1-8B on one A100
INSTANCES = 8
MODELS = 8
SLOTS = 64


def make_request(rng: random.Random, serial: int, now: float, model: str = "m") -> Request:
    kind = rng.randrange(4)
    targets = CLASSES[kind]
    if rng.random() < 0.2:
        targets = Targets(targets.ttft_s * rng.uniform(0.5, 2), targets.tpot_s * rng.uniform(0.5, 2), None, 600)
    arrival = now - (targets.ttft_s + 1 if rng.random() < 0.1 else 0)
    prompt, output = rng.randint(20, 1500), rng.randint(8, 200)
    return Request(f"r{serial}", arrival, targets, prompt, output, model, f"t{serial % 5}", f"class-{kind}")


class DispatcherBench:
    """A scheduler with full engines and a queue of the given size."""

    def __init__(self, policy: str, size: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 1_000.0
        self.serial = 0
        self.scheduler = build_scheduler(policy, {"dispatch": {"max_queue": 10**9}})
        self.at_engine: list[str] = []
        ups = [ev.InstanceUp(InstanceSpec(f"i{i}", "m", latency=LATENCY, max_num_seqs=64)) for i in range(INSTANCES)]
        self.scheduler.handle(ups, self.now)
        while len(self.scheduler.queue()) < size:
            self.step([self.arrival()])

    def arrival(self) -> ev.Arrived:
        self.serial += 1
        return ev.Arrived(make_request(self.rng, self.serial, self.now))

    def step(self, events: list[ev.Event]) -> float:
        """Seconds of one `handle`."""
        self.now += 1e-6
        begin = time.perf_counter()
        reply = self.scheduler.handle(events, self.now)
        took = time.perf_counter() - begin
        self.at_engine.extend(a.request.id for a in reply.actions if isinstance(a, ev.Send))
        return took

    def one_pass(self) -> float:
        events: list[ev.Event] = [self.arrival()]
        if self.at_engine:
            done = self.at_engine.pop(self.rng.randrange(len(self.at_engine)))
            events += [ev.FirstToken(done), ev.Finished(done, 20)]
        return self.step(events)

    def changed_pass(self, factor: float) -> float:
        """One in which the instances take `factor` times as long as before."""
        latency = LatencyCoefficients(*(factor * each for each in LATENCY))
        specs = (InstanceSpec(f"i{i}", "m", latency=latency, max_num_seqs=64) for i in range(INSTANCES))
        return self.step([self.arrival(), *map(ev.InstanceUp, specs)])


class MigratorBench:
    """A scheduler with full decode instances and as many decode stages waiting as told."""

    def __init__(self, policy: str, size: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 1_000.0
        self.serial = 0
        self.placed = 0
        self.scheduler = build_scheduler(policy, {"dispatch": {"max_queue": 10**9}})
        self.decoding: dict[str, list[str]] = {f"m{i}": [] for i in range(MODELS)}
        self.landing: list[tuple[str, str, str]] = []  # model, request, instance
        roles = {"p": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE}
        ups = [
            ev.InstanceUp(InstanceSpec(f"{model}-{name}", model, latency=LATENCY, max_num_seqs=SLOTS, role=role))
            for model in self.decoding
            for name, role in roles.items()
        ]
        self.scheduler.handle(ups, self.now)
        for index in range(size + 2 * SLOTS * MODELS):
            self.step([self.prefilled(f"m{index % MODELS}")])
            while self.landing:
                self.step(self.landed())

    def prefilled(self, model: str) -> ev.PrefillDone:
        """The end of a prefill; its request was sent before, which is not measured here."""
        self.serial += 1
        request = make_request(self.rng, self.serial, self.now, model)
        self.now += 1e-6
        sent = [a for a in self.scheduler.handle([ev.Arrived(request)], self.now).actions if isinstance(a, ev.Send)]
        return ev.PrefillDone(request, sent[0].instance_id, request.prompt_tokens)

    def landed(self) -> list[ev.Event]:
        model, name, instance_id = self.landing.pop()
        self.decoding[model].append(name)
        return [
            ev.TransferStarted(name, instance_id),
            ev.TransferDone(name, instance_id, released=True),
            ev.FirstToken(name),
        ]

    def step(self, events: list[ev.Event]) -> float:
        """Seconds of one `handle`."""
        self.now += 1e-6
        begin = time.perf_counter()
        reply = self.scheduler.handle(events, self.now)
        took = time.perf_counter() - begin
        placed = [action for action in reply.actions if isinstance(action, ev.Place)]
        self.landing.extend((a.request.model, a.request.id, a.target) for a in placed)
        self.placed += len(placed)
        return took

    def one_pass(self) -> float:
        if self.landing:
            return self.step(self.landed())
        model = f"m{self.rng.randrange(MODELS)}"
        decoding = self.decoding[model]
        done = decoding.pop(self.rng.randrange(len(decoding)))
        return self.step([self.prefilled(model), ev.Finished(done, 20)])


def measure_migrator(policy: str, size: int, seed: int) -> tuple[float, float, int]:
    """The same of passes that place decode stages."""
    bench = MigratorBench(policy, size, seed)
    for _ in range(50):
        bench.one_pass()
    gc.collect()
    before = bench.placed
    times = sorted(bench.one_pass() for _ in range(PASSES))
    return statistics.median(times) * 1e3, times[int(PASSES * 0.99)] * 1e3, bench.placed - before


def longest(policy: str, size: int, seed: int) -> float:
    """Milliseconds of the longest of 1,000 passes in which the instances' latencies change 20 times."""
    bench = DispatcherBench(policy, size, seed)
    gc.collect()
    factors = (1.2, 1.0)
    times = [
        bench.one_pass() if index % CHANGED_EVERY else bench.changed_pass(factors[index // CHANGED_EVERY % 2])
        for index in range(PASSES)
    ]
    return max(times) * 1e3


def measure(policy: str, size: int, seed: int) -> tuple[float, float, int]:
    """Median and p99 milliseconds of 1,000 passes, and the requests sent in them."""
    bench = DispatcherBench(policy, size, seed)
    for _ in range(50):
        bench.one_pass()
    gc.collect()
    before = bench.serial - len(bench.scheduler.queue())
    times = sorted(bench.one_pass() for _ in range(PASSES))
    sent = bench.serial - len(bench.scheduler.queue()) - before
    return statistics.median(times) * 1e3, times[int(PASSES * 0.99)] * 1e3, sent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="slackline", choices=sorted(POLICY_SETS))
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    print(f"policy {args.policy}, {INSTANCES} instances, {PASSES} passes a size, seed {args.seed}")
    print(f"{'queued':>8} {'median ms':>10} {'p99 ms':>8} {'sent':>6} {'longest while latencies change, ms':>36}")
    medians: dict[str, float] = {}
    tails: dict[str, float] = {}
    most: dict[str, float] = {}
    for size in SIZES:
        median, p99, sent = measure(args.policy, size, args.seed)
        medians[str(size)], tails[str(size)] = round(median, 4), round(p99, 4)
        most[str(size)] = round(longest(args.policy, size, args.seed), 4)
        print(f"{size:>8} {median:>10.4f} {p99:>8.4f} {sent:>6} {most[str(size)]:>36.4f}")
    print(f"{MODELS} models, {2 * MODELS} decode instances")
    print(f"{'waiting':>8} {'median ms':>10} {'p99 ms':>8} {'placed':>6}")
    stage_medians: dict[str, float] = {}
    stage_tails: dict[str, float] = {}
    for size in SIZES:
        median, p99, placed = measure_migrator(args.policy, size, args.seed)
        stage_medians[str(size)], stage_tails[str(size)] = round(median, 4), round(p99, 4)
        print(f"{size:>8} {median:>10.4f} {p99:>8.4f} {placed:>6}")
    figures = {
        "pass_ms": medians,
        "pass_p99_ms": tails,
        "max_pass_ms": most,
        "migrate_pass_ms": stage_medians,
        "migrate_pass_p99_ms": stage_tails,
        "policy": args.policy,
        "seed": args.seed,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
