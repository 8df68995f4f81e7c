"""What the dispatcher believes of an instance, between what it sent and what the engine says."""

import pytest

from controller.core.types import InstanceSpec, Load
from controller.dispatch.shadow_state import ShadowInstance
from tests.controller.dispatch.fleet import SPEED, request


@pytest.fixture
def instance():
    return ShadowInstance(InstanceSpec("w", "m", latency=SPEED, max_num_seqs=8))


def test_what_an_engine_prefills_of_ours_is_not_counted_as_external_load(instance):
    """An engine counts it as running; here it waits until its first token."""
    for serial in range(4):
        instance.send(request(f"r{serial}"), 0.0, 0, serial)
    instance.first_token("r0", 0.5)
    for at, (running, waiting) in ((1.0, (3, 1)), (2.0, (4, 0)), (3.0, (2, 2))):
        instance.observe_load(Load(at, running=running, waiting=waiting))
        assert instance.outstanding == 4
    for at in (4.0, 5.0):
        instance.observe_load(Load(at, running=5, waiting=1))
    assert instance.outstanding == 6  # two are


def test_an_answer_longer_than_predicted_takes_nothing_from_what_is_kept_for_others(instance):
    instance.send(request("short", output=10), 0.0, 0, 0)
    instance.send(request("long", output=1000), 0.0, 0, 1)
    assert instance.expected_tokens == 1010
    instance.first_token("short", 0.1)
    instance.progress("short", 300, 1.0)
    assert instance.expected_tokens == 1000
    instance.remove("short")
    assert instance.expected_tokens == 1000
    instance.first_token("long", 1.1)
    instance.progress("long", 400, 2.0)
    assert instance.expected_tokens == 600
    instance.remove("long")
    assert instance.expected_tokens == 0
