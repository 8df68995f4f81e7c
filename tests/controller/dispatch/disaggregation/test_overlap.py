"""Decode stages placed before their prefill has ended; assumed ends of transfers; ways that lead nowhere."""

from __future__ import annotations

import pytest

from controller.core import events as ev
from controller.core.kv_links import LinkState
from controller.core.types import Role
from controller.dispatch import build_migrator
from controller.dispatch.lifecycle import State
from tests.controller.dispatch.disaggregation.decoders import commit, done, migrator, of, places, sent, up

PATIENCE = {"migrator": {"placed_timeout_s": 1.0, "moving_timeout_s": 2.0, "retry_s": 0.05}}


def ending(name: str, source: str = "p") -> ev.PrefillEnding:
    return ev.PrefillEnding(name, source)


# ---- early placement ------------------------------------------------------------------------------------------------


def test_a_stage_is_placed_when_the_last_step_of_its_prefill_begins() -> None:
    made = migrator()
    assert places(made.handle([sent("a")], 0.0)) == []
    assert made.state_of("a") is State.PREFILLING
    (place,) = of(made.handle([ending("a")], 0.3), ev.Place)
    assert (place.source, place.target, made.state_of("a")) == ("p", "d0", State.PLACED)
    assert place.decision.figures["kv_tokens"] == 100
    assert made.handle([done("a", 0.5)], 0.5).actions == []
    assert made.handle([ev.TransferStarted("a", "d0"), ev.TransferDone("a", "d0")], 0.6).actions == [
        ev.FreeKv("a", "p")
    ]


@pytest.mark.parametrize(("ttft", "reason"), [(3.1, "fits_tpot"), (2.9, "hopeless_harmless")])
def test_its_first_byte_comes_after_the_expected_end_of_its_prefill(ttft: float, reason: str) -> None:
    made = migrator()
    made.handle([sent("a", prefill_s=3.0, ttft=ttft)], 0.0)
    (place,) = of(made.handle([ending("a")], 1.0), ev.Place)
    assert (place.decision.reason, place.decision.figures["slack_s"]) == (reason, pytest.approx(ttft - 1.0))


def test_without_overlap_it_waits_for_the_end_of_the_prefill() -> None:
    made = migrator(migrator={"overlap": False})
    assert places(made.handle([sent("a"), ending("a")], 0.3)) == []
    assert places(made.handle([done("a", 0.5)], 0.5)) == [("a", "d0")]


def test_one_shot_keeps_its_choice_and_begins_to_move_early_too() -> None:
    made = migrator("slackline", decoders=2, migration={"name": "one_shot"})
    made.handle([sent("a"), sent("b")], 0.0)
    assert places(made.handle([ending("b")], 0.1)) == [("b", "d1")]


def test_who_finds_no_place_early_finds_one_later() -> None:
    made = migrator(slots=1)
    made.handle([done("first", tpot=0.05, output=100)], 0.0)
    commit(made, "first")
    made.handle([sent("next", tpot=0.06, prefill_s=0.1)], 0.0)
    assert places(made.handle([ending("next")], 0.1)) == []
    assert made.pressure(0.2) == {"m": (1, 0.0)}, "it waits for nothing yet"
    assert places(made.handle([done("next", 0.2)], 0.2)) == []
    assert places(made.handle([ev.Finished("first", 100)], 0.3)) == [("next", "d0")]


def test_a_long_last_step_is_no_slow_transfer_but_a_missing_answer_is_one() -> None:
    made = migrator(**PATIENCE)
    made.handle([sent("a"), ending("a")], 0.0)
    assert of(made.handle([ev.Woke()], 1.0), ev.Abort) == [ev.Abort("a", "d0", "placed_timeout")]
    made = migrator(**PATIENCE)
    made.handle([sent("a"), ending("a")], 0.0)
    made.handle([ev.TransferStarted("a", "d0")], 0.1)
    assert of(made.handle([ev.Woke()], 50.0), ev.Abort) == []
    made.handle([done("a", 50.0)], 50.0)
    assert of(made.handle([ev.Woke()], 51.9), ev.Abort) == []
    assert of(made.handle([ev.Woke()], 52.0), ev.Abort) == [ev.Abort("a", "d0", "moving_timeout")]


def test_a_prefill_that_fails_or_dies_takes_its_early_placement_with_it() -> None:
    for news in (ev.Failed("a", True), ev.Cancelled("a")):
        made = migrator()
        made.handle([sent("a"), ending("a")], 0.0)
        made.handle([news], 0.1)
        assert made.state_of("a") is None
        assert all(each.waiting == each.running == 0 for each in made.fleet(0.1))
    made = migrator()
    made.handle([up("p", Role.PREFILL), sent("a"), ending("a")], 0.0)
    reply = made.handle([ev.InstanceDown("p")], 0.1)
    assert of(reply, ev.Abort) == [ev.Abort("a", "d0", "kv_lost")]
    assert [again.decision.reason for again in of(reply, ev.PrefillAgain)] == ["kv_lost"]


