"""Two reference engines that prefill on this host and two that decode behind a link, and what they are asked.

The second host is a network namespace behind a veth pair (`benchmarks.machine.network`). Steps are emulated in the time
of Qwen2.5-7B on A100; KV is really transferred over TCP.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.load.workloads import Task
from benchmarks.machine.network import SecondHost
from benchmarks.servers.engines import ROOT, RunningEngine, prefer, reference_engines
from benchmarks.servers.stack import ClassSpec, StackFleet
from controller.core.types import Targets
from controller.simulator.workloads.arrivals import Lengths
from workers.engine.profiles import load_profile

MODEL, PROFILE = "qwen2.5-7b", "qwen2.5-7b-a100"
EACH = 2  # engines of each role
LAYERS, LAYER_TOKEN_BYTES = 28, 128  # 3.6 kB a token: slow enough for the link to be what limits, not two cores
SEQS, CONTEXT, KV_TOKENS = 64, 8192, 262_144
CHUNK = 1024  # tokens of a step, so that questions do not wait for whole documents to be prefilled
DAEMON_S = 20.0


def tasks(question_s: float, document_s: float, share: float = 1.0, tpot_s: float = 0.2) -> tuple[Task, ...]:
    """Questions and documents with these TTFT targets. `share`: of the lengths of prompts."""

    def prompts(mean: float, spread: float, least: int, most: int) -> Lengths:
        return Lengths(share * mean, share * spread, round(share * least), round(share * most), "lognormal")

    return (
        Task("question", Targets(question_s, tpot_s, None, 3600.0), prompts(200, 60, 64, 600), Lengths(16, 4, 4, 40)),
        Task("document", Targets(document_s, tpot_s, None, 3600.0), prompts(2400, 800, 800, 6000),
             Lengths(16, 4, 4, 40)),
    )  # fmt: skip


@contextlib.contextmanager
def daemon(folder: Path, policy: str, gbit: float, redis_url: str = "") -> Iterator[dict[str, str]]:
    """A transfer daemon of the prefill engines' host, and the environment with which engines ask it; empty without.
    `redis_url`: to which it reports, "" if it does not."""
    if not policy:
        yield {}
        return
    socket = {"FLOW_SOCKET": str(folder / "flowd.sock")}
    env = {**os.environ, **socket, "FLOW_POLICY": policy, "FLOW_LINK_GBPS": str(gbit), "REDIS_URL": redis_url}
    command = [sys.executable, "-m", "workers.flowd"]
    process = subprocess.Popen(command, env=env, cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True)
    prefer(process.pid)
    try:
        deadline = time.monotonic() + DAEMON_S
        while not Path(socket["FLOW_SOCKET"]).exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the transfer daemon did not start")
            time.sleep(0.05)
        yield socket
    finally:
        process.terminate()
        process.wait(10.0)


@contextlib.contextmanager
def fleet_of(folder: Path, policy: str, gbit: float, host: SecondHost) -> Iterator[list[RunningEngine]]:
    """As `engines_of`, with a daemon of this policy."""
    with daemon(folder, policy, gbit) as asked, engines_of(folder, asked, host) as engines:
        yield engines


@contextlib.contextmanager
def engines_of(folder: Path, asked: Mapping[str, str], host: SecondHost) -> Iterator[list[RunningEngine]]:
    """`EACH` engines that prefill here, and as many that decode on the second host. `asked`: the environment with which
    those that prefill ask a daemon."""
    options = (
        *("--model", MODEL, "--profile", PROFILE, "--max-num-seqs", str(SEQS), "--max-model-len", str(CONTEXT)),
        *("--kv-blocks", str(KV_TOKENS // 16), "--max-num-batched-tokens", str(CHUNK), "--no-enable-prefix-caching"),
        *("--kv-layers", str(LAYERS), "--kv-token-bytes", str(LAYER_TOKEN_BYTES)),
    )
    logs = folder / "logs"
    with (
        reference_engines(EACH, logs / "prefill", *options, environment=asked, host=host.here) as prefill,
        reference_engines(EACH, logs / "decode", *options, host=host.there, before=host.command) as decode,
    ):
        yield [*prefill, *decode]


def seeded_fleet(urls: Sequence[str], kinds: Sequence[Task], drop_budget: float = 0.0) -> StackFleet:
    classes = [ClassSpec(task.name, task.targets.ttft_s, task.targets.tpot_s) for task in kinds]
    coefficients = load_profile(PROFILE).coefficients._asdict()
    roles = (*["prefill"] * EACH, *["decode"] * EACH)
    return StackFleet(
        MODEL, urls, "reference", SEQS, classes, coefficients, CONTEXT, KV_TOKENS, roles, drop_budget=drop_budget
    )
