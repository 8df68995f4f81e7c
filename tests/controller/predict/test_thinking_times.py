"""Times of reasoning follow what was measured, and leave a part of the deadline in any case."""

import json
import random

import pytest

from controller.predict.thinking_times import ThinkingTimes


def test_nothing_is_expected_before_one_was_seen():
    times = ThinkingTimes()
    assert (times.expected_s("acme", "demo"), times.first_token_s("acme", "demo", 9.0)) == (0.0, 9.0)


def test_each_tenant_and_model_has_its_own():
    times = ThinkingTimes()
    times.observe("acme", "demo", 2.0)
    assert times.expected_s("acme", "demo") > 2.0
    assert [times.expected_s(*other) for other in (("other", "demo"), ("acme", "large"))] == [0.0, 0.0]


def test_what_is_always_equal_is_expected_exactly():
    times = ThinkingTimes()
    for _ in range(60):
        times.observe("acme", "demo", 2.0)
    assert times.expected_s("acme", "demo") == pytest.approx(2.0, abs=1e-6)
    assert times.first_token_s("acme", "demo", 5.0) == pytest.approx(3.0, abs=1e-6)


def test_most_take_no_longer_and_a_change_is_followed():
    times, rng = ThinkingTimes(), random.Random(7)
    kept = 0
    for number in range(2_000):
        seconds = rng.gauss(4.0, 0.5)
        kept += number >= 100 and seconds <= times.expected_s("acme", "demo")
        times.observe("acme", "demo", seconds)
    assert 0.7 <= kept / 1_900 <= 0.9
    for _ in range(50):
        times.observe("acme", "demo", 0.5)
    assert times.expected_s("acme", "demo") < 1.0


def test_some_of_the_deadline_is_left_for_the_first_token():
    times = ThinkingTimes()
    times.observe("acme", "demo", 60.0)
    assert times.first_token_s("acme", "demo", 10.0) == 1.0


@pytest.mark.parametrize(
    "wrong", [[["acme", "demo", 1.0]], [["acme", "demo", float("nan"), 0.0]], [["a", "b", "x", 0]], 5]
)
def test_it_goes_on_from_its_state_and_from_nothing_else(wrong):
    times, other = ThinkingTimes(), ThinkingTimes()
    times.observe("acme", "demo", 2.0)
    other.restore(json.loads(json.dumps(times.state())))
    with pytest.raises((TypeError, ValueError)):
        other.restore(wrong)
    assert other.expected_s("acme", "demo") == times.expected_s("acme", "demo")
