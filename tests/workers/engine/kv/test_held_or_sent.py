"""What two engines tell a transfer daemon of a copy between them: when it is due, and a shortage of memory."""

from __future__ import annotations

import asyncio
from array import array

import pytest

from controller.core.steps import Reserve
from tests.workers.engine.kv.sides import PROMPT, Side
from tests.workers.flowd.running import connected, sending, serving
from workers.engine.kv.lender import tokens_as_bytes
from workers.engine.kv.transfer import KvTraffic

COPIED = 320  # tokens of the prompt, 20 blocks


@pytest.mark.parametrize(
    ("due_in_s", "short_at", "sent"),
    [(60.0, "", False), (5.0, "", True), (60.0, "source", True), (60.0, "target", True)],
)
async def test_it_is_sent_first_if_it_is_due_first_or_an_end_is_short_of_memory(path, due_in_s, short_at, sent):
    """The other transfer is due in 30 s. What is held keeps blocks at both ends, so that memory would run out."""
    async with (
        serving(path, "earliest_deadline"),
        connected(path) as client,
        connected(path) as other,
        sending(other, due_in_s=30.0),
    ):
        source, target = Side(flows=client, kv_blocks=32), Side(kv_blocks=32)
        if short_at:
            full = source if short_at == "source" else target
            full.engine.handle(Reserve(full.seq(list(range(1000, 1160)))))  # 10 blocks more
        source.computes(PROMPT)
        await target.link_to(source)
        (link,) = target.stages.links.up()
        connection, _ = await link.take()
        prefix = target.seq(PROMPT[:COPIED])
        prefix.due = target.engine.now() + due_in_s
        assert target.engine.borrow(prefix)
        about = {"unit": "mine", "batch": "r", **target.stages._about(prefix)}
        prompt = tokens_as_bytes(array("q", PROMPT))
        copying = asyncio.ensure_future(connection.borrow(prefix, prompt, target.store, KvTraffic(), about))
        done, _ = await asyncio.wait({copying}, timeout=10.0 if sent else 1.0)
        assert bool(done) is sent
        copying.cancel()
        await asyncio.gather(copying, return_exceptions=True)
        connection.close()
        for side in (source, target):
            side.stages.close()
