"""Rounds of the reconciler over instances of all three provisioners. Needs Django and its database."""

from __future__ import annotations

import contextlib
import resource
import secrets
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from django.test import override_settings

from benchmarks.provision.peers import HOST
from controller.models import Instance, LaunchTemplate, ProvisionerLook, ServedModel
from controller.scale.provisioning import PROCESS, RAY
from controller.services.actors import SYSTEM
from controller.services.fleet.instances import instance_create, instance_register
from workers.provisioners import Observer, sources
from workers.supervisor.engine_processes import DESIRED, STATE
from workers.supervisor.plan import ROOT
from workers.supervisor.ports import free_port, write_json
from workers.tasks.reconcile import reconcile_once

PERIOD_S = 1.0  # of the reconciler
ROUNDS_MAX = 30  # until every instance is ready
AWAY_S = 30.0  # a cluster that hangs is told before this


@contextlib.contextmanager
def peer(kind: str, *told: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """An emulated peer; its URL and its process."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks.provision.peers", kind, str(port), *told]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError(f"the emulated {kind} did not start")
        yield f"http://{HOST}:{port}", process
    finally:
        process.kill()
        process.wait()


def measure(folder: Path, instances: int, looks: int, freezes: int) -> dict[str, Any]:
    """`folder`: DATA_DIR of a worker. `looks`: how many are timed. `freezes`: how often the cluster is stopped.

    Raises RuntimeError if not all instances become ready, or if a frozen cluster changes one.
    """
    (folder / "engines").mkdir(exist_ok=True)
    with peer("endpoints") as (endpoints, _), peer("launchers") as (launchers, _), peer("cluster", launchers) as found:
        url, cluster = found
        with override_settings(RAY_ADDRESS=url, FLEET_TOKEN=secrets.token_hex(16)):
            fill(instances, endpoints)
            started = start(folder, instances)
            began_s = time.process_time()
            timed = [look(folder) for _ in range(looks)]
            spent_s = time.process_time() - began_s
            rounds = [once(folder)[0] for _ in range(looks)]
            stale = [freeze(folder, cluster, instances) for _ in range(freezes)]
    return {
        **started,
        "observe_ms": round(statistics.median(timed) * 1000, 1),
        "observe_max_ms": round(max(timed) * 1000, 1),
        "observe_cpu_ms": round(spent_s / max(looks, 1) * 1000, 1),
        "memory_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "round_ms": round(statistics.median(rounds) * 1000, 1),
        "stale_s": round(max(stale), 2) if stale else None,
        "instances": instances,
    }


def fill(instances: int, endpoints: str) -> None:
    """A third of the instances for each provisioner."""
    model = ServedModel.objects.create(name="provisioned")
    command, spec = ["engine", "--port", "${port}"], {"resources": {"CPU": 1}}
    template = LaunchTemplate.objects.create(
        name="provisioned", backend="vllm", roles=["collocated"], command=command, spec=spec
    )
    for number in range(instances):
        id = f"provisioned-{number}"
        if number % 3 == 0:
            instance_create(actor=SYSTEM, id=id, model=model, provisioner=PROCESS)
        elif number % 3 == 1:
            instance_create(actor=SYSTEM, id=id, model=model, provisioner=RAY, template=template)
        else:
            instance_register(actor=SYSTEM, id=id, model=model, url=f"{endpoints}/{id}", max_num_seqs=8)


def start(folder: Path, instances: int) -> dict[str, Any]:
    """The first round orders all starts; then until all are ready."""
    timed_s, steps = once(folder)
    orders = sum(type(step).__name__ == "CallStart" for step in steps)
    began = time.monotonic()
    for _ in range(ROUNDS_MAX):
        supervise(folder / "engines")
        once(folder)
        if ready() == instances:
            ready_s = round(timed_s + time.monotonic() - began, 1)
            return {"orders": orders, "orders_per_s": round(orders / timed_s, 1), "all_ready_s": ready_s}
    states = list(Instance.objects.exclude(observed_state="ready").values_list("id", "observed_state", "error")[:5])
    raise RuntimeError(f"{ready()} of {instances} instances are ready after {ROUNDS_MAX} rounds; others: {states}")


def once(folder: Path) -> tuple[float, list[Any]]:
    """One whole round, with its transactions; its seconds and steps."""
    began = time.monotonic()
    steps = reconcile_once(sources(folder), time.time(), OBSERVER)
    return time.monotonic() - began, steps


OBSERVER = Observer()


def look(folder: Path) -> float:
    """Seconds of one look at all provisioners, which have their rows already."""
    by_name, began = sources(folder), time.monotonic()
    found = OBSERVER.at(by_name)
    took_s = time.monotonic() - began
    if failed := {name: each.error for name, each in found.items() if each.seen is None}:
        raise RuntimeError(f"provisioners could not be seen: {failed}")
    return took_s


def freeze(folder: Path, cluster: subprocess.Popen[str], instances: int) -> float:
    """Seconds from the moment when the cluster hangs until its row says so. Rounds follow as the beat sends them."""
    cluster.send_signal(signal.SIGSTOP)
    frozen_at = time.monotonic()
    try:
        while not ProvisionerLook.objects.filter(name="ray/default", failing_since__isnull=False).exists():
            if time.monotonic() > frozen_at + AWAY_S:
                raise RuntimeError("the cluster hangs, and nobody says so")
            time.sleep(max(0.0, PERIOD_S - once(folder)[0]))
        told_s = time.monotonic() - frozen_at
        if ready() != instances:
            raise RuntimeError(f"{instances - ready()} instances changed while the cluster did not answer")
    finally:
        cluster.send_signal(signal.SIGCONT)
    while ProvisionerLook.objects.filter(failing_since__isnull=False).exists():
        time.sleep(0.1)
        once(folder)
    return told_s


def ready() -> int:
    return Instance.objects.filter(model__name="provisioned", observed_state="ready").count()


def supervise(engines: Path) -> None:
    """As the supervisor reports the engines that were ordered; none is started."""
    for desired in engines.glob(f"*{DESIRED}"):
        id = desired.name.removesuffix(DESIRED)
        known = engines / f"{id}{STATE}"
        if not known.exists():
            number = int(id.rpartition("-")[2])
            state = {"id": id, "state": "ready", "pid": 1, "url": f"http://{HOST}:{1024 + number}"}
            write_json(known, {**state, "started_at": time.time(), "exit_code": None, "error": ""})
