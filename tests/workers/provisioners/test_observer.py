"""Provisioners are looked at each by itself: what one of them does or does not do is no concern of the others."""

import threading
import time

import pytest

from workers.provisioners import Observation, Observed, Observer
from workers.ray.jobs import ClusterUnreachable

SEEN = [Observed("a", "ready")]


class Answers:
    def __init__(self, answer=SEEN):
        self.answer = answer

    def observe(self):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Hangs:
    def __init__(self):
        self.asked, self.over = 0, threading.Event()

    def observe(self):
        self.asked += 1
        assert self.over.wait(20)
        return SEEN


@pytest.fixture
def hanging():
    made = Hangs()
    yield made
    made.over.set()


def test_what_is_seen_of_each():
    looks = Observer()
    assert looks.at({"one": Answers(), "other": Answers([])}) == {
        "one": Observation(tuple(SEEN)),
        "other": Observation(()),
    }


def test_one_that_raises_is_not_one_without_instances():
    found = Observer().at({"one": Answers(OSError("disk gone")), "other": Answers()})
    assert found == {"one": Observation(None, "OSError: disk gone"), "other": Observation(tuple(SEEN))}


def test_what_is_said_for_people_is_said_without_the_name_of_a_class():
    told = "http://10.0.0.1:8265 has not responded within 2 s"
    assert Observer().at({"ray/default": Answers(ClusterUnreachable(told))}) == {"ray/default": Observation(None, told)}


def test_one_that_hangs_costs_its_limit_once_and_is_asked_once(hanging):
    looks, began = Observer(lambda name: 0.3 if name == "slow" else 5.0), time.monotonic()
    found = looks.at({"slow": hanging, "other": Answers()})
    assert found["slow"] == Observation(None, "has not responded within 0.3 s")
    assert found["other"].seen
    assert 0.3 <= time.monotonic() - began < 3
    began = time.monotonic()
    for _ in range(5):
        assert looks.at({"slow": hanging, "other": Answers()})["slow"].error == "has not responded for 0 s"
    assert time.monotonic() - began < 0.3, "nobody waits for it again"
    assert hanging.asked == 1


def test_one_that_is_back_is_seen_again(hanging):
    looks = Observer(lambda name: 0.05)
    assert looks.at({"slow": hanging})["slow"].seen is None
    hanging.over.set()
    until = time.monotonic() + 5
    while looks.at({"slow": hanging})["slow"].seen is None:
        assert time.monotonic() < until
        time.sleep(0.01)
