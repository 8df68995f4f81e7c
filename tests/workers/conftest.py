from __future__ import annotations

from collections.abc import Iterator

import pytest

from controller.models import Instance
from tests import factories
from tests.workers.sleeping_vllm import SleepingVllm
from workers import actions, links, sleep_client, sleeping
from workers.asking import Asker


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at engines wait for every answer, however slow the test's machine."""
    for module in (actions, links):
        monkeypatch.setattr(module, "ASKER", Asker(patience_s=60.0))
        monkeypatch.setattr(module, "ASK_S", 60.0)
    monkeypatch.setattr(actions, "BUDGET_S", 60.0)
    monkeypatch.setattr(links, "TELLER", Asker(patience_s=60.0))
    monkeypatch.setattr(links, "KNOWN", {})


@pytest.fixture
def no_settling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gateways have heard of a sleep at once, and an engine that did nothing is told again at once."""
    monkeypatch.setattr(sleeping, "SETTLE_S", 0.0)
    monkeypatch.setattr(sleeping, "ANSWER_S", 0.0)
    for module, name in ((sleeping, "LOOK_S"), (sleep_client, "CALL_S")):  # however slow the test's machine
        monkeypatch.setattr(module, name, 60.0)


@pytest.fixture
def vllm() -> Iterator[SleepingVllm]:
    with SleepingVllm() as fake:
        yield fake


@pytest.fixture
def row(vllm: SleepingVllm) -> Instance:
    """That vLLM as the fleet knows it."""
    return factories.instance(id="v1", backend="vllm", provisioner="static", url=vllm.url)
