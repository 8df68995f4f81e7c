"""Hints: what is written, what is read, and what counts as not given."""

from __future__ import annotations

import math

import pytest

from workers.vllm_plugin.hints import Hints, hint_fields, read_hints


@pytest.mark.parametrize("hints", [Hints(), Hints(1.5, 2.0, 0.05, 3.0), Hints(-4.0, 2.0), Hints(tpot_s=0.2)])
def test_what_is_written_is_read(hints: Hints) -> None:
    assert read_hints(hint_fields(hints)) == hints


@pytest.mark.parametrize("value", ["1", None, True, [1.0], math.nan, math.inf, -1e300, 1e300, {}])
def test_what_is_no_number_or_out_of_bounds_counts_as_not_given(value: object) -> None:
    names = hint_fields(Hints(1.0, 2.0, 3.0, 4.0))
    assert read_hints(dict.fromkeys(names, value)) == Hints()


def test_no_more_is_left_than_there_was() -> None:
    assert read_hints({"slackline_ttft": 2.0, "slackline_ttft_left": 50.0}).ttft_left_s == 2.0


def test_half_a_target_is_none() -> None:
    assert read_hints({"slackline_ttft": 2.0}) == Hints() == read_hints({"slackline_ttft_left": 2.0})
    assert read_hints(None) == Hints()
