"""How long a transfer was held, on the loop of an engine, whose clock counts whole milliseconds and stands still while
it runs what is ready."""

from __future__ import annotations

import asyncio

import pytest

from workers.flowd.client import Flow, FlowClient

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])


async def test_less_than_a_millisecond_of_holding_counts() -> None:
    flow = Flow(FlowClient("/nowhere"), "f", 1.0)
    turn = asyncio.ensure_future(flow.turn(nothing))
    await asyncio.sleep(0)
    flow.permitted(False, 3, 2)
    flow.permitted(True, 3, 2)
    await turn
    assert flow.held_s > 0.0


async def nothing() -> None:
    """For `still`."""
