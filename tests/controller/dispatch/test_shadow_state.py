"""What the dispatcher believes of an instance, between what it sent and what the engine says."""

import pytest

from controller.core.types import InstanceSpec, Load
from controller.dispatch.shadow_state import Worker
from tests.controller.dispatch.fleet import SPEED, request


@pytest.fixture
def worker():
    return Worker(InstanceSpec("w", "m", latency=SPEED, max_num_seqs=8))


def test_what_an_engine_prefills_of_ours_is_not_counted_as_external_load(worker):
    """An engine counts it as running; here it waits until its first token."""
    for serial in range(4):
        worker.send(request(f"r{serial}"), 0.0, 0, serial)
    worker.first_token("r0", 0.5)
    for at, (running, waiting) in ((1.0, (3, 1)), (2.0, (4, 0)), (3.0, (2, 2))):
        worker.observe_load(Load(at, running=running, waiting=waiting))
        assert worker.outstanding == 4
    for at in (4.0, 5.0):
        worker.observe_load(Load(at, running=5, waiting=1))
    assert worker.outstanding == 6  # two are


def test_an_answer_longer_than_predicted_takes_nothing_from_what_is_kept_for_others(worker):
    worker.send(request("short", output=10), 0.0, 0, 0)
    worker.send(request("long", output=1000), 0.0, 0, 1)
    assert worker.expected_tokens == 1010
    worker.first_token("short", 0.1)
    worker.progress("short", 300, 1.0)
    assert worker.expected_tokens == 1000
    worker.remove("short")
    assert worker.expected_tokens == 1000
    worker.first_token("long", 1.1)
    worker.progress("long", 400, 2.0)
    assert worker.expected_tokens == 600
    worker.remove("long")
    assert worker.expected_tokens == 0
