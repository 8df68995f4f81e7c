"""Redis stopped, and hanging, for 20 s under load."""

import signal
from collections import deque
from functools import partial

import psutil
import pytest
import redis

from tests.faults.outage import check, hanging, outage, stopped
from tests.faults.workflows import AWAY

pytestmark = [pytest.mark.db, pytest.mark.slow, pytest.mark.long(125)]
LOST = "Couldn't ack"  # Celery's words
HELD_LOOKS = 15  # a tenth of a second apart: longer than any worker that is well keeps a message unacknowledged


@pytest.mark.parametrize("fault", [stopped, hanging], ids=["stopped", "hanging"])
def test_the_data_path_does_not_notice_and_the_live_page_says_stale(system, redis_server, say, fault):
    seen = outage(system, partial(fault, redis_server), 20.0)
    check(system, seen, say)
    refused = seen.workflows.between(seen.began + 1, seen.ended - 2)
    assert {(each.kind, each.status, each.code) for each in refused} == {("fork", 503, AWAY), ("open", 503, AWAY)}
    assert all(each.message and each.took_s < 3.0 for each in refused), refused
    workflows = seen.workflows
    if fault is hanging:
        system.until(lambda: workflows.counted() == (workflows.steady,) * 2)
    else:  # what it had counted went with its memory; one request may have been counted before and answered after
        least = workflows.steady_since(seen.began)

        def all_since(requests: int, answered: int) -> bool:
            return least <= answered <= workflows.steady and answered - requests in (0, 1)

        system.until(lambda: all_since(*workflows.counted()))
    frames = seen.watch.frames_between(seen.began + 8, seen.ended)
    assert frames, "the socket fell silent"
    assert all(frame.stale for frame in frames)
    assert max(frame.gap_s for frame in frames) < 5.0
    assert any(frame.content["reason"] == "Redis is unavailable" for frame in frames)
    pages = seen.watch.pages_between(seen.began + 5, seen.ended - 2)
    assert all("No gateway is reporting" in page.text for page in pages), "a page showed old figures as current ones"


def test_a_worker_whose_acknowledgement_was_lost_takes_messages_again(system, redis_server, say):
    """Redis dies after a task has arrived and before it is acknowledged: the worker reads nothing, so hears nothing."""
    worker, log = psutil.Process(system.pid("worker")), system.folder / "logs" / "worker.log"
    client, lost = redis.Redis.from_url(redis_server.url), log.read_text().count(LOST)
    children = worker.children()
    for child in children:
        child.send_signal(signal.SIGSTOP)  # what arrives now is not accepted, so not acknowledged
    held = deque([0], maxlen=HELD_LOOKS)
    system.until(lambda: held.append(client.hlen("unacked")) or (len(held) == HELD_LOOKS and all(held)))
    redis_server.stop()
    for child in children:
        child.send_signal(signal.SIGCONT)
    system.until(lambda: log.read_text().count(LOST) > lost)
    redis_server.start()
    well = system.until(system.healthy, within_s=40.0)
    say(healthy_after_s=round(well, 1))
    assert system.pid("worker") == worker.pid, "it was restarted"
