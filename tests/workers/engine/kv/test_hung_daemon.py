"""A transfer daemon that hangs while a prefix is copied: nobody waits for it for long, and the engine says what became
of the copy."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import Any

import pytest

from controller.flow.flows import FlowStage
from tests.waiting import until_on_loop
from tests.workers.engine.kv.sides import LAYERS, PROMPT, TOKEN_BYTES, Side, measured
from tests.workers.flowd.running import WAIT_S, connected, sending
from tests.workers.flowd.test_daemon import Process, Raw
from workers.engine.kv.turns import Turns
from workers.flowd.client import SILENCE_S

COPIED = 320  # tokens of the prompt, 20 blocks


@pytest.fixture
def between_layers(monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Event, asyncio.Event]:
    """The first layer was sent; the source may go on."""
    sent, go = asyncio.Event(), asyncio.Event()
    ask = Turns.next

    async def asked_when_told(self: Turns, gone: Callable[[], bool], layer: int | None = None) -> Any:
        if layer == 1:
            sent.set()
            await go.wait()
        return await ask(self, gone, layer)

    monkeypatch.setattr(Turns, "next", asked_when_told)
    return sent, go


@pytest.mark.parametrize("patient", [True, False], ids=["goes_on", "is_given_up"])
async def test_a_daemon_that_hangs_in_mid_copy_holds_nobody_for_long(path, between_layers, patient) -> None:
    """A layer has come and the next one is held for a more urgent transfer when the daemon hangs. Then the copy goes on
    unscheduled, unless computing all of it takes less than to find that out."""
    sent, go = between_layers
    with Process(path) as daemon:
        async with connected(path) as client, connected(path) as other:
            source, target = Side(flows=client), Side()
            source.computes(PROMPT)
            target.stages.links.me = "q"  # an engine without a name announces no copies
            await target.link_to(source)
            if not patient:
                measured(target, bandwidth=1e12, token_s=0.001)
            seq = target.seq(PROMPT)
            fetching = asyncio.ensure_future(target.stages.prefixes.fetch(seq))
            async with asyncio.timeout(WAIT_S):
                await sent.wait()
            asking = await Raw.open(path)

            async def held() -> bool:
                flows = (await asking.asked(op="status"))["flows"]
                return any(each["stage"] == FlowStage.REUSE and each["go"] is False for each in flows)

            async with sending(other, due_in_s=0.5):
                await until_on_loop(held)
                daemon.signal(signal.SIGSTOP)
                assert not fetching.done()
                go.set()
                async with asyncio.timeout(SILENCE_S + 3.0):
                    await fetching
            borrowed = target.stages.prefixes.borrowed(seq)
            assert borrowed is not None
            assert borrowed.source == "p0"
            moved = borrowed.moved
            if patient:
                assert (moved.reason, moved.flow, moved.tokens) == ("", "silent", COPIED)
                assert moved.bytes == COPIED * LAYERS * TOKEN_BYTES
                assert 0.5 < moved.held_s < moved.seconds
                assert (target.cached(PROMPT), target.lost) == (COPIED, 0)
            else:
                assert (moved.reason, moved.layers) == ("timeout", 1)
                assert (target.cached(PROMPT), target.lost) == (0, 1)
                assert target.is_free(), "so that the prompt can be computed"
            await until_on_loop(lambda: not client._flows)
            for side in (source, target):
                side.stages.close()
