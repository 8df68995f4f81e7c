"""`make bench-overhead`: latency that the gateway adds to a direct call, at 50, 200 and 500 requests/s.

A reference engine with constant step time answers the same requests directly and through the gateway, in alternating 10
s blocks with Poisson arrivals. Dispatch, authentication and records are on; PostgreSQL and Redis are real. Added
latency is a percentile through the gateway minus the same percentile directly, for each pair of blocks; the result is
the median over the pairs. Latency is from sending to the last byte, on kept-alive connections, streamed and not
streamed. The gateway's processor time per request is reported as well, which other work on the machine affects little.

`--learned`: the load also has what a gateway has learned at work. One request in ten has an answer of 110 tokens,
streamed, whose bound is predicted again twice; half are steps of workflows of three calls with a deadline, which
Redis is asked about and which are compared with pattern graphs. A forest and 200 graphs are in force, made of traffic
that is made up. `refined` and `matched` count the requests that this happened to; none of either is an error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import secrets
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import orjson
import psutil
import psycopg
import uvloop

from benchmarks.load.scoring import percentile
from benchmarks.load.trials import note
from benchmarks.machine.processor import cpu_s
from benchmarks.servers.engines import RunningEngine, prefer, reference_engines, stop_on_sigterm
from benchmarks.servers.stack import TENANT, ClassSpec, Stack, StackFleet

RATES = (50, 200, 500)
BLOCK_S = 10.0
PAIRS = 4
STEP = "constant:2ms"
OUTPUT_TOKENS = 4
PROMPT_TOKENS = 64
MODEL = "constant"
CLASS = ClassSpec("interactive", 5.0, 0.5)
MAX_NUM_SEQS = 256
LONG_TOKENS = 110  # beyond 50 and 100: two later bounds
OPEN_WORKFLOWS, CALLS = 100, 3  # workflows that have calls in turn, and calls of each
WORKFLOW_S = 600.0  # so that no share of it is short on a busy machine
IN_FORCE_S = 60.0


class LoadMix(NamedTuple):
    """Shares of the requests: with an answer of LONG_TOKENS, streamed; and that are steps of workflows."""

    long: float = 0.0
    workflows: float = 0.0


SHORT = LoadMix()
LEARNED = LoadMix(long=0.1, workflows=0.5)


class BlockFailed(RuntimeError):
    """A request was not answered with 200, so the block's latencies are not comparable."""


async def block(
    url: str, headers: Mapping[str, str], rate: float, seconds: float, bodies: Callable[[int], list[bytes]], seed: int
) -> list[float]:
    """Latencies (seconds) of all requests that arrive within the block. `bodies`: of so many requests."""
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(1 / rate, math.ceil(rate * seconds * 1.5) + 50)
    dues = [due for due in np.cumsum(gaps) if due < seconds]
    latencies: list[float] = []
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
        asked = bodies(len(dues))
        start = time.perf_counter() + 0.05

        async def one(due: float, body: bytes) -> None:
            await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
            sent = time.perf_counter()
            async with session.post(f"{url}/v1/completions", data=body) as response:
                answer = await response.read()
                if response.status != 200:
                    raise BlockFailed(f"{url} answered {response.status}: {answer[:300]!r}")
            latencies.append(time.perf_counter() - sent)

        await asyncio.gather(*(one(due, body) for due, body in zip(dues, asked, strict=True)))
    return latencies


def load_bodies(mix: LoadMix, seed: int, count: int, *, named: str = "") -> list[bytes]:
    """The same requests for the same seed. `named`: how the names of workflows begin, which only a gateway reads; "":
    they name none."""
    rng, steps = np.random.default_rng(seed), 0
    bodies = []
    for index in range(count):
        long, step = rng.random(2) < (mix.long, mix.workflows)
        body: dict[str, Any] = {
            "model": MODEL,
            "prompt": rng.integers(3, 1000, PROMPT_TOKENS).tolist(),
            "max_tokens": LONG_TOKENS if long else OUTPUT_TOKENS,
            "ignore_eos": True,
            "stream": bool(long) or index % 2 == 0,
        }
        if step and named:
            turn, number = divmod(steps, OPEN_WORKFLOWS)
            name = f"{named}-{turn // CALLS}-{number}"
            body |= {"metadata": {"workflow_id": name}, "workflow_deadline": WORKFLOW_S}
        steps += bool(step)
        bodies.append(orjson.dumps(body))
    return bodies


def compare(
    direct_url: str, gateway: RunningEngine, api_key: str, rate: int, pairs: int, block_s: float, mix: LoadMix = SHORT
) -> dict[str, Any]:
    """Figures of one rate, in milliseconds."""
    process, spent_s = psutil.Process(gateway.process.pid), 0.0
    keyed = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
    plain = {"Content-Type": "application/json"}
    measured: list[tuple[list[float], list[float]]] = []
    for pair in range(-1, pairs):
        seconds = block_s if pair >= 0 else 2.0  # the first pair warms up and is not counted
        runs = [(direct_url, plain), (gateway.url, keyed)]
        order = (0, 1) if pair % 2 == 0 else (1, 0)
        found: dict[int, list[float]] = {}
        for which in order:
            url, headers = runs[which]
            seed = 1000 * rate + pair + 1
            bodies = partial(load_bodies, mix, seed, named=f"overhead-{secrets.token_hex(4)}" if which else "")
            before_s = cpu_s(process)
            found[which] = uvloop.run(block(url, headers, rate, seconds, bodies, seed))
            spent_s += cpu_s(process) - before_s if which and pair >= 0 else 0.0
        if pair >= 0:
            measured.append((found[0], found[1]))
    through = sum(len(latencies) for _, latencies in measured)
    return {**figures(measured), "gateway_cpu_ms": round(1e3 * spent_s / through, 3)}


