"""One running system for all faults, over PostgreSQL and Redis that the tests may stop and hang."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.faults.system import System, running_system
from workers.supervisor.embedded import EmbeddedPostgres, EmbeddedRedis


@pytest.fixture(scope="session")
def running(postgres: EmbeddedPostgres, redis_server: EmbeddedRedis) -> Iterator[System]:
    with running_system(postgres.url, redis_server.url) as system:
        system.hurry_scaler()
        yield system


@pytest.fixture
def system(running: System) -> System:
    """Two ready engines and every component well: what the fault before left is over."""
    running.until(running.steady, within_s=90.0)
    return running


@pytest.fixture
def say(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Keeps figures that were seen; they are printed at the end, also when the test passes."""

    def keep(**figures: object) -> None:
        line = f"{request.node.name}: " + ", ".join(f"{name} {value}" for name, value in figures.items())
        request.node.user_properties.append(("seen", line))

    return keep
