"""What gateway and simulator tell of instances that are starting, and that the second of them is not forgotten."""

from __future__ import annotations

import math
from dataclasses import replace

from controller.core import events as ev
from controller.core.types import Outcome
from controller.dispatch.expected import ExpectedInstances
from controller.simulator import Demand, Failure
from tests.controller.simulator.runs import PATIENT, SMALL, simulate


def test_only_changes_are_told_the_earliest_of_each_model() -> None:
    made = ExpectedInstances()
    assert made.changes([]) == []
    assert made.changes([("b", 4.0), ("a", 9.0), ("a", 5.0)]) == [ev.Expected("a", 5.0), ev.Expected("b", 4.0)]
    assert made.changes([("a", 5.0), ("b", 4.0)]) == []
    assert made.changes([("a", 9.0), ("b", 4.0)]) == [ev.Expected("a", 9.0)]
    assert made.models == {"a", "b"}
    assert made.changes([("b", 4.0)]) == [ev.Expected("a", math.inf)]
    assert made.models == {"b"}


def test_a_model_on_demand_is_expected_at_once_until_an_instance_of_it_starts() -> None:
    made = ExpectedInstances()
    assert made.changes([], ["a"]) == [ev.Expected("a", 0.0)]
    assert (made.models, made.on_demand) == (set(), {"a"})
    assert made.changes([], ["a"]) == []
    assert made.changes([("a", 9.0)], ["a"]) == [ev.Expected("a", 9.0)], "when it starts is known then"
    assert (made.models, made.on_demand) == ({"a"}, set())
    assert made.changes([], ["a"]) == [ev.Expected("a", 0.0)]
    assert made.changes([]) == [ev.Expected("a", math.inf)]
    assert made.on_demand == set()


def test_it_is_told_when_those_are_likely_to_serve_of_which_that_is_known() -> None:
    made = ExpectedInstances()
    joins = [("a", 0.0), ("a", 0.0), ("b", 0.0)]
    told = made.changes(joins, serving=[("a", 9.0), ("a", 5.0)])
    assert told == [ev.Expected("a", 0.0, (5.0, 9.0)), ev.Expected("b", 0.0)]
    assert made.changes(joins, serving=[("a", 5.0), ("a", 9.0)]) == []
    assert made.changes(joins[1:], serving=[("a", 9.0)]) == [ev.Expected("a", 0.0, (9.0,))]
    assert made.changes([]) == [ev.Expected("a", math.inf), ev.Expected("b", math.inf)]


def test_requests_wait_for_the_second_replacement_where_the_first_is_gone_again() -> None:
    """One instance fails and is replaced after 1 s, the other after 4 s; the first fails once more at 2 s, for good."""
    failures = (Failure(0, 0.5, 1.0), Failure(1, 0.5, 4.0), Failure(0, 2.0))
    demands = [Demand("a", 3.0, 100, 10, PATIENT, max_tokens=10)]
    (record,) = simulate(demands, instances=(SMALL, SMALL), failures=failures).records
    assert (record.outcome, record.instance) == (Outcome.OK, "engine-1-1")
    assert record.queue_s == 1.5


def test_requests_wait_for_one_that_joins_later() -> None:
    later = replace(SMALL, from_s=3.0)
    demands = [Demand("a", 1.0, 100, 10, PATIENT, max_tokens=10)]
    (record,) = simulate(demands, instances=(replace(SMALL, until_s=0.5), later)).records
    assert (record.outcome, record.queue_s) == (Outcome.OK, 2.0)
