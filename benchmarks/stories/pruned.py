"""A request that the coordinator of pruning let be served last under overload, from the overload to the outcome.

`.venv/bin/python -m benchmarks.stories.pruned` starts two gateways in front of two reference engines (emulated steps),
PostgreSQL, Redis, and the coordinator as a Celery worker with beat. It sends twice what the engines can serve for 15 s,
and tells the story of one of the pruned requests by its record and by the decision in the audit that names it. One that
still met its target is told before one that did not. Last line: how many did.

`--link`: pruned for a link. One gateway is in front of the engines of `bench-gating`: two prefill here, and their KV
goes to two in a network namespace behind a link of 0.2 Gb/s, by a transfer daemon with the policy `mfs`. They get
documents and questions for 25 s, more than the link carries. Needs root, `ip` and `tc`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import redis

from benchmarks.gating.engines import daemon, engines_of, seeded_fleet, tasks
from benchmarks.load.generator import drive, gateway_target
from benchmarks.load.workloads import Task, sustained
from benchmarks.machine.network import NETWORK, network_missing, second_host
from benchmarks.servers.engines import ROOT, reference_engines, stop_on_sigterm
from benchmarks.servers.stack import ClassSpec, Stack, StackFleet
from controller.core.messages import HEARTBEAT_KEY
from controller.core.types import Targets
from controller.simulator.workloads.arrivals import Lengths
from controller.wording.vocabulary import reason_in_words
from workers.engine.profiles import load_profile
from workers.supervisor.plan import PYTHON
from workers.tasks.names import PRUNING_PROCESS

MODEL, PROFILE, SEQS = "qwen2.5-7b", "qwen2.5-7b-a100", 8
# Two engines have 16 slots and an answer takes about 3 s: they serve some 5 requests/s.
RATE, DURATION_S, TOKENS = 5.0, 15.0, 220  # at each gateway
TTFT_S, DROP_BUDGET = 4.0, 0.5
LINK_GBIT, LINK_RATE, LINK_S, LINK_TTFT_S = 0.2, 9.0, 25.0, (0.25, 3.0)  # twice the load of bench-gating
STARTED_S = 120.0
DECIDED_S = 20.0  # until the audit has the prunings of the last ten seconds
TASK = Task("answers", Targets(TTFT_S, 0.2, None, 3600.0), Lengths(100, 30, 32, 300), Lengths(TOKENS, 0, 1, TOKENS))
CELERY = ("celery", "-A", "workers.celery:app")

_PRUNED = """SELECT id, arrived_at, instance, outcome, attained, queue_s, ttft_s, target_ttft_s, decisions
    FROM request_record WHERE decisions @> '[{"kind": "prune"}]' ORDER BY arrived_at, id"""
_DECISIONS = "SELECT id, at, inputs FROM decision WHERE kind = 'pruning' ORDER BY id"


class PrunedRequest(NamedTuple):
    """A record. `decisions`: its steps, with `at` in seconds from its arrival."""

    id: str
    arrived_at: datetime
    instance: str
    outcome: str
    attained: bool
    queue_s: float | None
    ttft_s: float | None
    target_ttft_s: float
    decisions: Sequence[Mapping[str, Any]]


class PruningDecision(NamedTuple):
    """A decision of the audit. `inputs`: `workers.tasks.untold.Untold.figures`."""

    id: int
    at: datetime
    inputs: Mapping[str, Any]


def tell(pruned: Sequence[PrunedRequest], decisions: Sequence[PruningDecision]) -> list[str]:
    """The story of the first request that a decision names; one that attained its targets goes before others."""
    named = {name: decision for decision in decisions for name in decision.inputs["requests"]}
    chosen = min((each for each in pruned if each.id in named), key=lambda each: not each.attained, default=None)
    if chosen is None:
        return ["No request was pruned in this run."]
    made_it = sum(each.attained for each in pruned)
    return [
        *_overload(named[chosen.id]),
        *_steps(chosen),
        _outcome(chosen),
        f"Of the {len(pruned)} requests that were pruned in this run, {made_it} met their targets.",
    ]


def _clock(at: datetime) -> str:
    return f"{at.astimezone(UTC):%H:%M:%S}"


def _overload(decision: PruningDecision) -> Iterator[str]:
    inputs = decision.inputs
    gateways = len(inputs["gateways"])
    yield (
        f"Decision {decision.id} (pruning, {_clock(decision.at)} UTC): up to {inputs['most_waiting']} requests waited "
        f"at {gateways} gateway{'s' * (gateways != 1)}. Within {inputs['seconds']:.1f} s {inputs['pruned']} requests "
        f"were pruned, with a drop budget of {inputs['drop_budget']:.0%}."
    )


def _steps(request: PrunedRequest) -> Iterator[str]:
    yield (
        f"One that it names is {request.id}. It arrived at {_clock(request.arrived_at)} UTC, and its first token was "
        f"due {request.target_ttft_s:.1f} s later."
    )
    for step in request.decisions:
        figures = step.get("figures") or {}
        match step["kind"]:
            case "prune":
                yield (
                    f"After {step['at']:.2f} s it was pruned, that is served last: with it the batch of "
                    f"{figures['instance']} would be {figures['behind_s']:.2f} s late "
                    f"({reason_in_words(step['reason'])})."
                )
            case "unprune":
                yield f"After {step['at']:.2f} s it got its place back ({reason_in_words(step['reason'])})."


def _outcome(request: PrunedRequest) -> str:
    if request.ttft_s is None:
        waited = "" if request.queue_s is None else f" after it had waited {request.queue_s:.2f} s"
        return f"It was not served ({request.outcome}){waited}. It counts as a miss."
    waited = "" if request.queue_s is None else f"It waited {request.queue_s:.2f} s in the queue, then "
    verdict = "It made it" if request.attained else "It was late and counts as a miss"
    return f"{waited}{request.instance} served it: first token after {request.ttft_s:.2f} s. {verdict}."


# ---- the run --------------------------------------------------------------------------------------------------------


@contextmanager
def coordinating(stack: Stack) -> Iterator[None]:
    """The coordinator as `make up` starts it, once it runs. Raises RuntimeError if it does not start."""
    environment = {**os.environ, **stack.environment, "SLACKLINE_ROLE": "worker", "CELERY_SKIP_CHECKS": "1"}
    worker = ("worker", "-P", "prefork", "-c", "1", "-Q", "pruning", "--without-gossip", "--without-mingle")
    beat = ("beat", "-s", str(stack.folder / "celerybeat-schedule"), "--pidfile=")
    started = []
    try:
        for command in (worker, beat):
            with (stack.folder / "logs" / f"{command[0]}.log").open("w") as log:
                started.append(
                    subprocess.Popen((*PYTHON, *CELERY, *command), env=environment, cwd=ROOT, stdout=log, stderr=log)
                )
        _wait_for_heartbeat(stack)
        yield
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(20.0)


def _wait_for_heartbeat(stack: Stack) -> None:
    deadline = time.monotonic() + STARTED_S
    with redis.Redis.from_url(stack.environment["REDIS_URL"]) as client:
        while not client.exists(HEARTBEAT_KEY.format(process=PRUNING_PROCESS)):
            if time.monotonic() > deadline:
                logs = [(stack.folder / "logs" / f"{name}.log").read_text()[-1500:] for name in ("worker", "beat")]
                raise RuntimeError("\n".join([f"the coordinator did not start within {STARTED_S:.0f} s:", *logs]))
            time.sleep(0.2)


async def overload(stack: Stack, urls: Sequence[str]) -> None:
    plans = [sustained([TASK], RATE, seed, DURATION_S) for seed in range(len(urls))]
    targets = [gateway_target(url, MODEL, stack.api_key) for url in urls]
    await asyncio.gather(*(drive(plan, target) for plan, target in zip(plans, targets, strict=True)))


def stored(url: str) -> tuple[list[PrunedRequest], list[PruningDecision]]:
    """Once the audit has a decision; at most `DECIDED_S` seconds later."""
    deadline = time.monotonic() + DECIDED_S
    with psycopg.connect(url, autocommit=True) as connection:
        while True:
            pruned = [PrunedRequest(*row) for row in connection.execute(_PRUNED).fetchall()]
            decisions = [PruningDecision(*row) for row in connection.execute(_DECISIONS).fetchall()]
            if (pruned and decisions) or time.monotonic() > deadline:
                return pruned, decisions
            time.sleep(0.5)


def run() -> list[str]:
    options = ("--model", MODEL, "--profile", PROFILE, "--max-num-seqs", str(SEQS), "--max-model-len", "4096")
    with ExitStack() as exits:
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="pruned-", dir="/tmp")))
        engines = exits.enter_context(reference_engines(2, folder / "logs", *options))
        fleet = StackFleet(
            MODEL, [engine.url for engine in engines], "reference", SEQS, [ClassSpec(TASK.name, TTFT_S, 0.2)],
            load_profile(PROFILE).coefficients._asdict(), drop_budget=DROP_BUDGET,
        )  # fmt: skip
        stack = exits.enter_context(Stack(folder, fleet))
        gateways = [exits.enter_context(stack.gateway(name=name, gateway_id=name)) for name in ("one", "two")]
        exits.enter_context(coordinating(stack))
        asyncio.run(overload(stack, [gateway.url for gateway in gateways]))
        return tell(*stored(stack.environment["DATABASE_URL"]))


def run_over_a_link() -> list[str]:
    kinds = tasks(*LINK_TTFT_S)
    with ExitStack() as exits:
        host = exits.enter_context(second_host(LINK_GBIT))
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="pruned-", dir="/tmp")))
        asked = {"FLOW_SOCKET": str(folder / "flowd.sock")}
        engines = exits.enter_context(engines_of(folder, asked, host))
        seeded = seeded_fleet([engine.url for engine in engines], kinds, DROP_BUDGET)
        stack = exits.enter_context(Stack(folder, seeded))
        exits.enter_context(daemon(folder, "mfs", LINK_GBIT, stack.environment["REDIS_URL"]))
        gateway = exits.enter_context(stack.gateway())
        exits.enter_context(coordinating(stack))
        plan = sustained(kinds, LINK_RATE, 0, LINK_S)
        asyncio.run(drive(plan, gateway_target(gateway.url, MODEL, stack.api_key)))
        return tell(*stored(stack.environment["DATABASE_URL"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", action="store_true", help="pruned for a link that carries too little")
    link = parser.parse_args().link
    stop_on_sigterm()
    if link and (missing := network_missing()) is not None:
        print(f"skipped: {missing}")
        return
    os.environ["FLEET_TOKEN"] = secrets.token_urlsafe(16)
    if link:
        os.environ["ENGINE_NETWORKS"] = f"{NETWORK}.0.0/15"
    print("\n".join(run_over_a_link() if link else run()))


if __name__ == "__main__":
    main()