def figures(measured: Sequence[tuple[Sequence[float], Sequence[float]]]) -> dict[str, Any]:
    """Medians over the pairs and the spread of p50, in milliseconds, from pairs of (direct, gateway) latencies in
    seconds.
    """
    result: dict[str, Any] = {"requests": sum(len(direct) + len(through) for direct, through in measured)}
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        pairs = [(1e3 * percentile(direct, share), 1e3 * percentile(through, share)) for direct, through in measured]
        added = [through - direct for direct, through in pairs]
        result[f"direct_{name}_ms"] = round(statistics.median(direct for direct, _ in pairs), 3)
        result[f"gateway_{name}_ms"] = round(statistics.median(through for _, through in pairs), 3)
        result[f"added_{name}_ms"] = round(statistics.median(added), 3)
        result[f"added_{name}_spread_ms"] = [round(min(added), 3), round(max(added), 3)]
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bench_overhead", description="Latency that the gateway adds."
    )
    parser.add_argument("--pairs", type=int, default=PAIRS, help="pairs of blocks per rate")
    parser.add_argument("--block", type=float, default=BLOCK_S, help="seconds per block")
    parser.add_argument("--rates", default=",".join(map(str, RATES)), help="requests/s, comma-separated")
    parser.add_argument("--learned", action="store_true", help="with long answers, workflows and what is learned")
    arguments = parser.parse_args()
    stop_on_sigterm()
    prefer(os.getpid())
    rates = [int(rate) for rate in arguments.rates.split(",")]
    mix, learned = (LEARNED if arguments.learned else SHORT), dict[str, Any]()
    by_rate: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="slackline-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # PostgreSQL runs as another user
        engine_options = ("--profile", STEP, "--model", MODEL, "--max-num-seqs", str(MAX_NUM_SEQS))
        with reference_engines(1, folder / "logs", *engine_options) as [engine]:
            fleet = StackFleet(MODEL, [engine.url], "reference", MAX_NUM_SEQS, [CLASS], constant_profile())
            with Stack(folder / "data", fleet) as stack, stack.gateway() as gateway:
                if arguments.learned:
                    put_in_force(stack, gateway)
                for rate in rates:
                    note(f"{rate} requests/s: {arguments.pairs} pairs of {arguments.block:g} s blocks")
                    by_rate[str(rate)] = compare(
                        engine.url, gateway, stack.api_key, rate, arguments.pairs, arguments.block, mix
                    )
                if arguments.learned:
                    learned = exercised(stack, gateway)
    print(table(by_rate))
    added = {key: {rate: row[key] for rate, row in by_rate.items()} for key in ("added_p50_ms", "added_p99_ms")}
    print(json.dumps({**added, **learned, "by_rate": by_rate}))
    return 0


def put_in_force(stack: Stack, gateway: RunningEngine, *, forest: bool = True) -> None:
    """Pattern graphs and, unless there is one, a `forest`. Raises RuntimeError unless the gateway uses both within
    IN_FORCE_S."""
    asked = {"model": MODEL, "tenant": TENANT, "forest": forest}
    stack.manage("-m", "benchmarks.analyzer.in_force", stdin=json.dumps(asked))
    end = time.monotonic() + IN_FORCE_S
    while not all(metric(gateway, f"slackline_{what}_version{{") for what in ("length", "graph")):
        if time.monotonic() > end:
            raise RuntimeError(f"the gateway does not use the published versions after {IN_FORCE_S:.0f} s")
        time.sleep(0.2)


def metric(gateway: RunningEngine, begins: str) -> float:
    """The value of the metric whose line begins so; 0 without one."""
    with urllib.request.urlopen(f"{gateway.url}/metrics", timeout=5) as reply:
        lines = [line for line in reply.read().decode().splitlines() if line.startswith(begins)]
    return float(lines[0].rsplit(" ", 1)[1]) if lines else 0.0


def exercised(stack: Stack, gateway: RunningEngine) -> dict[str, int]:
    """Requests whose bound was predicted again, and that were compared with a graph that they are like. Raises
    BlockFailed where either is 0."""
    with psycopg.connect(stack.environment["DATABASE_URL"]) as connection:
        row = connection.execute("SELECT count(*) FROM request_record WHERE refined_bounds IS NOT NULL").fetchone()
    found = {
        "refined": int(row[0]) if row else 0,
        "matched": round(metric(gateway, 'slackline_graph_matches_total{matched="yes"}')),
    }
    if not all(found.values()):
        raise BlockFailed(f"what is learned was not at work: {found}")
    return found


def constant_profile() -> dict[str, float]:
    """The latency model of STEP, as a profiler would find it."""
    return {"prefill_a": 2e-3, "prefill_b": 0.0, "prefill_c": 0.0, "decode_a": 2e-3, "decode_b": 0.0, "decode_c": 0.0}


def table(by_rate: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [f"{'requests/s':>10} {'':>5} {'direct':>10} {'gateway':>10} {'added':>9} {'spread over pairs':>20}"]
    for rate, row in by_rate.items():
        for name in ("p50", "p90", "p99"):
            spread = "{:.2f} to {:.2f}".format(*row[f"added_{name}_spread_ms"])
            lines.append(
                f"{rate if name == 'p50' else '':>10} {name:>5} {row[f'direct_{name}_ms']:>7.2f} ms "
                f"{row[f'gateway_{name}_ms']:>7.2f} ms {row[f'added_{name}_ms']:>6.2f} ms {spread:>20}"
            )
        lines.append(f"{'':>16} {row['gateway_cpu_ms']:.2f} ms of processor time a request in the gateway")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
