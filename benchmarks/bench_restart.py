"""`make bench-restart`: a gateway is killed (`kill -9`) under load and started again under the same name.

Two reference engines answer 100 requests/s of the lengths of `azure2023_conv` (a quarter of its prompts, an eighth of
its answers, of which no predictor sees the end). Workflows with one deadline have had their first request. The Celery
task has trained a forest on what was recorded, and the gateway uses it. Then it is killed twice: once when the load has
paused, for the bounds, and once under load. Each time the same name is started on another port, to which the load moves
at once: a load balancer in front would do that.

- `resume_s`: under load, from the new process' first /healthz of 200 (asked every 10 ms) to its first answer.
- `failed_after`: requests of the load that were sent to it after that 200 and were not answered with 200.
- `bound_drift_pct`: the upper bound of equal probes at the old and the new process: median of |new - old| / old. Probes
  are sent when the load has paused, and the old process is killed once it has stored what they taught.
- `probe_drift_pct`: the same of two rounds of probes at the old process, since their own answers move the bounds too:
  what a restart loses is what is above it.
- `load_drift_pct`: the same at one process between two moments under load; `bound_drift_under_load_pct`: across the
  kill under load. Each of the load's answers moves the level of the bounds and the mean of their kind, so the second
  says what a restart loses only as far as it is above the first.
- `cold_drift_pct`: as `bound_drift_pct`, at a process of another name, which begins without what was learned.
- `workflows_kept`: share of the workflows whose second request inherits the deadline of the first, within 0.5 s.
- `restored_age_s`: how old the stored state was. `started_s`: from the kill to that first 200.

QUICK=1: fewer requests. Prints a table, then one line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import requests
import uvloop

from benchmarks import bench_overhead as overhead
from benchmarks.analyzer.live import (
    ANSWER_PART,
    CONTEXT_TOKENS,
    PROMPT_PART,
    RATE,
    Recorded,
    body,
    send,
    train,
    wait_for,
)
from benchmarks.bench_analyzer import SHIPPED, rows
from benchmarks.load.trials import note
from benchmarks.restart.load import FirstHealthy, SteadyLoad
from benchmarks.servers.engines import LOOPBACK, RunningEngine, reference_engines, stop_on_sigterm
from benchmarks.servers.stack import Stack, StackFleet
from workers.supervisor.ports import free_port

GATEWAY = "restarted"
RECORDED, QUICK_RECORDED = 3_000, 900
WORKFLOWS = 50
DEADLINE_S = 300.0
WITHIN_S = 0.5
PROBES = (60, 120, 200, 300, 400, 500, 700, 900, 1_200, 1_600)  # prompt tokens
PATIENCE_S = 30.0


class RestartClient:
    """A client of one gateway."""

    def __init__(self, url: str, api_key: str) -> None:
        self.url = url
        self._session = requests.Session()
        self._session.headers["authorization"] = f"Bearer {api_key}"

    def ask(self, prompt_tokens: int, **changes: Any) -> str:
        """The id of an answered request. Raises requests.RequestException, and RuntimeError unless it is 200."""
        prompt = np.random.default_rng(prompt_tokens).integers(3, 1000, prompt_tokens).tolist()
        asked = {"model": overhead.MODEL, "prompt": prompt, "max_tokens": 512, "seed": 7, **changes}
        answer = self._session.post(f"{self.url}/v1/completions", json=asked, timeout=10)
        if answer.status_code != 200:
            raise RuntimeError(f"the gateway answered {answer.status_code}: {answer.text[:300]}")
        return str(answer.headers["x-slackline-request-id"])

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=5) as reply:
            lines = reply.read().decode().splitlines()
        return float(next(line for line in lines if line.startswith(name)).rsplit(" ", 1)[1])


def stored(records: Recorded, request_id: str, column: str) -> Any:
    """A column of its record, which is written within some seconds."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        (found,) = records.one(f"SELECT max({column}::text) FROM request_record WHERE id = '{request_id}'")
        if found is not None:
            return json.loads(found)
        time.sleep(0.1)
    raise TimeoutError(f"no record of {request_id} within {PATIENCE_S:.0f} s")


def bounds(caller: RestartClient, records: Recorded) -> list[int]:
    """The upper bounds that the gateway gives to the probes."""
    asked = [caller.ask(tokens) for tokens in PROBES]
    return [stored(records, request_id, "length_bounds")[1] for request_id in asked]


def keep(caller: RestartClient) -> None:
    """Wait until the gateway has stored what it has learned until now. On a busy machine it writes more rarely than
    once a second, and a fixed wait measured how old the stored state was. Raises TimeoutError."""
    asked_at = time.monotonic()
    while time.monotonic() < asked_at + PATIENCE_S:
        began = time.monotonic()
        if 0 <= caller.metric("slackline_learned_age_seconds") < began - asked_at:
            return
        time.sleep(0.1)
    raise TimeoutError(f"what the gateway has learned was not stored within {PATIENCE_S:.0f} s")


def drift_pct(before: Sequence[int], after: Sequence[int]) -> float:
    return round(100.0 * statistics.median(abs(b - a) / a for a, b in zip(before, after, strict=True)), 2)


def begun(caller: RestartClient) -> dict[str, float]:
    """By workflow, when it is due (monotonic seconds)."""
    due = {}
    for index in range(WORKFLOWS):
        name = f"restart-{index}"
        due[name] = time.monotonic() + DEADLINE_S
        caller.ask(60, max_tokens=4, metadata={"workflow_id": name}, workflow_deadline=DEADLINE_S)
    return due


