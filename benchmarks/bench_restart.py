"""`make bench-restart`: a gateway is killed (`kill -9`) under load and started again under the same name.

Two reference engines answer 100 requests/s of the lengths of `azure2023_conv` (a quarter of its prompts, an eighth of
its answers, of which no predictor sees the end). Workflows with one deadline have had their first request. The Celery
task has trained a forest on what was recorded, and the gateway uses it. Then it is killed, and the same name is started
on another port, to which the load moves: a load balancer in front would do that.

- `resume_s`: from the new process' first /healthz of 200 to the first answer that it completes, asked every 10 ms.
- `bound_drift_pct`: the upper bound of equal probes at the old and the new process: median of |new - old| / old. Probes
  are sent when the load has paused, twice at the old process, since their own answers move the bounds too.
- `cold_drift_pct`: the same at a process of another name, which begins without what was learned.
- `workflows_kept`: share of the workflows whose second request inherits the deadline of the first, within 0.5 s.
- `restored_age_s`: how old the stored state was. `started_s`: from the kill to that first 200.

QUICK=1: fewer requests. Prints a table, then one line of JSON.
"""

from __future__ import annotations

import argparse
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
from benchmarks.servers.engines import RunningEngine, reference_engines, stop_on_sigterm
from benchmarks.servers.stack import Stack, StackFleet, health

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
        """The id of an answered request. Raises requests.RequestException."""
        prompt = np.random.default_rng(prompt_tokens).integers(3, 1000, prompt_tokens).tolist()
        asked = {"model": overhead.MODEL, "prompt": prompt, "max_tokens": 512, "seed": 7, **changes}
        answer = self._session.post(f"{self.url}/v1/completions", json=asked, timeout=10)
        answer.raise_for_status()
        return str(answer.headers["x-slackline-request-id"])

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=5) as reply:
            lines = reply.read().decode().splitlines()
        return float(next(line for line in lines if line.startswith(name)).rsplit(" ", 1)[1])

    def first_answer(self) -> float:
        """Monotonic seconds at which a request was answered. Raises TimeoutError after PATIENCE_S."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            try:
                self.ask(60, max_tokens=1)
                return time.monotonic()
            except requests.RequestException:
                time.sleep(0.01)
        raise TimeoutError(f"no answer within {PATIENCE_S:.0f} s")


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
        due = begun(caller)
        bounds(caller, records)  # their answers move the mean of their kind, from which the bounds are predicted
        before = bounds(caller, records)
        time.sleep(2.0)  # so that what is stored has the probes' answers too
        note("the gateway is killed")
        killed_at = time.monotonic()
        gateway.kill()
    found = restarted(stack, records, killed_at, before, due)
    with stack.gateway(name="cold") as gateway:
        wait_for(gateway.url, 1)
        found["cold_drift_pct"] = drift_pct(before, bounds(RestartClient(gateway.url, stack.api_key), records))
    return found


def restarted(
    stack: Stack, records: Recorded, killed_at: float, before: Sequence[int], due: dict[str, float]
) -> dict[str, Any]:
    with stack.gateway(name="second", gateway_id=GATEWAY) as gateway:
        healthy_at = time.monotonic()  # the block begins once /healthz is 200 and every instance is up
        caller = RestartClient(gateway.url, stack.api_key)
        resumed_at = caller.first_answer()
        assert health(gateway.url)
        wait_for(gateway.url, 1)
        return {
            "started_s": round(healthy_at - killed_at, 2),
            "resume_s": round(resumed_at - healthy_at, 3),
            "restored_age_s": round(caller.metric("slackline_learned_restored_age_seconds"), 2),
            "bound_drift_pct": drift_pct(before, bounds(caller, records)),
            "workflows_kept": kept(caller, records, due),
        }


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
    goals = {"resume_s": "2", "bound_drift_pct": "5", "workflows_kept": "1.0"}
    for name, value in found.items():
        print(f"{name:18s} {value:8} {'goal ' + goals[name] if name in goals else ''}")
    print(json.dumps({"benchmark": "restart", "seed": args.seed, "quick": quick, **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
