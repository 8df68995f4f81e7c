"""How long a request waits for a free slot, from what its client asks to the answer or the error that it gets."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from controller.core.snapshot import ClassConfig
from controller.core.types import InstanceSpec
from tests.api.openai.gateways import TestBed, completion, snapshot
from workers.backends.fake import Script

WAITING_S = 0.2  # of the class
CHAT = ClassConfig("chat", None, 0.1, 1.0, None, WAITING_S, 0.95, 1.0)
ONE_SLOT = (InstanceSpec("e1", "demo", backend="fake", max_num_seqs=1),)
BUSY_S = 5 * WAITING_S  # the slot is taken for so long


@pytest.mark.parametrize(
    ("asked", "status"),
    [
        ({"target_ttft": 20}, 200),
        ({}, 504),
        ({"target_tbt": 2}, 504),
        ({"target_ttft": 20, "waiting_time": WAITING_S}, 504),
        ({"target_ttft": 20, "deadline": 20}, 200),
    ],
    ids=["ttft", "class", "tpot", "waiting_time", "deadline"],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_waits_as_long_as_the_first_token_that_it_asks_for_may_take(asked, status, stream):
    """An error before that would come although the promise can still be kept. What it says itself counts first."""
    async with TestBed(replace(snapshot(classes=(CHAT,)), instances=ONE_SLOT)) as bed:
        bed.backend("e1", Script(first_delay_s=BUSY_S), Script())
        running = bed.send(completion(target_ttft=20))
        await asyncio.sleep(0.05)
        waiting = bed.send(completion(stream=stream, **asked))
        answer = await waiting.done()
        assert answer.status == status, answer.body
        if status == 504:
            assert answer.error["code"] == "waiting_time_exceeded"
            assert not running.task.done(), "its slot was taken all the time"
        assert (await running.done()).status == 200
        outcomes = [record.outcome for record in bed.sink.records]
        assert sorted(outcomes) == sorted(["ok", "ok" if status == 200 else "expired"])
