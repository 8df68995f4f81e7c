"""`live` of bench-analyzer: bounds that a gateway learned from requests it recorded itself.

Prompts and answers have the lengths of `azure2023_conv`'s, a quarter and an eighth of them. The cap (`max_tokens`) is
one for all: answers end by `min_tokens`, which no predictor sees. A reference engine answers 5,000 requests through a
gateway with its own PostgreSQL and Redis; the Celery task trains in a process of its own; the gateway takes the version
over while it runs and answers 1,500 later requests of the trace.

- `coverage`: of these, by the bounds that their records have, which the gateway gave at their arrival.
- `takeover_s`: from the commit of the version to the gateway that uses it.
- `added_p50_ms`, `cpu_ms_per_request`: as `make bench-overhead` measures them at 200 requests/s with the load of its
  `--learned` (long answers and workflows), without (`off`) and with (`on`) the version and made-up pattern graphs in
  force, in turn on the same gateway; medians.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
import psycopg
import uvloop

from benchmarks import bench_overhead as overhead
from benchmarks.load.lengths import emulated
from benchmarks.load.trials import note
from benchmarks.servers.engines import ROOT, RunningEngine, prefer, reference_engines
from benchmarks.servers.stack import Stack, StackFleet

RATE = 100.0  # requests/s while answers are recorded
COST_RATE = 200
TURNS = 6  # of short blocks: what else the machine does changes within a minute
RECORDED, LATER = 5_000, 1_500
QUICK_RECORDED, QUICK_LATER = 800, 300
MAX_TOKENS = 512
CONTEXT_TOKENS = 8_192
PROMPT_PART, ANSWER_PART = 4, 8
PATIENCE_S = 60.0
LEARNED_TABLES = ("length_version", "graph_version")
TASK = "import django; django.setup(); from workers.tasks.lengths import train; train()"

Lengths = Sequence[tuple[int, int]]


def body(prompt_tokens: int, answer_tokens: int, rng: np.random.Generator) -> bytes:
    """A request whose answer has `answer_tokens`, at most MAX_TOKENS."""
    prompt = rng.integers(3, 1000, max(1, prompt_tokens)).tolist()
    return orjson.dumps({"model": overhead.MODEL, "prompt": prompt, **emulated(answer_tokens, MAX_TOKENS)})


async def send(url: str, api_key: str, bodies: Sequence[bytes], rate: float) -> None:
    """Open loop; raises RuntimeError for an answer that is not 200."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=headers) as session:
        start = time.perf_counter()

        async def one(due: float, raw: bytes) -> None:
            await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
            async with session.post(f"{url}/v1/completions", data=raw) as response:
                answer = await response.read()
                if response.status != 200:
                    raise RuntimeError(f"the gateway answered {response.status}: {answer[:300]!r}")

        await asyncio.gather(*(one(number / rate, raw) for number, raw in enumerate(bodies)))


def version_in_force(url: str) -> int:
    """Of the length forest, as the gateway's /metrics says; 0: none."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=5) as reply:
        lines = reply.read().decode().splitlines()
    found = [line for line in lines if line.startswith("slackline_length_version{")]
    return int(float(found[0].rsplit(" ", 1)[1])) if found else 0


def wait_for(url: str, version: int) -> float:
    """Epoch seconds at which the gateway uses it. Raises RuntimeError after PATIENCE_S."""
    end = time.monotonic() + PATIENCE_S
    while version_in_force(url) != version:
        if time.monotonic() > end:
            raise RuntimeError(f"the gateway does not use version {version} after {PATIENCE_S:.0f} s")
        time.sleep(0.05)
    return time.time()


class Recorded:
    """The stack's database, read and written as its owner."""

    def __init__(self, url: str) -> None:
        self._connection = psycopg.connect(url, autocommit=True)

    def one(self, query: str) -> tuple[Any, ...]:
        row = self._connection.execute(query.encode()).fetchone()
        if row is None:
            raise RuntimeError(f"nothing found: {query}")
        return row

    def wait(self, count: int) -> None:
        """Until that many answers are stored: they are written in batches."""
        end = time.monotonic() + PATIENCE_S
        while self.one("SELECT count(*) FROM request_record WHERE length_features <> '[]'")[0] < count:
            if time.monotonic() > end:
                raise RuntimeError(f"{count} records are not stored after {PATIENCE_S:.0f} s")
            time.sleep(0.1)

    def withdraw(self) -> dict[str, bytes]:
        """Take the forest and the graphs out of force; returns their contents, by table."""
        contents = {}
        for table in LEARNED_TABLES:
            (content,) = self.one(f"SELECT content FROM {table} WHERE version = 1")
            self._connection.execute(f"UPDATE {table} SET content = NULL WHERE version = 1".encode())
            contents[table] = bytes(content)
        return contents

    def restore(self, contents: dict[str, bytes]) -> None:
        for table, content in contents.items():
            self._connection.execute(f"UPDATE {table} SET content = %s WHERE version = 1".encode(), [content])

    def close(self) -> None:
        self._connection.close()


