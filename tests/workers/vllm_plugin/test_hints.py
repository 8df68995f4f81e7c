"""PluginHints: what is written, what is read, and what counts as not given."""

from __future__ import annotations

import math

import pytest

from controller.core.told_hints import ToldHints
from workers.backends.hints import Hints
from workers.vllm_plugin.hints import PluginHints, hint_fields, read_hints


@pytest.mark.parametrize(
    "hints", [PluginHints(), PluginHints(1.5, 2.0, 0.05, 3.0), PluginHints(-4.0, 2.0), PluginHints(tpot_s=0.2)]
)
def test_what_is_written_is_read(hints: PluginHints) -> None:
    assert read_hints(hint_fields(hints)) == hints


@pytest.mark.parametrize("value", ["1", None, True, [1.0], math.nan, math.inf, -1e300, 1e300, {}])
def test_what_is_no_number_or_out_of_bounds_counts_as_not_given(value: object) -> None:
    names = hint_fields(PluginHints(1.0, 2.0, 3.0, 4.0))
    assert read_hints(dict.fromkeys(names, value)) == PluginHints()


def test_no_more_is_left_than_there_was() -> None:
    assert read_hints({"slackline_ttft": 2.0, "slackline_ttft_left": 50.0}).ttft_left_s == 2.0


def test_half_a_target_is_none() -> None:
    assert read_hints({"slackline_ttft": 2.0}) == PluginHints() == read_hints({"slackline_ttft_left": 2.0})
    assert read_hints(None) == PluginHints()


def test_what_reference_engines_are_told_is_read_too() -> None:
    told = Hints(due_s=4.0, workflow_s=-2.0, lower=10, upper=90, workflow="w").fields()
    assert read_hints(hint_fields(PluginHints(), told)).told == ToldHints(4.0, -2.0, (10, 90), "w")


@pytest.mark.parametrize("bounds", [(90, 10), (1, None), ("1", 2), (math.nan, 3)])
def test_bounds_that_cannot_be_are_none(bounds: tuple[object, object]) -> None:
    lower, upper = bounds
    told = read_hints({"slackline_length_lower": lower, "slackline_length_upper": upper, "slackline_workflow": 3}).told
    assert told == ToldHints()
