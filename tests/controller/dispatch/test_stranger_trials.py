"""A pair that was held apart for its time is tried by one transfer, not by all that are there at that moment."""

from __future__ import annotations

from controller.core import events as ev
from controller.dispatch import Migrator
from tests.controller.dispatch.fleet import request
from tests.controller.dispatch.test_links import done, of, targets, up
from tests.controller.dispatch.test_other_model import stranger
from tests.controller.dispatch.test_strangers import apart

OVER = 100.0  # when the word of d0 is believed no more


def sent(made: Migrator, name: str, now: float) -> bool:
    """Is its prefill left where it was sent, at p?"""
    return of(made.handle([ev.PrefillSent(request(name, arrival=now), "p")], now), ev.PrefillAgain) == []


def test_the_first_one_is_computed_there_the_others_leave() -> None:
    made = apart("q")
    assert [sent(made, name, OVER) for name in ("tries", "b", "c")] == [True, False, False]
    assert targets(made.handle([done("tries", OVER + 1.0)], OVER + 1.0)) == [("tries", "d0")]
    assert not sent(made, "e", OVER + 1.1), "its KV is on its way"


def test_once_its_kv_was_read_all_are_computed_there() -> None:
    made = apart("q")
    sent(made, "tries", OVER)
    made.handle([done("tries", OVER)], OVER)
    made.handle([ev.TransferStarted("tries", "d0"), ev.TransferDone("tries", "d0")], OVER + 0.1)
    assert [sent(made, name, OVER + 0.2) for name in ("b", "c")] == [True, True]


def test_a_landing_that_was_assumed_counts_when_the_answer_is_there() -> None:
    made = apart("q")
    sent(made, "tries", OVER)
    made.handle([done("tries", OVER)], OVER)
    made.handle([ev.TransferStarted("tries", "d0"), ev.TransferDone("tries", "d0", assumed=True)], OVER)
    made.handle([ev.Finished("tries", 10)], OVER + 1.0)
    assert [sent(made, name, OVER + 1.0) for name in ("b", "c")] == [True, True]


def test_once_it_was_refused_the_pair_is_held_apart_for_as_long_again() -> None:
    made = apart("q")
    sent(made, "tries", OVER)
    made.handle([done("tries", OVER)], OVER)
    stranger(made, "tries", "d0", OVER + 1.0)
    later = OVER + 1.0 + made.config.strangers_s
    assert [sent(made, name, later - 0.1) for name in ("b", "c")] == [False, False]
    assert [sent(made, name, later) for name in ("e", "f")] == [True, False]


def test_one_that_vanishes_leaves_the_trial_to_the_next() -> None:
    made = apart("q")
    sent(made, "tries", OVER)
    made.handle([ev.Cancelled("tries")], OVER + 0.1)
    assert [sent(made, name, OVER + 0.2) for name in ("b", "c")] == [True, False]


def test_beside_one_that_reads_it_nobody_leaves_and_one_is_placed_for_a_trial() -> None:
    made = apart("q")
    made.handle([up("d1")], 1.0)
    assert [sent(made, name, OVER) for name in ("a", "b", "c")] == [True, True, True]
    ended = [done(name, OVER, tpot=0.0215) for name in ("a", "b", "c")]  # as fast as one sequence at a time is
    assert targets(made.handle(ended, OVER)) == [("a", "d1"), ("b", "d0")]
    made.handle([ev.TransferStarted("b", "d0"), ev.TransferDone("b", "d0"), ev.Finished("b", 10)], OVER + 0.5)
    assert made.state_of("b") is None


def test_who_has_all_computed_does_not_wait_for_one_whose_prefill_may_last() -> None:
    """With nobody else to prefill it, it would be given up before the other one begins to find out."""
    made = apart()
    assert sent(made, "long", OVER)
    assert targets(made.handle([done("short", OVER)], OVER + 0.1)) == [("short", "d0")]
    assert targets(made.handle([done("long", OVER)], OVER + 0.2)) == [], "now the other one tries it"
    made.handle([ev.TransferStarted("short", "d0")], OVER + 0.3)
    assert targets(made.handle([ev.TransferDone("short", "d0")], OVER + 0.3)) == [("long", "d0")]


def test_the_one_that_tries_is_not_taken_for_one_of_those_that_wait_for_it() -> None:
    """It found no room, and is placed again in a pass that has looked at another one first."""
    made = apart()
    assert targets(made.handle([done("tries", OVER, tpot=0.2)], OVER)) == [("tries", "d0")]
    assert targets(made.handle([done("waits", OVER, tpot=0.1)], OVER)) == []
    made.handle([ev.TransferStarted("tries", "d0")], OVER)
    made.handle([ev.TransferFailed("tries", "d0", "no_room")], OVER + 0.1)
    again = OVER + 0.1 + made.config.retry_s
    assert targets(made.handle([ev.Woke()], again)) == [("tries", "d0")]
