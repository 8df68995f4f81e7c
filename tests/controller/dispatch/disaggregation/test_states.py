"""Each state of a decode stage has its time-out and its undo: nothing hangs, and nothing stays reserved or kept."""

from __future__ import annotations

import pytest

from controller.core import events as ev
from controller.core.types import Role
from controller.dispatch import build_migrator
from controller.dispatch.disaggregation.migrator_config import MigratorConfig
from controller.dispatch.lifecycle import TWO_STAGES, State
from tests.controller.dispatch.disaggregation.decoders import done, migrator, of, places, sent, up
from tests.controller.dispatch.fleet import request

TIMES = {
    "prefilling_timeout_s": 4.0,
    "waiting_timeout_s": 20.0,
    "placed_timeout_s": 1.0,
    "reserved_timeout_s": 2.0,
    "moving_timeout_s": 3.0,
    "release_timeout_s": 0.5,
    "release_tries": 3,
}


def made(decoders=2, **more):
    built = migrator("slackline", decoders, migrator=TIMES | more)
    built.handle([up("p", Role.PREFILL), up("q", Role.PREFILL)], 0.0)
    return built


def nothing_is_left(built, now):
    assert all(each.waiting == each.running == 0 for each in built.fleet(now))
    assert not built.busy
    assert built.handle([], now).wake_at is None


# ---- prefilling -----------------------------------------------------------------------------------------------------


def test_a_prefill_that_sticks_before_its_offer_is_computed_elsewhere():
    built = made()
    assert built.handle([sent(prefill_s=0.5)], 0.0).wake_at == 4.5, "what it is expected to take, and the time-out"
    assert built.handle([ev.Woke()], 4.49).actions == []
    reply = built.handle([ev.Woke()], 4.5)
    (again,) = of(reply, ev.PrefillAgain)
    assert (again.avoid, again.decision.reason, again.decision.figures["state"]) == (
        {"p"},
        "prefilling_timeout",
        "prefilling",
    )
    assert of(reply, ev.FreeKv) == [ev.FreeKv("a", "p")], "it may just have ended"
    assert of(reply, ev.Abort) == [], "no decode instance knows of it"
    built.handle([ev.KvReleased("a", "p")], 4.6)
    nothing_is_left(built, 4.6)


@pytest.mark.parametrize("state", [State.WAITING, State.PLACED, State.RESERVED, State.MOVING])
def test_a_prefill_that_sticks_after_its_early_offer_takes_its_decode_stage_with_it(state):
    """Whatever became of the offer meanwhile: the decode instance's blocks go too."""
    built = made(decoders=0 if state is State.WAITING else 1, placed_timeout_s=60.0, reserved_timeout_s=60.0)
    if state is State.WAITING:
        built.handle([up("d0", slots=1)], 0.0)
        built.handle([done("other", tpot=0.05, output=100)], 0.0)
        built.handle([ev.TransferStarted("other", "d0"), ev.TransferDone("other", "d0", released=True)], 0.0)
    built.handle([sent(tpot=0.05), ev.PrefillEnding("a", "p")], 0.0)
    if state in (State.RESERVED, State.MOVING):
        built.handle([ev.TransferStarted("a", "d0", moves=state is State.MOVING)], 0.1)
    assert built.state_of("a") is state
    assert of(built.handle([ev.Woke()], 4.4), ev.PrefillAgain) == []
    reply = built.handle([ev.Woke()], 4.5)
    assert [each.decision.reason for each in of(reply, ev.PrefillAgain)] == ["prefilling_timeout"]
    assert of(reply, ev.Abort) == ([] if state is State.WAITING else [ev.Abort("a", "d0", "prefilling_timeout")])
    assert built.state_of("a") is None
    built.handle([ev.KvReleased("a", "p"), ev.Finished("other", 100)], 4.6)
    nothing_is_left(built, 4.6)


def test_a_prefill_that_ends_in_time_is_left_alone_and_so_is_one_sent_again():
    built = made()
    built.handle([sent()], 0.0)
    built.handle([done("a", 0.4)], 0.4)
    built.handle([ev.TransferStarted("a", "d0"), ev.TransferDone("a", "d0", released=True)], 0.5)
    built.handle([sent("b")], 1.0)
    built.handle([sent("b", source="q")], 4.0)
    assert built.handle([ev.Woke()], 8.0).actions == []
    (again,) = of(built.handle([ev.Woke()], 8.5), ev.PrefillAgain)
    assert (again.request.id, again.avoid) == ("b", {"q"})


def test_a_pairs_prefill_has_its_time_from_its_placement_on_each_time():
    built = made(decoders=2, placed_timeout_s=60.0)
    paired = ev.PrefillSent(request("a"), "p", paired=True, prefill_s=0.5)
    assert places(built.handle([paired], 0.0)) == [("a", "d0")]
    built.handle([ev.TransferStarted("a", "d0")], 0.0)
    assert places(built.handle([ev.TransferFailed("a", "d0", "cut")], 4.0)) == [("a", "d1")]
    built.handle([ev.TransferStarted("a", "d1")], 4.0)
    assert of(built.handle([ev.Woke()], 8.4), ev.PrefillAgain) == []
    reply = built.handle([ev.Woke()], 8.5)
    assert of(reply, ev.Abort) == [ev.Abort("a", "d1", "prefilling_timeout")]
    assert len(of(reply, ev.PrefillAgain)) == 1


