"""The transfer daemon pauses between steps that are long for good, and makes nobody wait for one that was long once."""

from __future__ import annotations

import itertools

import pytest

from tests.workers.flowd.running import MB, WAIT_S, connected, nothing, serving
from workers.flowd import daemon as flow_daemon
from workers.flowd.pauses import LONG_STEP_S, LONG_STEPS, STEP_PAUSES, StepPauses

SHORT_S, LONG_S = LONG_STEP_S / 2, LONG_STEP_S * 3


@pytest.mark.parametrize(
    ("steps_s", "pause_s"),
    [
        ([LONG_S], 0.0),
        ([SHORT_S] * 9 + [LONG_S] * (LONG_STEPS - 1), 0.0),
        ([SHORT_S] * 9 + [LONG_S] * LONG_STEPS, STEP_PAUSES * LONG_S),
        ([LONG_S] * 9, STEP_PAUSES * LONG_S),
        ([LONG_S] * 9 + [100 * LONG_S], STEP_PAUSES * LONG_S),
        ([LONG_S] * 9 + [SHORT_S], 0.0),
        ([SHORT_S] * 9, 0.0),
    ],
)
def test_only_steps_that_stay_long_make_a_pause(steps_s, pause_s):
    pauses = StepPauses()
    assert [pauses.after(step_s) for step_s in steps_s][-1] == pause_s


async def test_a_step_that_was_long_once_holds_up_no_permit(path, monkeypatch):
    """The processor time of the first step counts as 1,000 s."""
    clock = itertools.chain([0.0], itertools.repeat(1000.0))
    async with serving(path), connected(path) as client:
        monkeypatch.setattr(flow_daemon.time, "thread_time", lambda: next(clock))
        for _ in range(3):
            flow = client.submit(3, MB, "host", WAIT_S)
            await flow.turn(nothing)
            assert flow.scheduled, flow.reason
            flow.end()
