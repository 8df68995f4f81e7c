"""`make bench-fork`: eight branches of a step of 2,000 tokens, computed again or from its checkpoint.

Two reference engines with the profile of a 70B model, a gateway, PostgreSQL and Redis. A step of 2,000 tokens is
answered; then eight requests go on from it at once, each with a token of its own. `again`: they are requests like any
other (with the engines' prefix caches); `fork`: branches of a fork. Every repetition has a new prompt.

- `prefill_tokens`: prompt tokens that the engines computed for a branch, the mean.
- `kv_blocks`: blocks of 16 tokens in use at both engines while the branches are answered, the most seen (every 10 ms).
- `first_token_s`: from sending a branch's request to its first token, the median.
- `engine_calls`: calls at engines of ten equal requests with `share_call`.
- `leaked_blocks`: blocks in use when all has ended. `preemption_share`: preemptions by request.

QUICK=1: one repetition. Prints a table, then one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import requests

from benchmarks import bench_overhead as overhead
from benchmarks.servers.engines import RunningEngine, reference_engines, stop_on_sigterm
from benchmarks.servers.stack import Stack, StackFleet

PROFILE = "vidur/Llama-2-70B/A100-SXM-80GB/tp2"
BRANCHES, TOKENS, ANSWER_TOKENS = 8, 2_000, 32
EQUAL = 10
BLOCKS = 4_096
REPETITIONS = 3
PATIENCE_S = 30.0
LOOK_S = 0.01


class Answered(NamedTuple):
    first_token_s: float
    computed: int  # prompt tokens


def figure(engine: RunningEngine, name: str) -> float:
    """The sum of a metric's samples. Raises requests.RequestException."""
    lines = requests.get(f"{engine.url}/metrics", timeout=5).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


def blocks(engines: Sequence[RunningEngine]) -> int:
    return round(sum(figure(engine, "vllm:kv_cache_usage_perc") for engine in engines) * BLOCKS)


class MostBlocks:
    """The most blocks that were in use while the `with` block ran."""

    def __init__(self, engines: Sequence[RunningEngine]) -> None:
        self.seen = 0
        self._engines = engines
        self._over = threading.Event()
        self._looks = threading.Thread(target=self._look)

    def __enter__(self) -> MostBlocks:
        self._looks.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._looks.join()

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            self.seen = max(self.seen, blocks(self._engines))


