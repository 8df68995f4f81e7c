"""Two real vLLM servers, profiled, with PostgreSQL and Redis: used by bench-vllm and fidelity."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.load.workloads import Task
from benchmarks.servers.engines import CONTEXT_TOKENS, MAX_NUM_SEQS, MODEL_NAME, vllm_servers
from benchmarks.servers.stack import ClassSpec, Stack, StackFleet
from benchmarks.vllm.profiled import Profiled, profile_vllm

# Load generator and gateway have precedence: in production they share no core with the servers.
CLIENT_ABOVE = 8


@contextlib.contextmanager
def vllm_pair(
    tasks: Sequence[Task], kept_profile: Path, quick: bool, waiting_time_s: float | None, resume: bool = False
) -> Iterator[tuple[Stack, Profiled]]:
    """One class per task, with this waiting time (None: Slackline's default). `quick`, `resume`: as in `profile_vllm`.
    Raises EngineFailed.
    """
    with tempfile.TemporaryDirectory(prefix="slackline-vllm-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # PostgreSQL runs as another user
        with vllm_servers(2, folder / "logs") as servers:
            urls = [server.url for server in servers]
            profiled = profile_vllm(urls, kept_profile, quick, resume)
            classes = [ClassSpec(t.name, t.targets.ttft_s, t.targets.tpot_s, waiting_time_s) for t in tasks]
            fleet = StackFleet(
                MODEL_NAME, urls, "vllm", MAX_NUM_SEQS, classes, profiled.coefficients, CONTEXT_TOKENS,
                profiled.kv_capacity_tokens,
            )  # fmt: skip
            with Stack(folder / "data", fleet) as stack:
                yield stack, profiled
