"""The load that bench-overhead sends, with and without what a gateway learns from."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from benchmarks.analyzer.in_force import LEVELS, made_up_workflow
from benchmarks.bench_overhead import CALLS, LEARNED, LONG_TOKENS, OPEN_WORKFLOWS, OUTPUT_TOKENS, SHORT, load_bodies

COUNT = 3_000


def sent(mix, **options):
    return [json.loads(each) for each in load_bodies(mix, 7, COUNT, **options)]


def test_without_an_option_answers_are_short_and_name_no_workflow():
    asked = sent(SHORT, named="x")
    assert {each["max_tokens"] for each in asked} == {OUTPUT_TOKENS}
    assert sum(each["stream"] for each in asked) == COUNT / 2
    assert not any("metadata" in each for each in asked)


def test_long_answers_are_streamed_and_some_requests_are_steps_of_workflows():
    """Only a streamed answer shows how far it is, so that its bound is predicted again."""
    asked = sent(LEARNED, named="x")
    long = [each for each in asked if each["max_tokens"] == LONG_TOKENS]
    assert len(long) / COUNT == pytest.approx(LEARNED.long, abs=0.03)
    assert LONG_TOKENS > 100
    assert all(each["stream"] for each in long)
    steps = [each["metadata"]["workflow_id"] for each in asked if "metadata" in each]
    assert len(steps) / COUNT == pytest.approx(LEARNED.workflows, abs=0.05)
    assert all("workflow_deadline" in each for each in asked if "metadata" in each)
    whole = [steps.count(name) for name in dict.fromkeys(steps[: CALLS * OPEN_WORKFLOWS])]
    assert whole == [CALLS] * OPEN_WORKFLOWS, "calls of one workflow follow one another, beside those of others"
    assert steps[0] == steps[OPEN_WORKFLOWS] != steps[1]


def test_the_engine_is_asked_for_the_same_without_what_only_a_gateway_reads():
    direct, through = sent(LEARNED), sent(LEARNED, named="x")
    fields = ("metadata", "workflow_deadline")
    assert direct == [{name: each[name] for name in each if name not in fields} for each in through]


def test_made_up_workflows_have_calls_one_after_the_other():
    rng = np.random.default_rng(1)
    for index, levels in enumerate(LEVELS):
        calls = made_up_workflow("m", index, 100.0, rng)
        assert len(calls) == levels
        assert all(before.ended < after.began for before, after in itertools.pairwise(calls))
