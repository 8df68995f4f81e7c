"""One cluster of a head and two nodes, and one system that uses it, for all tests of this folder."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator

import pytest

from tests.faults.system import System, running_system
from tests.ray.cluster import Cluster, ray_missing
from tests.ray.fleet import Fleet
from workers.supervisor.embedded import EmbeddedPostgres, EmbeddedRedis

NODES = ("127.0.0.2", "127.0.0.3")
WEST = "127.0.0.9"  # head, and only node, of the cluster `west`
DEVICES = 2  # of each node


@pytest.fixture(scope="session")
def cluster(figures: dict[str, object]) -> Iterator[Cluster]:
    if (missing := ray_missing()) is not None:
        pytest.fail(missing, pytrace=False)
    made, began = Cluster(), time.monotonic()
    try:
        made.start()
        for address in NODES:
            made.add(address, DEVICES)
        made.runs_jobs()
        figures["cluster_up_s"] = round(time.monotonic() - began, 1)
        yield made
    finally:
        left = [each.cmdline()[:3] for each in made.left()]
        made.stop()
        shutil.rmtree(made.folder, ignore_errors=True)
    assert left == [], "its jobs left processes"


@pytest.fixture(scope="session")
def west(cluster: Cluster) -> Iterator[Cluster]:
    """A second cluster, which is not started: away until a test has it join."""
    made = Cluster(WEST)
    try:
        yield made
    finally:
        left = [each.cmdline()[:3] for each in made.left()]
        made.stop()
        shutil.rmtree(made.folder, ignore_errors=True)
    assert left == [], "its jobs left processes"


@pytest.fixture(scope="session")
def system(
    cluster: Cluster, west: Cluster, postgres: EmbeddedPostgres, redis_server: EmbeddedRedis
) -> Iterator[System]:
    addresses = {"RAY_ADDRESS": f"{cluster.url}, west={west.url}"}
    with running_system(postgres.url, redis_server.url, addresses) as made:
        yield made


@pytest.fixture(scope="module")
def fleet(system: System, cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """A model of the module's own, without engines at first and at the end."""
    made = Fleet(system, cluster, request.module.__name__.rpartition(".")[2].replace("_", "-"))
    yield made
    made.end()
