"""Engines of one process that lend and borrow prefixes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from tests.workers.engine.kv.sides import Side
from workers.engine.kv import prefixes


@pytest.fixture
async def sides(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Side]]:
    monkeypatch.setattr(prefixes, "ASK_S", 30.0)  # a busy machine may answer later than an engine waits
    made: list[Side] = []

    def make(**sizes: int) -> Side:
        made.append(Side(**sizes))
        return made[-1]

    yield make
    for side in made:
        side.stages.close()
