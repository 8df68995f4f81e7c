"""A real Ray cluster on this machine: a head on which no engine runs, and nodes on loopback addresses of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import requests

from benchmarks.servers.engines import VLLM_HOME
from tests.waiting import until
from workers.supervisor.plan import ROOT
from workers.supervisor.ports import free_port

START_S = 120.0  # Ray's first start reads hundreds of files
HEAD = "127.0.0.1"
MARK = "RAY_CLUSTER_OF_TESTS"  # by which its processes, and those of its jobs, are found


def ray_missing() -> str | None:
    """Why there is no Ray to start; None if there is one."""
    program = _program()
    return None if program.exists() else f"no {program}: run `make test-ray`, which installs it"


class Cluster:
    """`address`: of its head. `nodes`: the process of `ray start --block` of each node that was added, by address."""

    def __init__(self, address: str = HEAD) -> None:
        self.address = address
        self.folder = Path(tempfile.mkdtemp(prefix="ray-"))  # short: Ray's sockets lie in it
        self.gcs, self.dashboard = free_port(), free_port()
        self.url = f"http://{address}:{self.dashboard}"
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.head: subprocess.Popen[bytes] | None = None

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self, devices: int = 0) -> None:
        """The head. Without devices it has no CPUs either, so that jobs go to nodes."""
        ports = (f"--port={self.gcs}", f"--dashboard-port={self.dashboard}", f"--ray-client-server-port={free_port()}")
        has = ("--num-cpus=4", f"--resources={json.dumps({'device': devices})}") if devices else ("--num-cpus=0",)
        self.head = self._ray(
            self.address, "--head", *ports, f"--dashboard-host={self.address}", *has, f"--temp-dir={self.folder / 'r'}"
        )
        self._waits_for(self.address, self.head)

    def add(self, address: str, devices: int) -> float:
        """A node; seconds until the cluster knew it. Jobs take its resource `device`."""
        began = time.monotonic()
        of_node = (
            f"--address={self.address}:{self.gcs}",
            "--num-cpus=4",
            f"--resources={json.dumps({'device': devices})}",
        )
        self.nodes[address] = self._ray(address, *of_node)
        self._waits_for(address, self.nodes[address])
        return time.monotonic() - began

    def runs_jobs(self) -> None:
        """Waits until a first job has run, so that a cluster that runs none is told at once."""
        body = {"submission_id": "first-of-all", "entrypoint": "true", "entrypoint_resources": {"device": 1}}
        answer = requests.post(f"{self.url}/api/jobs/", json=body, timeout=START_S)
        assert answer.status_code == 200, answer.text

        def ran() -> bool:
            state = self.jobs()["first-of-all"]
            assert state not in ("FAILED", "STOPPED"), f"the first job {state.lower()}:\n{self.report()}"
            return state == "SUCCEEDED"

        until(ran, START_S, every_s=0.2, what=self.report)

    def stop(self) -> None:
        """Everything of it ends, also jobs that were left. A stopped process does not end before it goes on."""
        for each in self._processes():
            each.kill()
        for process in (self.head, *self.nodes.values()):
            if process is not None:
                process.wait(20)

    def left(self) -> list[psutil.Process]:
        """What was started by its jobs and still runs."""
        return [each for each in self._processes() if "SLACKLINE_ORDER" in _environment(each)]

    # -- faults ----------------------------------------------------------------------------------------------------

    def kill_raylet(self, address: str) -> None:
        """SIGKILL to the process that is the node for Ray. What the node's jobs started goes on."""
        children = psutil.Process(self.nodes[address].pid).children(recursive=True)
        [raylet] = [each for each in children if Path(each.cmdline()[0]).name == "raylet"]
        raylet.kill()

    def freeze_head(self) -> None:
        """All its processes are stopped: connections are accepted, and nobody answers."""
        for each in self._of_head():
            each.send_signal(signal.SIGSTOP)

    def thaw_head(self) -> None:
        for each in self._of_head():
            each.send_signal(signal.SIGCONT)

    # -- what it says ----------------------------------------------------------------------------------------------

    def alive(self) -> list[str]:
        """Addresses of its nodes, sorted; the head's is the one that other machines know."""
        return sorted(each["node_ip"] for each in self._listed() if each["state"] == "ALIVE")

    def jobs(self) -> dict[str, str]:
        """States by id."""
        listed = requests.get(f"{self.url}/api/jobs/", timeout=10).json()
        return {each["submission_id"]: each["status"] for each in listed}

    def report(self) -> str:
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"-- {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)

    # --------------------------------------------------------------------------------------------------------------

    def _ray(self, address: str, *options: str) -> subprocess.Popen[bytes]:
        env = {
            name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
        }
        # Launchers run the first `python3`, which must be 3.9 or newer, and find `vllm` in the last folder.
        folders = (str(Path(sys.executable).parent), os.environ["PATH"], str(VLLM_HOME / "bin"))
        env |= {"PATH": os.pathsep.join(folders), MARK: str(self.folder)}
        # Agents of all nodes would listen at one port, and a head whose agent cannot listen runs no jobs.
        usual = (
            "--disable-usage-stats",
            f"--node-ip-address={address}",
            f"--dashboard-agent-listen-port={free_port()}",
        )
        return subprocess.Popen(
            [_program(), "start", "--block", *usual, *options],
            env={**env, "RAY_raylet_start_wait_time_s": f"{START_S:g}"},
            cwd=self.folder,
            stdout=(self.folder / f"{address}.log").open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def _waits_for(self, address: str, process: subprocess.Popen[bytes]) -> None:
        def joined() -> bool:
            assert process.poll() is None, f"the node {address} ended by itself:\n{self.report()}"
            try:
                alive = self.alive()
                return bool(alive) if address == self.address else address in alive
            except (requests.RequestException, KeyError, TypeError, ValueError):
                return False

        until(joined, START_S, every_s=0.2, what=self.report)

    def _listed(self) -> list[dict[str, Any]]:
        said = requests.get(f"{self.url}/api/v0/nodes?detail=1", timeout=10).json()
        return said["data"]["result"]["result"]

    def _of_head(self) -> list[psutil.Process]:
        assert self.head is not None
        parent = psutil.Process(self.head.pid)
        return [parent, *parent.children(recursive=True)]

    def _processes(self) -> list[psutil.Process]:
        return [each for each in psutil.process_iter() if _environment(each).get(MARK) == str(self.folder)]


def _program() -> Path:
    return Path(os.environ.get("RAY_VENV") or ROOT / ".ray") / "bin" / "ray"


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return {} if process.status() == psutil.STATUS_ZOMBIE else process.environ()
    except psutil.Error:
        return {}