# ---- waiting --------------------------------------------------------------------------------------------------------


def test_whoever_finds_no_room_again_and_again_is_given_up_in_the_end():
    """An instance that always says it is full is no failure, but no place either."""
    built, now = made(decoders=1), 1.0
    reply = built.handle([done("a", now)], now)
    while not of(reply, ev.GiveUp):
        assert now <= 21.0
        if places(reply):
            reply = built.handle([ev.TransferFailed("a", "d0", "no_room")], now)
        else:
            now = reply.wake_at
            reply = built.handle([ev.Woke()], now)
    assert now == pytest.approx(21.0)
    assert [each.decision.reason for each in of(reply, ev.GiveUp)] == ["waiting_timeout"]
    assert of(reply, ev.FreeKv) == [ev.FreeKv("a", "p")]
    built.handle([ev.KvReleased("a", "p")], now)
    nothing_is_left(built, now)


# ---- reserved -------------------------------------------------------------------------------------------------------


def test_a_reservation_that_is_never_pulled_is_aborted_and_another_instance_pulls():
    built = made(decoders=2)
    built.handle([done("a")], 0.0)
    built.handle([ev.TransferStarted("a", "d0", moves=False)], 0.5)
    assert built.state_of("a") is State.RESERVED
    assert built.handle([], 2.49).wake_at == 2.5
    reply = built.handle([ev.Woke()], 2.5)
    assert of(reply, ev.Abort) == [ev.Abort("a", "d0", "reserved_timeout")]
    assert places(reply) == [("a", "d1")]
    assert [each.waiting for each in built.fleet(2.5)] == [0, 1]
    assert built.handle([ev.TransferMoves("a", "d0")], 2.6).actions == [ev.Abort("a", "d0")], "too late"


def test_from_the_first_word_of_its_source_on_it_moves_and_has_the_time_of_that():
    built = made(decoders=1)
    built.handle([done("a")], 0.0)
    built.handle([ev.TransferStarted("a", "d0", moves=False)], 0.5)
    built.handle([ev.TransferMoves("a", "d0")], 2.4)
    assert built.state_of("a") is State.MOVING
    assert of(built.handle([ev.Woke()], 5.3), ev.Abort) == []
    assert of(built.handle([ev.Woke()], 5.4), ev.Abort) == [ev.Abort("a", "d0", "moving_timeout")]


def test_news_in_another_order_or_twice_change_nothing():
    built = made(decoders=1)
    built.handle([done("a")], 0.0)
    built.handle([ev.TransferMoves("a", "d0"), ev.TransferStarted("a", "d0", moves=False)], 0.1)
    assert built.state_of("a") is State.MOVING
    built.handle([ev.TransferDone("a", "d0"), ev.TransferMoves("a", "d0"), ev.TransferDone("a", "d0")], 0.2)
    assert built.state_of("a") is State.COMMITTED


# ---- committed, released --------------------------------------------------------------------------------------------


def test_a_commit_is_released_when_its_source_has_freed():
    built = made(decoders=1)
    built.handle([done("a")], 0.0)
    reply = built.handle([ev.TransferStarted("a", "d0"), ev.TransferDone("a", "d0")], 0.1)
    assert reply.actions == [ev.FreeKv("a", "p")]
    assert built.state_of("a") is State.COMMITTED
    assert built.handle([ev.KvReleased("a", "p")], 0.2).actions == []
    assert built.state_of("a") is State.RELEASED
    assert built.handle([ev.Woke()], 50.0).actions == []
    built.handle([ev.Finished("a", 10)], 50.0)
    nothing_is_left(built, 50.0)


def test_a_commit_that_never_gets_its_release_is_asked_again_then_left_to_the_lease():
    built = made(decoders=1)
    built.handle([done("a")], 0.0)
    reply = built.handle([ev.TransferStarted("a", "d0"), ev.TransferDone("a", "d0")], 1.0)
    told = []
    while reply.wake_at is not None:
        now = reply.wake_at
        reply = built.handle([ev.Woke()], now)
        told += [(now, action) for action in reply.actions]
    assert told == [
        (1.5, ev.FreeKv("a", "p")),
        (2.0, ev.FreeKv("a", "p")),
        (2.5, ev.LeftToLease("a", "p", 3)),
    ]
    assert built.state_of("a") is State.COMMITTED
    built.handle([ev.Finished("a", 10)], 9.0)
    nothing_is_left(built, 9.0)


def test_a_release_outlives_the_answer_but_not_its_instance():
    for gone in (False, True):
        built = made(decoders=1)
        built.handle([done("a")], 0.0)
        built.handle([ev.TransferDone("a", "d0"), ev.Finished("a", 10)], 1.0)
        assert built.state_of("a") is None
        assert built.busy
        if gone:
            built.handle([ev.InstanceDown("p")], 1.1)
        assert of(built.handle([ev.Woke()], 1.5), ev.FreeKv) == ([] if gone else [ev.FreeKv("a", "p")])


