"""How urgent a transfer is by what its client says of it: the layer that waits for it, and a target that has passed."""

from __future__ import annotations

import asyncio

import pytest

from tests.waiting import until_on_loop
from tests.workers.flowd.running import MB, connected, nothing, serving
from workers.flowd.client import SCHEDULED

REUSE, COLLECTIVE, KV = 1, 2, 3


async def test_what_an_earlier_layer_needs_goes_first(path):
    async with serving(path), connected(path) as client:
        client.layer("b", 0)
        later = client.submit(REUSE, 100 * MB, "host", None, "r", "b", layer=5)
        await later.turn(nothing)
        sooner = client.submit(REUSE, 100 * MB, "host", None, "r", "b", layer=1)
        await until_on_loop(lambda: sooner.may_send and not later.may_send)
        assert sooner.level < later.level
        sooner.end()
        await until_on_loop(lambda: later.may_send)


async def test_a_copy_lets_a_layer_go_first_that_is_needed_sooner_than_its_next_one(path):
    async with serving(path), connected(path) as client:
        client.layer("b", 0, "there")
        copy = client.submit(REUSE, 100 * MB, "host", None, "r", "b", unit="there")
        await copy.turn(nothing)
        rival = client.submit(REUSE, 100 * MB, "host", None, "q", "c", layer=1)
        await until_on_loop(lambda: rival.level)
        assert (copy.may_send, rival.may_send) == (True, False)
        copy.needed_by(5)
        await until_on_loop(lambda: rival.may_send and not copy.may_send)
        client.layer("b", 5, "there")  # where its prompt has come to: the layer stalls it
        await until_on_loop(lambda: copy.may_send and not rival.may_send)
        client.computed("b", "there")


async def test_bytes_that_follow_make_a_transfer_more_urgent(path):
    levels = []
    for later in (0.0, 190.0 * MB):
        async with serving(path), connected(path) as client:
            client.layer("b", 0)
            flow = client.submit(KV, 10 * MB, "host", 4.0, "r", "b", layer=0, later=later)
            await until_on_loop(lambda flow=flow: flow.level)
            levels.append(flow.level)
    assert levels[1] == 1 < levels[0], "200 MiB over 100 MiB/s in 4 s are half of the link"


async def test_what_a_layer_needs_has_no_deadline_of_its_own(path):
    """Due in 30 s, as a transfer without a target is, it would go before one that is due in 60 s."""
    async with serving(path, "earliest_deadline"), connected(path) as client:
        needed = client.submit(COLLECTIVE, 100 * MB, "host", None, "r", "b", layer=2)
        await needed.turn(nothing)
        transfer = client.submit(KV, 100 * MB, "host", 60.0, "r")
        await until_on_loop(lambda: transfer.may_send and not needed.may_send)
        assert (transfer.reason, needed.reason) == (SCHEDULED, SCHEDULED), "the daemon chose it, and is still there"


@pytest.mark.parametrize("due_in_s", [-5.0, 0.0])
async def test_a_transfer_that_is_late_already_goes_after_one_that_can_be_in_time(path, due_in_s):
    async with serving(path), connected(path) as client:
        late = client.submit(KV, 20 * MB, "host", due_in_s, "late")
        await late.turn(nothing)
        timely = client.submit(KV, 100 * MB, "host", 60.0, "timely")
        await until_on_loop(lambda: timely.may_send and not late.may_send)
        assert (late.reason, timely.level < late.level) == (SCHEDULED, True)
        await asyncio.sleep(1.0)  # in which its bytes could have gone, but did not
        assert (timely.may_send, late.may_send, late.promotions) == (True, False, 0)
        timely.end()
        await until_on_loop(lambda: late.may_send)
        late.end()
