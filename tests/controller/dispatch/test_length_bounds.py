"""The upper bound of an answer reserves room for its KV; only the lower one gives a request up (decision 41)."""

from __future__ import annotations

import pytest

from controller.core import events as ev
from controller.dispatch import build_dispatcher
from tests.controller.dispatch.fleet import kinds, request, sends, up


@pytest.mark.parametrize(("most", "beside"), [(100, ["b"]), (600, [])])
def test_room_is_kept_for_the_upper_bound(most, beside):
    """Both prompts and medians fit into 1,000 tokens of KV; whether b goes beside a depends on how long a may be."""
    dispatcher = build_dispatcher("slackline")
    first = request("a", ttft=30.0, prompt=300, output=50, least_tokens=10, most_tokens=most)
    dispatcher.handle([up(kv_capacity_tokens=1_000), ev.Arrived(first)], 0.0)
    reply = dispatcher.handle([ev.Arrived(request("b", 0.01, ttft=30.0, prompt=200, output=50))], 0.01)
    assert [name for name, _ in sends(reply)] == beside


@pytest.mark.parametrize(("most", "goes"), [(100, ["b"]), (600, [])])
def test_its_own_upper_bound_has_to_fit_too(most, goes):
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up(kv_capacity_tokens=1_000), ev.Arrived(request("a", ttft=30.0, prompt=300, output=50))], 0.0)
    late = request("b", 0.01, ttft=30.0, prompt=200, output=50, least_tokens=10, most_tokens=most)
    assert [name for name, _ in sends(dispatcher.handle([ev.Arrived(late)], 0.01))] == goes


def test_only_the_lower_bound_refuses_a_deadline():
    """The median alone would end too late: without bounds it is refused, with a short lower bound it is served."""
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up()], 0.0)
    hard = {"ttft": 2.0, "deadline": 2.0, "output": 5_000}
    assert kinds(dispatcher.handle([ev.Arrived(request("a", **hard))], 0.0), ev.Refuse) == ["a"]
    bounded = request("b", **hard, least_tokens=10, most_tokens=9_000)
    reply = dispatcher.handle([ev.Arrived(bounded)], 0.0)
    assert (kinds(reply, ev.Refuse), sends(reply)) == ([], [("b", "w")])
    surely = request("c", **hard, least_tokens=5_000, most_tokens=9_000)
    assert kinds(dispatcher.handle([ev.Arrived(surely)], 0.0), ev.Refuse) == ["c"]


def test_a_refined_bound_frees_the_room_that_was_kept_or_takes_more():
    dispatcher = build_dispatcher("slackline")
    first = request("a", ttft=30.0, prompt=300, output=50, least_tokens=10, most_tokens=600)
    dispatcher.handle([up(kv_capacity_tokens=1_000), ev.Arrived(first)], 0.0)
    dispatcher.handle([ev.FirstToken("a"), ev.Progress("a", 50)], 0.1)
    (instance,) = dispatcher._fleet.instances.values()
    assert instance.expected_tokens == 550
    assert sends(dispatcher.handle([ev.Arrived(request("b", 0.2, ttft=30.0, prompt=200, output=50))], 0.2)) == []
    dispatcher.handle([ev.AnswerBounded("a", 80)], 0.3)
    assert instance.expected_tokens == 30
    dispatcher.handle([ev.AnswerBounded("a", 20)], 0.3)
    assert instance.expected_tokens == 0, "more is out already"
    dispatcher.handle([ev.AnswerBounded("a", 90), ev.AnswerBounded("unknown", 90)], 0.3)
    assert instance.expected_tokens == 40
    assert [name for name, _ in sends(dispatcher.handle([ev.Woke()], 0.4))] == ["b"]
    dispatcher.handle([ev.Finished("a", 70), ev.Finished("b", 50)], 0.5)
    assert instance.expected_tokens == 0


def test_a_bound_beyond_all_memory_of_an_engine_does_not_make_requests_go_one_by_one():
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up(kv_capacity_tokens=1_100)], 0.0)
    long = {"ttft": 30.0, "prompt": 200, "output": 50, "least_tokens": 10, "most_tokens": 5_000}
    reply = dispatcher.handle([ev.Arrived(request(name, **long)) for name in "abc"], 0.0)
    assert sorted(name for name, _ in sends(reply)) == ["a", "b", "c"]
    dispatcher.handle([ev.FirstToken("a"), ev.AnswerBounded("a", 6_000)], 0.1)
    assert [name for name, _ in sends(dispatcher.handle([ev.Arrived(request("d", 0.2, **long))], 0.2))] == ["d"]
    dispatcher.handle([ev.Finished(name, 50) for name in "abcd"], 0.5)
    (instance,) = dispatcher._fleet.instances.values()
    assert instance.expected_tokens == 0
