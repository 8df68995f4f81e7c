"""One running system for all faults, over PostgreSQL and Redis that the tests may stop and hang."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.faults.system import System
from workers.supervisor.embedded import EmbeddedPostgres, EmbeddedRedis


@pytest.fixture(scope="session")
def running(postgres: EmbeddedPostgres, redis_server: EmbeddedRedis) -> Iterator[System]:
    system = System(postgres.url, redis_server.url)
    try:
        system.up()
        system.hurry_scaler()
        yield system
    finally:
        system.stop()
        left = system.processes()
        for process in left:
            process.kill()
        shutil.rmtree(system.folder, ignore_errors=True)
    assert left == [], "processes left behind"


@pytest.fixture
def system(running: System) -> System:
    """Two ready engines and every component well: what the fault before left is over."""
    running.until(running.steady, within_s=90.0)
    return running


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest):
    """Prints a figure that was seen, also when the test passes."""

    def show(**figures: object) -> None:
        with capsys.disabled():
            print(f"\n  {request.node.name}: " + ", ".join(f"{name} {value}" for name, value in figures.items()))

    return show
