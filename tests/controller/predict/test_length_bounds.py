"""Features of the length of an answer, and the level that follows what was observed."""

import math
import random

import pytest

from controller.predict import answer_lengths
from controller.predict.answer_lengths import FEATURES, LEAST_LEVEL, MOST_LEVEL, AdaptiveLevel, LengthHistory

KIND = ("acme", "chat", "llama")


def features(history, **other):
    values = {"kind": KIND, "workflow": "", "prompt_tokens": 100, "max_tokens": None} | other
    return dict(zip(FEATURES, history.features(**values), strict=True))


def test_before_the_first_answer_nothing_is_known_of_its_kind():
    found = features(LengthHistory(), max_tokens=64)
    assert (found["prompt_tokens"], found["max_tokens"]) == (100, 64)
    assert (found["kind_mean"], found["workflow_calls"], found["workflow_growth"]) == (0, 0, 0)


def test_the_mean_follows_the_answers_of_the_same_kind_alone():
    history = LengthHistory()
    history.observe(KIND, "", 10, 100)
    history.observe(KIND, "", 10, 200)
    history.observe(("other", "chat", "llama"), "", 10, 9_000)
    assert features(history)["kind_mean"] == pytest.approx(120.0)


def test_a_workflow_is_remembered_by_its_last_call():
    history = LengthHistory()
    assert features(history, workflow="run")["workflow_growth"] == 0, "of its first call nothing is known"
    history.observe(KIND, "run", 80, 30)
    history.observe(KIND, "run", 90, 40)
    found = features(history, workflow="run", prompt_tokens=150)
    assert (found["workflow_calls"], found["workflow_answer"], found["workflow_growth"]) == (2, 40, 60)
    assert features(history, workflow="another")["workflow_calls"] == 0
    assert features(history, kind=("other", "chat", "llama"), workflow="run")["workflow_calls"] == 0, "another tenant's"


def test_memory_is_bounded_and_the_longest_unused_goes_first(monkeypatch):
    monkeypatch.setattr(answer_lengths, "MOST_KINDS", 2)
    monkeypatch.setattr(answer_lengths, "MOST_WORKFLOWS", 2)
    history = LengthHistory()
    for name in ("a", "b", "a", "c"):
        history.observe((name,), name, 1, 10)
    known = {name: features(history, kind=(name,), workflow=name) for name in ("a", "b", "c")}
    assert [name for name, found in known.items() if found["kind_mean"]] == ["a", "c"]
    assert [name for name, found in known.items() if found["workflow_calls"]] == ["a", "c"]


@pytest.mark.parametrize("too_low_by", [0.5, 1.0, 1.1])
def test_the_level_settles_where_its_target_of_the_bounds_hold(too_low_by):
    """Bounds that are exact, or quantiles of a distribution that has grown or shrunk since."""
    rng, level, held = random.Random(1), AdaptiveLevel(), []
    for _ in range(20_000):
        bound = -math.log(1 - level.level)
        held.append(rng.expovariate(1.0) * too_low_by <= bound)
        level.observe(held[-1])
        assert LEAST_LEVEL <= level.level <= MOST_LEVEL
    assert sum(held[5_000:]) / 15_000 == pytest.approx(0.9, abs=0.01)
