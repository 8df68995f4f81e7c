"""Two real vLLM servers, and a gateway in front of them, started once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

from benchmarks.servers.engines import (
    CONTEXT_TOKENS,
    MAX_NUM_SEQS,
    MODEL_NAME,
    RunningEngine,
    vllm_missing,
    vllm_servers,
)
from benchmarks.servers.stack import ClassSpec, Stack, StackFleet
from tests.faults.system import System, running_system
from tests.vllm.launched import Launched
from workers.supervisor.embedded import EmbeddedPostgres, EmbeddedRedis

CLASSES = (ClassSpec("interactive", 5.0, 0.5), ClassSpec("patient", 120.0, 5.0))


@dataclass(frozen=True)
class Client:
    """Posts to one gateway or engine."""

    url: str
    headers: dict[str, str]

    def post(self, path: str, **body: Any) -> requests.Response:
        streamed = bool(body.get("stream"))
        body = {"model": MODEL_NAME, **body}
        return requests.post(f"{self.url}{path}", json=body, headers=self.headers, stream=streamed, timeout=120)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("vllm")
    for part in (made, made.parent, made.parent.parent):
        part.chmod(0o755)  # PostgreSQL runs as another user when the tests run as root
    return made


@pytest.fixture(scope="session")
def servers(folder: Path) -> Iterator[list[RunningEngine]]:
    if (missing := vllm_missing()) is not None:
        pytest.fail(missing, pytrace=False)
    with vllm_servers(2, folder / "logs") as started:
        yield started


@pytest.fixture(scope="session")
def stack(folder: Path, servers: list[RunningEngine]) -> Iterator[Stack]:
    urls = [server.url for server in servers]
    fleet = StackFleet(MODEL_NAME, urls, "vllm", MAX_NUM_SEQS, CLASSES, None, CONTEXT_TOKENS)
    with Stack(folder / "data", fleet) as made:
        yield made


@pytest.fixture(scope="session")
def client_of(stack: Stack) -> Callable[[RunningEngine], Client]:
    """A client with the tenant's key for a gateway."""

    def make(gateway: RunningEngine) -> Client:
        return Client(gateway.url, {"Authorization": f"Bearer {stack.api_key}"})

    return make


@pytest.fixture(scope="module")
def client(stack: Stack, client_of: Callable[[RunningEngine], Client]) -> Iterator[Client]:
    """Of a gateway with its own default policy set."""
    with stack.gateway() as gateway:
        yield client_of(gateway)


@pytest.fixture(scope="module")
def launched_system(postgres: EmbeddedPostgres, redis_server: EmbeddedRedis) -> Iterator[System]:
    """A system that starts its vLLM servers by itself."""
    if (missing := vllm_missing()) is not None:
        pytest.fail(missing, pytrace=False)
    with running_system(postgres.url, redis_server.url) as made:
        yield made


@pytest.fixture
def launched(launched_system: System) -> Iterator[Callable[[str, int], Launched]]:
    """Makes models of the test's own in that system: a name, and how many requests at a time each server takes."""
    made: list[Launched] = []

    def make(model: str, slots: int) -> Launched:
        made.append(Launched(launched_system, launched_system.sign_in(), model, slots))
        return made[-1]

    yield make
    for each in made:
        each.end()
