"""What the combined set's engines run, and how the gateway learns it from what an engine was started with."""

import pytest

from controller.core.types import LatencyCoefficients, Role
from controller.policies.batching import BATCHINGS
from controller.policies.batching.options import build
from controller.policies.by_stage import batching_of, engine_part

LATENCY = LatencyCoefficients(0.001, 5e-5, 2e-10, 0.01, 3e-7, 2e-4)


@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("deadlines", [False, True])
@pytest.mark.parametrize("latency", [None, LATENCY])
def test_its_options_are_those_of_its_policy(role, deadlines, latency):
    part = engine_part(role, deadlines)
    assert part.batching in BATCHINGS
    config = build(part.batching, part.options_for(latency, 3000)).config
    for option, coefficient in part.profiled.items():
        known = BATCHINGS[part.batching].Config() if latency is None else latency
        assert getattr(config, option) == getattr(known, coefficient if latency else option)


@pytest.mark.parametrize(
    ("told", "role", "batching"),
    [
        ({}, Role.COLLOCATED, None),
        ({"batching": "calm"}, Role.COLLOCATED, "calm"),
        ({"scheduler": "slackline"}, Role.COLLOCATED, "chunked_prefill"),
        ({"scheduler": "slackline", "deadlines": True}, Role.COLLOCATED, "calm"),
        ({"scheduler": "slackline"}, Role.PREFILL, "slo_aware_batching"),
        ({}, Role.PREFILL, "slo_aware_batching"),
        ({"profile": "constant:5ms"}, Role.DECODE, "kairos_decode"),
        ({"scheduler": "continuous"}, Role.DECODE, None),
        ({"batching": "vllm_v1"}, Role.DECODE, "vllm_v1"),
        ({"scheduler": "slackline"}, Role.DECODE, "kairos_decode"),
        ({"scheduler": "preemptive"}, Role.COLLOCATED, "slo_aware_batching"),
        ({"scheduler": "continuous", "batching": ""}, Role.COLLOCATED, None),
    ],
)
def test_what_an_engine_was_told_says_how_it_batches(told, role, batching):
    assert batching_of(told, role) == batching
