"""When hosts of a simulated network are called again."""

import math

from controller.simulator.flows.wakes import Wakes


def test_the_earliest_is_first_and_what_was_said_last_counts():
    wakes = Wakes()
    assert wakes.first() == math.inf
    for host, at in (("a", 3.0), ("b", 2.0), ("c", 1.0), ("b", 4.0), ("c", math.inf)):
        wakes.set(host, at)
    assert wakes.first() == 3.0
    assert list(wakes.due(4.0)) == ["a", "b"]
    assert wakes.first() == math.inf


def test_what_is_said_while_hosts_are_called_counts():
    wakes, called = Wakes(), []
    wakes.set("a", 1.0)
    for host in wakes.due(2.0):
        called.append(host)
        wakes.set("a", 1.5 if len(called) == 1 else 5.0)
    assert called == ["a", "a"]
    assert wakes.first() == 5.0


def test_what_is_said_twice_calls_once_and_again_after_the_call():
    wakes = Wakes()
    for _ in range(2):
        wakes.set("a", 1.0)
    assert list(wakes.due(1.0)) == ["a"]
    assert wakes.first() == math.inf
    wakes.set("a", 1.0)
    assert list(wakes.due(1.0)) == ["a"]
