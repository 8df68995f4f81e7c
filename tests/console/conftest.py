"""People of each role, signed in, and live state that a test sets instead of Redis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.test import Client

from console.views import overview, scaling
from console.views.fleet import instances
from console.views.traffic import flows, pruning, workflows
from console.warm_up import warm
from tests import factories
from workers import live


@pytest.fixture
def signed_in(db: Any) -> Callable[[str], Client]:
    """`signed_in("viewer")`: a browser of somebody with that role ("" for none)."""

    def sign_in(role: str) -> Client:
        client = Client(enforce_csrf_checks=False)
        client.force_login(factories.user(role))
        return client

    return sign_in


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry each time that gateways are told of a new configuration by a page with a form."""
    notices: list[int] = []
    monkeypatch.setattr("console.views.editing.announce_config", lambda: notices.append(1))
    return notices


@pytest.fixture
def viewer(signed_in: Callable[[str], Client]) -> Client:
    return signed_in("viewer")


@pytest.fixture
def operator(signed_in: Callable[[str], Client]) -> Client:
    return signed_in("operator")


@pytest.fixture
def admin(signed_in: Callable[[str], Client]) -> Client:
    return signed_in("admin")


@pytest.fixture(scope="session", autouse=True)
def warmed() -> None:
    """As at the console's start: on a busy machine a first request may take longer than live data stay fresh."""
    warm()


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test has its own figures: none of another test's."""
    for kept in (
        overview.POLLED,
        instances.POLLED,
        flows.POLLED,
        flows.UNSCHEDULED,
        flows.LOADS_UNSCHEDULED,
        pruning.LATELY,
        workflows.READ,
        *scaling.POLLED.values(),
    ):
        monkeypatch.setattr(kept, "kept_s", 0.0)


class LiveStore:
    """What gateways would have published; `away` makes every call fail as it does without Redis."""

    def __init__(self) -> None:
        self.fleets: list[Any] = []
        self.queues: list[Any] = []
        self.host_flows: list[Any] = []
        self.answers: list[Any] = []
        self.asked = 0
        self.watched: list[str] = []
        self.commands: list[tuple[str, str, list[str]]] = []
        self.answer: Callable[[list[str]], list[Any]] | None = None  # of a command, where `answers` is not enough
        self.silent = 0  # gateways that hear a command and say nothing
        self.away = False

    def check(self) -> None:
        if self.away:
            raise live.LiveUnavailable("Redis is unavailable: test")

    def read_fleet(self) -> list[Any]:
        self.check()
        return list(self.fleets)

    def read_host_flows(self) -> list[Any]:
        self.check()
        return list(self.host_flows)

    async def aread_fleet(self) -> list[Any]:
        return self.read_fleet()

    async def aread_queue(self) -> list[Any]:
        return self.read_queue()

    def read_queue(self) -> list[Any]:
        self.check()
        return list(self.queues)

    def ask_queue(self) -> int:
        self.check()
        self.asked += 1
        return self.asked

    async def aask_queue(self) -> int:
        self.check()
        self.asked += 1
        return self.asked

    async def amark_watched(self, topic: str) -> None:
        self.check()
        self.watched.append(topic)

    def send_command(self, actor: str, kind: str, ids: list[str], **rest: Any) -> live.Answers:
        self.check()
        self.commands.append((actor, kind, ids))
        answers = live.Answers(self.answers if self.answer is None else self.answer(ids))
        answers.silent = self.silent
        return answers


@pytest.fixture
def live_store(monkeypatch: pytest.MonkeyPatch) -> LiveStore:
    store = LiveStore()
    reads = ("read_fleet", "aread_fleet", "read_queue", "aread_queue", "ask_queue", "aask_queue", "read_host_flows")
    for name in (*reads, "amark_watched", "send_command"):
        monkeypatch.setattr(live, name, getattr(store, name))
    return store
