import pytest

from controller.core.errors import ConfigError
from controller.core.policy import ORDERINGS, Cost
from controller.core.types import Request, Targets
from controller.policies.ordering import apparent_tardiness_cost as atc

CHEAP = Cost(0.1, 0.2, 0.01)


def request(name, arrival, ttft, tpot=0.5, deadline=None, value=1.0):
    return Request(name, arrival, Targets(ttft, tpot, deadline), 100, 10, value=value)


def order(ordering, *items):
    return [r.id for r, cost in sorted(items, key=lambda item: ordering.rank(item[0], item[1], 0.0).key)]


def test_textbook_orders():
    items = [(request("a", 0, 9, 0.5), CHEAP), (request("b", 1, 2, 0.9), CHEAP), (request("c", 2, 4, 0.1), CHEAP)]
    assert order(ORDERINGS["first_come_first_served"](), *items) == ["a", "b", "c"]
    assert order(ORDERINGS["earliest_deadline_first"](), *items) == ["b", "c", "a"]
    assert order(ORDERINGS["tpot_then_arrival"](), *items) == ["c", "a", "b"]


def test_the_target_that_falls_due_first_counts():
    assert request("a", 1.0, 5.0).due == 6.0
    assert request("a", 1.0, 5.0, deadline=3.0).due == 4.0


def test_lookahead_goes_from_deadline_to_worth():
    urgent_and_dear = (request("dear", 0, 1.0), Cost(0.5, 1.0, 0.01))
    loose_and_cheap = (request("cheap", 0, 5.0), Cost(0.5, 0.1, 0.01))
    short, long = atc.ApparentTardinessCost(atc.Config(0.1)), atc.ApparentTardinessCost(atc.Config(100.0))
    assert order(short, urgent_and_dear, loose_and_cheap) == ["dear", "cheap"]
    assert order(long, urgent_and_dear, loose_and_cheap) == ["cheap", "dear"]


def test_value_buys_urgency():
    ordering = atc.ApparentTardinessCost()
    assert order(ordering, (request("a", 0, 1), CHEAP), (request("b", 0, 1, value=5.0), CHEAP)) == ["b", "a"]


def test_lookahead_must_be_positive():
    with pytest.raises(ConfigError) as caught:
        atc.Config(0.0)
    assert caught.value.field == "lookahead_s"