def test_a_prefill_that_is_stopped_may_have_ended_so_its_kv_is_freed_until_that_is_confirmed():
    built = made()
    built.handle([ev.PrefillSent(request("a"), "p")], 0.0)
    assert built.handle([ev.Cancelled("a")], 0.1).actions == [ev.FreeKv("a", "p")]
    assert built.handle([], 0.7).actions == [ev.FreeKv("a", "p")], "its engine was not reached"
    built.handle([ev.KvReleased("a", "p")], 0.8)
    nothing_is_left(built, 0.8)


def test_what_was_prefilled_at_an_instance_that_is_gone_is_not_freed_there():
    built = made(1)
    built.handle([ev.PrefillSent(request("a"), "p"), ev.PrefillEnding("a", "p")], 0.0)
    reply = built.handle([ev.InstanceDown("p")], 0.1)
    assert [each.decision.reason for each in of(reply, ev.PrefillAgain)] == ["kv_lost"]
    nothing_is_left(built, 0.1)


def test_where_no_one_can_say_it_is_not_asked_again_and_not_said_to_be_released():
    built = made(decoders=1)
    built.handle([done("a")], 0.0)
    built.handle([ev.TransferDone("a", "d0"), ev.KvReleased("a", "p", known=False)], 1.0)
    assert built.handle([ev.Woke()], 9.0).actions == []
    assert built.state_of("a") is State.COMMITTED


@pytest.mark.parametrize("reason", ["no_room", "kv_lost", "unreachable"])
def test_what_was_freed_by_an_order_for_its_earlier_attempt_is_prefilled_again_when_its_decode_stage_fails(reason):
    """The landing was assumed, so the decode stage may not have the KV that is gone now."""
    built = made(decoders=1)
    built.handle([done("a")], 0.0)
    built.handle([ev.TransferDone("a", "d0", assumed=True), ev.KvReleased("a", "p")], 1.0)
    reply = built.handle([ev.TransferFailed("a", "d0", reason)], 1.1)
    assert [each.request.id for each in of(reply, ev.PrefillAgain)] == ["a"]
    nothing_is_left(built, 1.1)


def test_engines_that_say_twice_that_they_began_are_believed():
    built = made(decoders=1)
    built.handle([done("a"), ev.TransferStarted("a", "d0", moves=False), ev.TransferStarted("a", "d0")], 0.0)
    assert built.state_of("a") is State.PLACED, "it was placed after these events"
    built.handle([ev.TransferStarted("a", "d0", moves=False), ev.TransferStarted("a", "d0")], 0.1)
    assert built.state_of("a") is State.MOVING


def test_who_has_heard_from_the_engine_that_pulled_need_not_be_told():
    built = made(decoders=1)
    built.handle([done("a")], 0.0)
    assert built.handle([ev.TransferDone("a", "d0", released=True)], 1.0).actions == []
    assert built.state_of("a") is State.RELEASED
    assert built.handle([ev.Cancelled("a")], 1.1).actions == [ev.Abort("a", "d0")]


def test_what_may_be_pulled_still_is_freed_when_the_answer_is_there():
    for news in (ev.Finished("a", 10), ev.Failed("a", False), ev.Cancelled("a"), ev.TransferFailed("a", "d0", "cut")):
        built = made(decoders=1)
        built.handle([done("a")], 0.0)
        assert built.handle([ev.TransferDone("a", "d0", assumed=True)], 0.1).actions == []
        assert of(built.handle([news], 9.0), ev.FreeKv) == [ev.FreeKv("a", "p")]


def test_kv_that_is_computed_there_once_more_is_not_freed_for_what_was_there_before():
    built = made(decoders=1)
    built.handle([done("a")], 0.0)
    built.handle([ev.TransferDone("a", "d0")], 0.1)
    built.handle([sent("a")], 0.2)
    assert of(built.handle([ev.Woke()], 2.0), ev.FreeKv) == []
    built.handle([done("a", 2.0)], 2.0)
    reply = built.handle([ev.TransferDone("a", "d0"), sent("a")], 2.1)
    assert of(reply, ev.FreeKv) == [], "decided in the same pass"


# ---- settings -------------------------------------------------------------------------------------------------------


def test_every_state_but_the_last_has_a_time_out_that_somebody_may_set():
    """Of a committed one it is its release's."""
    named = {state: f"{state.value}_timeout_s" for state in TWO_STAGES} | {State.COMMITTED: "release_timeout_s"}
    for state, name in named.items():
        assert hasattr(MigratorConfig(), name) is (state is not State.RELEASED)


@pytest.mark.parametrize("name", [*TIMES])
def test_no_time_out_is_nothing(name):
    with pytest.raises(ValueError, match=name):
        build_migrator("slackline", {"migrator": {name: 0 if name == "release_tries" else 0.0}})