def kept(caller: RestartClient, records: Recorded, due: dict[str, float]) -> float:
    """Share of the workflows whose next request has what the deadline leaves."""
    asked = {}
    for name, at in due.items():
        left_s = at - time.monotonic()
        asked[caller.ask(60, max_tokens=4, metadata={"workflow_id": name})] = left_s
    told = {request_id: stored(records, request_id, "decisions") for request_id in asked}
    left = {id: [each["figures"]["left_s"] for each in told[id] if each["kind"] == "workflow"] for id in asked}
    return sum(bool(left[id]) and abs(left[id][0] - asked[id]) <= WITHIN_S for id in asked) / len(asked)


def measured(stack: Stack, bodies: Sequence[bytes], records: Recorded) -> dict[str, Any]:
    with stack.gateway(name="first", gateway_id=GATEWAY) as gateway:
        caller = RestartClient(gateway.url, stack.api_key)
        note(f"{len(bodies)} requests are recorded at {RATE:g} requests/s")
        uvloop.run(send(gateway.url, stack.api_key, bodies, RATE))
        records.wait(len(bodies))
        train(stack.environment)
        wait_for(gateway.url, 1)
        uvloop.run(send(gateway.url, stack.api_key, bodies[: len(bodies) // 4], RATE))
        bounds(caller, records)  # their answers move the mean of their kind, from which the bounds are predicted
        earlier = bounds(caller, records)
        before = bounds(caller, records)
        keep(caller)  # with the probes' answers too
        note("the gateway is killed, with its load paused")
        gateway.kill()
    found = killed_under_load(stack, bodies, records, before)
    found["probe_drift_pct"] = drift_pct(earlier, before)
    with stack.gateway(name="cold") as gateway:
        wait_for(gateway.url, 1)
        found["cold_drift_pct"] = drift_pct(before, bounds(RestartClient(gateway.url, stack.api_key), records))
    return found


def killed_under_load(
    stack: Stack, bodies: Sequence[bytes], records: Recorded, before: Sequence[int]
) -> dict[str, Any]:
    """`before`: the bounds at the first process."""
    with contextlib.ExitStack() as until_all:
        with stack.gateway(name="second", gateway_id=GATEWAY) as gateway:
            caller = RestartClient(gateway.url, stack.api_key)
            wait_for(gateway.url, 1)
            drift = drift_pct(before, bounds(caller, records))
            load = until_all.enter_context(SteadyLoad(gateway.url, stack.api_key, bodies, RATE))
            due = begun(caller)
            earlier = bounds(caller, records)
            keep(caller)
            later = bounds(caller, records)
            note("the gateway is killed under load")
            killed_at = time.monotonic()
            gateway.kill()
            port = free_port()
            load.url = f"http://{LOOPBACK}:{port}"
        found = restarted(stack, records, load, port, killed_at, due)
        under_load = drift_pct(later, found.pop("bounds"))
    return {
        **found,
        "bound_drift_pct": drift,
        "load_drift_pct": drift_pct(earlier, later),
        "bound_drift_under_load_pct": under_load,
    }


def restarted(
    stack: Stack, records: Recorded, load: SteadyLoad, port: int, killed_at: float, due: dict[str, float]
) -> dict[str, Any]:
    """What a new process at `port` does under the load that goes there. `bounds`: of the probes."""
    with FirstHealthy(load.url) as healthy, stack.gateway(name="third", gateway_id=GATEWAY, port=port) as gateway:
        resumed_at = load.first_answer(gateway.url, PATIENCE_S)
        if healthy.at is None:
            raise RuntimeError("the gateway answers requests, and is not healthy")
        caller = RestartClient(gateway.url, stack.api_key)
        wait_for(gateway.url, 1)
        found = {
            "started_s": round(healthy.at - killed_at, 2),
            "resume_s": round(max(0.0, resumed_at - healthy.at), 3),
            "restored_age_s": round(caller.metric("slackline_learned_restored_age_seconds"), 2),
            "bounds": bounds(caller, records),
            "workflows_kept": kept(caller, records, due),
        }
        return {**found, "failed_after": load.failed(gateway.url, healthy.at)}


def run(recorded: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    lengths = [(prompt, answer) for _, prompt, answer, _ in sorted(rows(SHIPPED, recorded), key=lambda row: row[0])]
    bodies = [body(prompt // PROMPT_PART, answer // ANSWER_PART, rng) for prompt, answer in lengths]
    with tempfile.TemporaryDirectory(prefix="slackline-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # PostgreSQL runs as another user
        options = ("--profile", overhead.STEP, "--model", overhead.MODEL, "--max-num-seqs", "256")
        with (
            reference_engines(2, folder / "logs", *options) as engines,
            Stack(folder / "data", fleet_of(engines)) as stack,
            closing(Recorded(stack.environment["DATABASE_URL"])) as records,
        ):
            return measured(stack, bodies, records)


def fleet_of(engines: Sequence[RunningEngine]) -> StackFleet:
    urls, profile = [each.url for each in engines], overhead.constant_profile()
    classes = [overhead.CLASS]
    return StackFleet(overhead.MODEL, urls, "reference", 256, classes, profile, context_tokens=CONTEXT_TOKENS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    stop_on_sigterm()
    quick = os.environ.get("QUICK", "") not in ("", "0")
    found = run(QUICK_RECORDED if quick else RECORDED, args.seed)
    goals = {"resume_s": "2", "failed_after": "0", "bound_drift_pct": "5", "workflows_kept": "1.0"}
    for name, value in found.items():
        print(f"{name:18s} {value:8} {'goal ' + goals[name] if name in goals else ''}")
    print(json.dumps({"benchmark": "restart", "seed": args.seed, "quick": quick, **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