class ForkClient:
    def __init__(self, url: str, api_key: str) -> None:
        self._url, self._headers = url, {"authorization": f"Bearer {api_key}"}

    def ask(self, prompt: Sequence[int], **fields: Any) -> Answered:
        """Raises requests.RequestException."""
        body = {"model": overhead.MODEL, "prompt": list(prompt), "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
        body |= {"stream": True, "stream_options": {"include_usage": True}, **fields}
        sent, first, usage = time.perf_counter(), 0.0, {}
        where = f"{self._url}/v1/completions"
        with requests.post(where, json=body, headers=self._headers, stream=True, timeout=60) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                first = first or time.perf_counter() - sent
                if b'"usage":{' in line:
                    usage = json.loads(line[6:])["usage"]
        return Answered(first, usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])

    def call(self, method: str, path: str, **fields: Any) -> requests.Response:
        where = f"{self._url}/v1/workflows/{path}"
        return requests.request(method, where, headers=self._headers, json=fields or None, timeout=10)

    def forked(self, workflow: str) -> list[str]:
        """The branches of a fork at its step. Raises TimeoutError."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            answer = self.call("POST", f"{workflow}/fork", step="step", branches=BRANCHES)
            if answer.status_code == 201:
                return list(answer.json()["branches"])
            time.sleep(0.02)
        raise TimeoutError(f"no checkpoint within {PATIENCE_S:.0f} s")


def branched(
    client: ForkClient, engines: Sequence[RunningEngine], rng: np.random.Generator, fork: bool
) -> dict[str, Any]:
    prompt, workflow = rng.integers(3, 1000, TOKENS).tolist(), f"w-{secrets.token_hex(4)}"
    kept = {"metadata": {"workflow_id": workflow, "step_key": "step"}, "checkpoint": 60} if fork else {}
    client.ask(prompt, **kept)
    names = client.forked(workflow) if fork else [""] * BRANCHES
    with MostBlocks(engines) as most, ThreadPoolExecutor(BRANCHES) as pool:
        fields = [{"branch": name} if name else {} for name in names]
        asked = [pool.submit(client.ask, [*prompt, number + 3], **fields[number]) for number in range(BRANCHES)]
        answers = [each.result() for each in asked]
    for name in names:
        if name:
            client.call("DELETE", f"{workflow}/branches/{name}").raise_for_status()
    return {
        "prefill_tokens": statistics.mean(answer.computed for answer in answers),
        "kv_blocks": most.seen,
        "first_token_s": statistics.median(answer.first_token_s for answer in answers),
    }


def merged(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {name: round(statistics.median(each[name] for each in found), 4) for name in found[0]}


def equal_calls(client: ForkClient, engines: Sequence[RunningEngine], rng: np.random.Generator) -> int:
    """Calls at engines of equal requests that are sent at once."""
    prompt = rng.integers(3, 1000, TOKENS).tolist()

    def done() -> float:
        return sum(figure(engine, "vllm:request_success_total") for engine in engines)

    before = done()
    with ThreadPoolExecutor(EQUAL) as pool:
        asked = [pool.submit(client.ask, prompt, share_call=True, temperature=0) for _ in range(EQUAL)]
        for each in asked:
            each.result()
    return round(done() - before)


def measured(
    client: ForkClient, engines: Sequence[RunningEngine], rng: np.random.Generator, repetitions: int
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    client.ask(rng.integers(3, 1000, TOKENS).tolist())
    for name in ("again", "fork"):
        found[name] = merged([branched(client, engines, rng, name == "fork") for _ in range(repetitions)])
    found["engine_calls"] = equal_calls(client, engines, rng)
    end = time.monotonic() + PATIENCE_S
    while blocks(engines) and time.monotonic() < end:
        time.sleep(0.05)
    requests_sent = sum(figure(engine, "vllm:request_success_total") for engine in engines)
    preempted = sum(figure(engine, "vllm:num_preemptions_total") for engine in engines)
    return {**found, "leaked_blocks": blocks(engines), "preemption_share": preempted / requests_sent}


def run(repetitions: int, seed: int) -> dict[str, Any]:
    os.environ["FLEET_TOKEN"] = secrets.token_urlsafe(32)  # of engines and gateway: the last branch frees its KV
    with tempfile.TemporaryDirectory(prefix="slackline-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # PostgreSQL runs as another user
        options = ("--profile", PROFILE, "--model", overhead.MODEL, "--kv-blocks", str(BLOCKS))
        with reference_engines(2, folder / "logs", *options) as engines:
            urls = [each.url for each in engines]
            fleet = StackFleet(overhead.MODEL, urls, "reference", 64, [overhead.CLASS], retention_s=600)
            with Stack(folder / "data", fleet) as stack, stack.gateway() as gateway:
                client = ForkClient(gateway.url, stack.api_key)
                return measured(client, engines, np.random.default_rng(seed), repetitions)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    stop_on_sigterm()
    quick = os.environ.get("QUICK", "") not in ("", "0")
    found = run(1 if quick else REPETITIONS, args.seed)
    print(f"{'':8s} {'prefill tokens':>15s} {'KV blocks':>10s} {'first token':>12s}")
    for name in ("again", "fork"):
        row = found[name]
        print(f"{name:8s} {row['prefill_tokens']:15.1f} {row['kv_blocks']:10.0f} {row['first_token_s']:10.3f} s")
    for name in ("engine_calls", "leaked_blocks", "preemption_share"):
        print(f"{name}: {found[name]}")
    print(json.dumps({"benchmark": "fork", "seed": args.seed, "quick": quick, **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