def test_news_of_another_attempt_or_of_no_one_changes_nothing() -> None:
    made = migrator()
    made.handle([sent("a")], 0.0)
    assert made.handle([ending("a", "q"), ending("b")], 0.1).actions == []
    assert made.state_of("a") is State.PREFILLING
    made.handle([sent("a", source="q")], 0.2)
    assert places(made.handle([ending("a", "q")], 0.3)) == [("a", "d0")]
    assert made.fleet(0.3)[0].waiting == 1


# ---- ends that nobody saw -------------------------------------------------------------------------------------------


def assumed(name: str, target: str = "d0") -> ev.TransferDone:
    return ev.TransferDone(name, target, assumed=True)


def test_an_assumed_end_says_nothing_of_the_link_until_the_answer_is_there() -> None:
    made = migrator(migrator={"link_failures": 2})
    for index in range(2):
        name, now = f"r{index}", float(index)
        made.handle([done(name, now)], now)
        made.handle([ev.TransferStarted(name, "d0"), assumed(name)], now)
        assert made.links.usable(("p", "d0"), now)
        reply = made.handle([ev.TransferFailed(name, "d0", "transfer_failed")], now + 0.1)
        assert [again.decision.reason for again in of(reply, ev.PrefillAgain)] == ["decode_failed"]
    assert not made.links.usable(("p", "d0"), 1.2), "two in a row"


def test_an_answer_that_came_opens_the_link_again() -> None:
    made = migrator(migrator={"link_failures": 2})
    for index, came in enumerate((False, True, False)):
        name, now = f"r{index}", float(index)
        made.handle([done(name, now)], now)
        made.handle([ev.TransferStarted(name, "d0"), assumed(name)], now)
        made.handle([ev.Finished(name, 10) if came else ev.TransferFailed(name, "d0", "cut")], now + 0.1)
    assert made.links.usable(("p", "d0"), 2.2), "never two in a row"


def test_after_a_transfer_that_was_seen_to_end_the_kv_is_lost_and_not_the_link() -> None:
    made = migrator(migrator={"link_failures": 1})
    made.handle([done("a")], 0.0)
    commit(made, "a")
    (again,) = made.handle([ev.TransferFailed("a", "d0", "cut")], 0.1).actions
    assert (again.decision.reason, again.decision.figures) == ("decode_failed", {"instance": "d0", "error": "cut"})
    assert made.state_of("a") is None
    assert made.links.usable(("p", "d0"), 0.1)


# ---- nowhere to go --------------------------------------------------------------------------------------------------


def test_where_only_a_collocated_engine_is_left_it_is_prefilled_again_there_at_once() -> None:
    made = build_migrator("slackline")
    made.handle([up("p", Role.PREFILL), up("q", Role.PREFILL), up("c", Role.COLLOCATED)], 0.0)
    reply = made.handle([done("a")], 0.0)
    (again,) = of(reply, ev.PrefillAgain)
    assert (again.decision.reason, again.avoid) == ("no_decode_instance", {"p", "q"})
    assert of(reply, ev.FreeKv) == [ev.FreeKv("a", "p")]
    assert made.state_of("a") is None


def test_an_engine_that_prefilled_it_and_is_collocated_now_may_take_it_whole() -> None:
    made = build_migrator("slackline")
    made.handle([up("p", Role.COLLOCATED)], 0.0)
    (again,) = of(made.handle([done("a")], 0.0), ev.PrefillAgain)
    assert again.avoid == frozenset()


def test_without_a_collocated_engine_it_waits_for_a_decode_instance() -> None:
    made = build_migrator("slackline")
    made.handle([up("p", Role.PREFILL)], 0.0)
    assert made.handle([done("a")], 0.0).actions == []
    assert places(made.handle([up("d0")], 5.0)) == [("a", "d0")]


def test_full_decode_instances_are_waited_for() -> None:
    made = build_migrator("slackline")
    made.handle([up("d0", kv_capacity_tokens=250), up("c", Role.COLLOCATED), up("p", Role.PREFILL)], 0.0)
    assert places(made.handle([done("a", prompt=200)], 0.0)) == [("a", "d0")]
    assert made.handle([done("b", prompt=200)], 0.0).actions == []


def test_every_engine_whose_links_are_down_is_avoided_not_only_the_last() -> None:
    made = build_migrator("slackline")
    made.handle([up("d0"), *(up(name, Role.PREFILL) for name in "pqr")], 0.0)
    down = [ev.LinkSeen(name, "d0", LinkState.DOWN) for name in "pq"]
    (again,) = of(made.handle([*down, done("a")], 0.0), ev.PrefillAgain)
    assert (again.avoid, again.decision.reason) == ({"p", "q"}, "links_down")


def test_links_of_instances_that_went_are_not_kept_for_ever() -> None:
    made = build_migrator("slackline")
    made.handle([up("d0"), up("p", Role.PREFILL)], 0.0)
    for index in range(20):
        name = f"old{index}"
        made.handle([up(name, Role.PREFILL)], 0.0)
        made.handle([ev.InstanceDown(name)], 0.0)
        made.handle([ev.LinkSeen(name, "d0", LinkState.DOWN)], 0.0)  # its engine still says so
    made.handle([ev.LinkSeen("p", "d0", LinkState.UP, 1e9)], 0.0)
    assert {view.source for view in made.links.views(0.0)} <= {"p", "old19"}
