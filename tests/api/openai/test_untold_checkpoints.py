"""Checkpoints that Redis has not taken: told in turn, so that others have its connections."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace

import pytest

from api.openai import forks
from api.openai.forks import Forks
from workers.live import LiveUnavailable


class Board:
    """Redis, which takes `call_s` for each call and is away at first. `most`: calls at the same time."""

    def __init__(self, call_s=0.0):
        self.call_s, self.away = call_s, True
        self.calls = self.open = self.most = 0
        self.told = []

    async def run(self, dialogue):
        command = next(dialogue)
        self.calls, self.open = self.calls + 1, self.open + 1
        self.most = max(self.most, self.open)
        try:
            await asyncio.sleep(self.call_s)
            if self.away:
                raise LiveUnavailable("away")
            self.told.append(command[5])  # the step
        finally:
            self.open -= 1


class Bed:
    def __init__(self, board):
        self.tasks = []
        backends = {"e1": SimpleNamespace(capabilities=SimpleNamespace(checkpoints=True))}
        self.forks = Forks(backends, None, lambda work: self.tasks.append(asyncio.ensure_future(work)))
        self.forks.board = self.board = board

    def ended(self, key, lease_s=60.0):
        self.forks.ended(
            SimpleNamespace(
                instance="e1",
                step=SimpleNamespace(workflow="w1", key=key),
                request=SimpleNamespace(id=f"r-{key}", tenant="acme"),
                prompt_tokens=9,
                output_tokens=2,
                checkpoint_s=lease_s,
            )
        )

    async def done(self):
        async with asyncio.timeout(10):
            while not all(task.done() for task in self.tasks):
                await asyncio.sleep(0.01)
        for task in self.tasks:
            task.result()


@pytest.fixture(autouse=True)
def often(monkeypatch, caplog):
    monkeypatch.setattr(forks, "AGAIN_S", 0.02)
    caplog.set_level(logging.INFO, logger=forks.__name__)


async def test_they_are_told_one_after_the_other_and_logged_once(caplog):
    bed = Bed(Board())
    for number in range(200):
        bed.ended(f"s{number}")
    await asyncio.sleep(0.1)
    bed.board.calls = bed.board.most = 0
    await asyncio.sleep(0.3)
    assert bed.board.most == 1
    assert 2 <= bed.board.calls <= 15, "one a round"
    assert len(caplog.messages) == 1
    bed.board.away = False
    await bed.done()
    assert len(bed.board.told) == len(set(bed.board.told)) == 200
    assert bed.board.most == 1
    assert len(caplog.messages) == 2
    assert not bed.forks._untold


async def test_many_that_are_answered_while_redis_hangs_leave_it_to_others(monkeypatch):
    monkeypatch.setattr(forks, "MOST_UNTOLD", 100)
    bed = Bed(Board(call_s=0.1))
    for number in range(200):
        bed.ended(f"s{number}")
    await asyncio.sleep(0.3)
    assert bed.board.most <= forks.AT_ONCE + 1
    bed.board.away, bed.board.call_s = False, 0.0
    await bed.done()
    assert len(bed.board.told) == 100


async def test_one_whose_lease_is_over_is_given_up_behind_others_that_redis_does_not_take():
    bed = Bed(Board())
    bed.ended("long")
    bed.ended("short", lease_s=0.1)
    told = bed.forks._untold["acme", "w1", "short"].told
    await asyncio.wait_for(told.wait(), 1)
    assert [name[2] for name in bed.forks._untold] == ["long"]
    bed.board.away = False
    await bed.done()
    assert len(bed.board.told) == 1


async def test_the_newest_of_a_step_is_told_and_who_waits_for_an_older_one_waits_for_it():
    bed = Bed(Board())
    bed.ended("plan")
    waits = bed.forks._untold["acme", "w1", "plan"].told
    await asyncio.sleep(0.05)
    bed.ended("plan", lease_s=30.0)
    await asyncio.sleep(0.05)
    assert not waits.is_set()
    bed.board.away = False
    await bed.done()
    assert waits.is_set()
    assert len(bed.board.told) == 1