def train(environment: dict[str, str]) -> None:
    """The Celery task, in a process as a worker's."""
    done = subprocess.run(
        [sys.executable, "-c", TASK],
        cwd=ROOT,
        env={**os.environ, **environment, "SLACKLINE_ROLE": "worker"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"training failed: {done.stderr[-2000:]}")


def costs(
    gateway: RunningEngine, engine: RunningEngine, api_key: str, records: Recorded, *, quick: bool
) -> dict[str, Any]:
    """Added latency and processor time, off and on in turn."""
    found: dict[str, list[dict[str, Any]]] = {"off": [], "on": []}
    for turn in range(1 if quick else TURNS):
        for mode in ("on", "off") if turn % 2 == 0 else ("off", "on"):
            contents = records.withdraw() if mode == "off" else {}
            wait_for(gateway.url, 0 if mode == "off" else 1)
            note(f"{COST_RATE} requests/s, {mode}")
            seconds = 3.0 if quick else 6.0
            mix = overhead.LEARNED
            found[mode].append(overhead.compare(engine.url, gateway, api_key, COST_RATE, 1, seconds, mix))
            records.restore(contents)
    names = {"added_p50_ms": "added_p50_ms", "cpu_ms_per_request": "gateway_cpu_ms"}
    return {
        key: {mode: round(statistics.median(row[name] for row in rows), 3) for mode, rows in found.items()}
        for key, name in names.items()
    }


def live(lengths: Lengths, *, quick: bool, seed: int) -> dict[str, Any]:
    """All figures. `lengths`: prompt and answer tokens of a trace, in its order."""
    recorded, later = (QUICK_RECORDED, QUICK_LATER) if quick else (RECORDED, LATER)
    rng = np.random.default_rng(seed)
    bodies = [body(prompt // PROMPT_PART, answer // ANSWER_PART, rng) for prompt, answer in lengths[: recorded + later]]
    prefer(os.getpid())
    with tempfile.TemporaryDirectory(prefix="slackline-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # PostgreSQL runs as another user
        options = ("--profile", overhead.STEP, "--model", overhead.MODEL, "--max-num-seqs", "256")
        with reference_engines(1, folder / "logs", *options) as [engine]:
            profile = overhead.constant_profile()
            fleet = StackFleet(
                overhead.MODEL, [engine.url], "reference", 256, [overhead.CLASS], profile, context_tokens=CONTEXT_TOKENS
            )
            with Stack(folder / "data", fleet) as stack, stack.gateway() as gateway:
                records = Recorded(stack.environment["DATABASE_URL"])
                try:
                    return _measured(stack, gateway, engine, records, bodies, recorded, quick=quick)
                finally:
                    records.close()


def _measured(
    stack: Stack,
    gateway: RunningEngine,
    engine: RunningEngine,
    records: Recorded,
    bodies: Sequence[bytes],
    recorded: int,
    *,
    quick: bool,
) -> dict[str, Any]:
    note(f"{recorded} requests are recorded")
    uvloop.run(send(gateway.url, stack.api_key, bodies[:recorded], RATE))
    records.wait(recorded)
    train(stack.environment)
    began, refused, judged = records.one("SELECT extract(epoch FROM trained_at), refused, coverage FROM length_version")
    if refused:
        raise RuntimeError(f"the version was refused: {refused}")
    taken_at = wait_for(gateway.url, 1)
    uvloop.run(send(gateway.url, stack.api_key, bodies[recorded:], RATE))
    records.wait(len(bodies))
    count, covered = records.one(
        "SELECT count(*), count(*) FILTER (WHERE output_tokens <= (length_bounds ->> 1)::int)"
        f" FROM request_record WHERE length_version = 1 AND output_tokens < {MAX_TOKENS}"
    )
    measured = {
        "coverage": round(covered / count, 3),
        "answers": count,
        "judged_coverage": round(float(judged), 3),
        "takeover_s": round(taken_at - float(began), 2),
    }
    overhead.put_in_force(stack, gateway, forest=False)
    return {**measured, **costs(gateway, engine, stack.api_key, records, quick=quick)}
