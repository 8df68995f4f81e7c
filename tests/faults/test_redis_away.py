"""Redis stopped, and hanging, for 20 s under load."""

import signal
import time
from functools import partial

import psutil
import pytest

from tests.faults.outage import check, hanging, outage, stopped

pytestmark = [pytest.mark.db, pytest.mark.slow]


@pytest.mark.parametrize("fault", [stopped, hanging], ids=["stopped", "hanging"])
def test_the_data_path_does_not_notice_and_the_live_page_says_stale(system, redis_server, say, fault):
    seen = outage(system, partial(fault, redis_server), 20.0)
    check(system, seen, say)
    frames = seen.watch.frames_between(seen.began + 8, seen.ended)
    assert frames, "the socket fell silent"
    assert all(frame.stale for frame in frames)
    assert max(frame.gap_s for frame in frames) < 5.0
    assert any(frame.content["reason"] == "Redis is away" for frame in frames)
    pages = seen.watch.pages_between(seen.began + 5, seen.ended - 2)
    assert all("No gateway reports now" in page.text for page in pages), "a page showed old figures as current ones"


def test_a_worker_whose_acknowledgement_was_lost_takes_messages_again(system, redis_server, say):
    """Redis dies after a task has arrived and before it is acknowledged: the worker reads nothing, so hears nothing."""
    worker = psutil.Process(system.pid("worker"))
    children = worker.children()
    for child in children:
        child.send_signal(signal.SIGSTOP)  # what arrives now is not accepted, so not acknowledged
    time.sleep(3)
    redis_server.stop()
    for child in children:
        child.send_signal(signal.SIGCONT)
    time.sleep(2)
    redis_server.start()
    well = system.until(system.healthy, within_s=40.0)
    say(healthy_after_s=round(well, 1))
    assert system.pid("worker") == worker.pid, "it was started anew"
