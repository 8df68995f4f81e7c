"""How the real servers of tests and benchmarks are placed: a measurement depends on it (decision 114)."""

from __future__ import annotations

import os

import psutil
import pytest

from benchmarks.servers.engines import RunningEngine

pytestmark = pytest.mark.vllm


def test_each_server_keeps_to_a_core_of_its_own(servers: list[RunningEngine]) -> None:
    cores = sorted(os.sched_getaffinity(0))
    for index, server in enumerate(servers):
        process = psutil.Process(server.pid)
        family = [process, *process.children(recursive=True)]
        assert {core for member in family for core in member.cpu_affinity() or ()} == {cores[index % len(cores)]}


def test_the_model_runs_within_the_engine_and_no_one_waits_for_a_worker(servers: list[RunningEngine]) -> None:
    for server in servers:
        names = [child.name() for child in psutil.Process(server.pid).children(recursive=True)]
        assert any(name.startswith("VLLM::Engine") for name in names), names
        assert not any(name.startswith("VLLM::Worker") for name in names), names
