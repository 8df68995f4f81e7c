"""Processor time of processes with their children, such as PostgreSQL and its backends."""

from __future__ import annotations

import time
from collections.abc import Mapping

import psutil


def cpu_s(process: psutil.Process) -> float:
    """User and system time of one process, seconds, all threads."""
    times = process.cpu_times()
    return float(times.user + times.system)


class ProcessorShare:
    """Processor time by name between construction and `read`, as a share of one core.

    A child counts from its start; what a child used that ended in between counts where its parent waited for it.
    """

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        self._before = {name: _family_s(process) for name, process in self._processes.items()}
        self._at = time.perf_counter()

    def read(self) -> dict[str, float]:
        elapsed_s = time.perf_counter() - self._at
        used = {name: _family_s(process) - self._before[name] for name, process in self._processes.items()}
        return {name: round(max(0.0, of) / elapsed_s, 4) for name, of in used.items()}


def _family_s(process: psutil.Process) -> float:
    """The time of a process, its ended children and its running descendants."""
    total = 0.0
    for member in [process, *process.children(recursive=True)]:
        try:
            times = member.cpu_times()
        except psutil.NoSuchProcess:
            continue  # it ended meanwhile
        total += times.user + times.system + times.children_user + times.children_system
    return float(total)
