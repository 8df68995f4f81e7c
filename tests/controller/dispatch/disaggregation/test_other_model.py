"""KV that is of another model or layout than a decode instance's: nobody is at fault, trying again mends nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from controller.core import events as ev
from controller.core.types import Role
from controller.dispatch import Migrator
from controller.dispatch.lifecycle import State
from tests.controller.dispatch.disaggregation.decoders import done, of, places, up
from tests.controller.dispatch.disaggregation.test_links import fleet
from tests.controller.dispatch.fleet import request


def not_readable(made: Migrator, name: str, target: str, now: float) -> ev.Reply:
    """`target` says that the KV of this request is of another model."""
    made.handle([ev.TransferStarted(name, target)], now)
    return made.handle([ev.TransferFailed(name, target, "other_model")], now)


def test_it_is_decoded_where_the_model_is_the_same() -> None:
    made = fleet(migrator={"link_failures": 1})
    assert places(made.handle([done("a")], 0.0)) == [("a", "d0")]
    reply = not_readable(made, "a", "d0", 0.1)
    assert (places(reply), of(reply, ev.PrefillAgain), of(reply, ev.GiveUp)) == ([("a", "d1")], [], [])
    assert made.links.usable(("p", "d0"), 0.1), "the way was good"
    made.handle([ev.TransferStarted("a", "d1"), ev.TransferDone("a", "d1")], 0.2)
    assert made.state_of("a") is State.COMMITTED
    assert [state.waiting + state.running for state in made.fleet(0.2)] == [0, 1]


def test_with_no_one_left_to_read_it_the_prompt_is_prefilled_elsewhere() -> None:
    made = fleet("q")
    made.handle([done("a")], 0.0)
    not_readable(made, "a", "d0", 0.1)
    reply = not_readable(made, "a", "d1", 0.2)
    (again,) = of(reply, ev.PrefillAgain)
    assert (again.request.id, again.avoid, again.decision.reason) == ("a", {"p"}, "other_model")
    assert of(reply, ev.FreeKv) == [ev.FreeKv("a", "p")]
    assert made.state_of("a") is None
    assert places(made.handle([done("a", 0.3, source="q")], 0.3)) != [], "what q computes is asked about again"


def test_a_collocated_instance_may_take_it_too() -> None:
    made = fleet(decoders=1)
    made.handle([up("c", Role.COLLOCATED), done("a")], 0.0)
    assert [again.avoid for again in of(not_readable(made, "a", "d0", 0.1), ev.PrefillAgain)] == [{"p"}]


def test_the_others_may_be_as_many_as_they_like() -> None:
    """More than the failures that are allowed: each is asked once, and none of it counts."""
    made = fleet(decoders=9, migrator={"max_failures": 2})
    reply = made.handle([done("a")], 0.0)
    asked = []
    for step in range(8):
        ((_, target),) = places(reply)
        asked.append(target)
        reply = not_readable(made, "a", target, 0.1 * step)
        assert of(reply, ev.GiveUp) == []
    assert len(set(asked)) == 8
    assert len(places(reply)) == 1


def test_one_without_room_is_waited_for_rather_than_an_incompatible_peer_asked_again() -> None:
    made = fleet("q", decoders=1)
    small = up("d1").spec
    small.kv_capacity_tokens = 1000
    made.handle([ev.InstanceDown("d0"), ev.InstanceUp(small), done("fills", prompt=900)], 0.0)
    made.handle([ev.TransferStarted("fills", "d1"), ev.TransferDone("fills", "d1")], 0.0)
    made.handle([up("d0")], 0.0)
    assert places(made.handle([done("a", prompt=300)], 0.1)) == [("a", "d0")]
    reply = not_readable(made, "a", "d0", 0.2)
    assert (places(reply), of(reply, ev.PrefillAgain), made.state_of("a")) == ([], [], State.WAITING)
    assert places(made.handle([ev.Finished("fills", 10)], 0.3)) == [("a", "d1")]


def test_with_nowhere_to_go_it_waits_for_somebody_and_is_then_given_up() -> None:
    made = fleet(decoders=1)
    made.handle([done("a")], 0.0)
    reply = not_readable(made, "a", "d0", 1.0)
    assert (places(reply), of(reply, ev.PrefillAgain), of(reply, ev.GiveUp)) == ([], [], [])
    assert reply.wake_at == 1.0 + made.config.incompatible_hold_s
    over = made.handle([ev.Woke()], reply.wake_at)
    assert [given.decision.reason for given in of(over, ev.GiveUp)] == ["other_model"]
    assert of(over, ev.FreeKv) == [ev.FreeKv("a", "p")]


def test_no_setting_makes_it_wait_for_longer_than_others() -> None:
    made = fleet(decoders=1, migrator={"hold_s": 2.0})
    made.handle([done("a")], 0.0)
    assert not_readable(made, "a", "d0", 1.0).wake_at == 3.0


@pytest.mark.parametrize(
    ("comes", "follows"),
    [
        ([up("d1")], lambda reply: places(reply) == [("a", "d1")]),
        ([ev.InstanceDown("d0"), up("d0")], lambda reply: places(reply) == [("a", "d0")]),
        ([up("q", Role.PREFILL)], lambda reply: [again.avoid for again in of(reply, ev.PrefillAgain)] == [{"p"}]),
    ],
    ids=["another", "the_same_started_again", "a_prefill_instance"],
)
def test_somebody_who_comes_meanwhile_is_asked(comes: list[ev.Event], follows: Callable[[ev.Reply], bool]) -> None:
    made = fleet(decoders=1)
    made.handle([done("a")], 0.0)
    not_readable(made, "a", "d0", 0.1)
    assert follows(made.handle(comes, 1.0))


def test_a_landing_that_was_assumed_is_taken_back_and_its_kv_is_still_there() -> None:
    made = fleet(migrator={"link_failures": 1})
    made.handle([done("a")], 0.0)
    made.handle([ev.TransferStarted("a", "d0"), ev.TransferDone("a", "d0", assumed=True)], 0.0)
    reply = made.handle([ev.TransferFailed("a", "d0", "other_model")], 0.1)
    assert (places(reply), of(reply, ev.PrefillAgain), of(reply, ev.FreeKv)) == ([("a", "d1")], [], [])
    assert made.links.usable(("p", "d0"), 0.1)


def test_what_is_still_being_computed_starts_over_too() -> None:
    made = fleet("q", decoders=1)
    made.handle([ev.PrefillSent(request("a"), "p", prefill_s=1.0), ev.PrefillEnding("a", "p")], 0.0)
    (again,) = of(not_readable(made, "a", "d0", 0.1), ev.PrefillAgain)
    assert (again.avoid, again.decision.reason, made.state_of("a")) == ({"p"}, "other_model", None)


def test_a_choice_made_when_the_prompt_was_sent_does_not_bind_it_to_an_incompatible_peer() -> None:
    made = fleet(migration={"name": "one_shot"})
    made.handle([ev.PrefillSent(request("a"), "p")], 0.0)
    ((_, first),) = places(made.handle([done("a", 0.1)], 0.1))
    ((_, second),) = places(not_readable(made, "a", first, 0.2))
    assert {first, second} == {"d0", "d1"}
