"""A word that is old is doubted: one prefill finds out whether it is true still, what is computed waits for nobody."""

from __future__ import annotations

import pytest

from controller.core import events as ev
from controller.core.types import InstanceSpec, Role
from controller.dispatch import Migrator
from tests.controller.dispatch.disaggregation.decoders import STEP, done, of, places, up
from tests.controller.dispatch.disaggregation.test_incompatible_peers import incompatible_with_p
from tests.controller.dispatch.disaggregation.test_links import fleet
from tests.controller.dispatch.disaggregation.test_other_model import not_readable
from tests.controller.dispatch.fleet import request

OVER = 100.0  # when the word of d0 is believed no more


def sent(made: Migrator, name: str, now: float, source: str = "p") -> bool:
    """Is its prefill left where it was sent?"""
    return of(made.handle([ev.PrefillSent(request(name, arrival=now), source)], now), ev.PrefillAgain) == []


def test_the_first_one_is_computed_there_the_others_leave() -> None:
    made = incompatible_with_p("q")
    assert [sent(made, name, OVER) for name in ("tries", "b", "c")] == [True, False, False]
    assert places(made.handle([done("tries", OVER + 1.0)], OVER + 1.0)) == [("tries", "d0")]
    assert not sent(made, "e", OVER + 1.1), "its KV is on its way"


def test_who_leaves_a_trial_is_sent_elsewhere_and_not_counted() -> None:
    made = incompatible_with_p("q")
    sent(made, "tries", OVER)
    (again,) = of(made.handle([ev.PrefillSent(request("b"), "p")], OVER), ev.PrefillAgain)
    assert (again.avoid, again.decision.reason, again.counts) == ({"p"}, "other_model", False)


def test_once_its_kv_was_read_all_are_computed_there() -> None:
    made = incompatible_with_p("q")
    sent(made, "tries", OVER)
    made.handle([done("tries", OVER)], OVER)
    made.handle([ev.TransferStarted("tries", "d0"), ev.TransferDone("tries", "d0")], OVER + 0.1)
    assert [sent(made, name, OVER + 0.2) for name in ("b", "c")] == [True, True]


def test_a_landing_that_was_assumed_counts_when_the_answer_is_there() -> None:
    """Until then the next one tries it too."""
    made = incompatible_with_p("q")
    sent(made, "tries", OVER)
    made.handle([done("tries", OVER)], OVER)
    made.handle([ev.TransferStarted("tries", "d0"), ev.TransferDone("tries", "d0", assumed=True)], OVER)
    assert [sent(made, name, OVER + 0.5) for name in ("b", "c")] == [True, False]
    made.handle([ev.Finished("tries", 10)], OVER + 1.0)
    assert [sent(made, name, OVER + 1.0) for name in ("e", "f")] == [True, True]


def test_once_it_was_refused_the_pair_is_held_apart_for_as_long_again() -> None:
    made = incompatible_with_p("q")
    sent(made, "tries", OVER)
    made.handle([done("tries", OVER)], OVER)
    not_readable(made, "tries", "d0", OVER + 1.0)
    later = OVER + 1.0 + made.config.incompatible_s
    assert [sent(made, name, later - 0.1) for name in ("b", "c")] == [False, False]
    assert [sent(made, name, later) for name in ("e", "f")] == [True, False]


@pytest.mark.parametrize("ends", [ev.Cancelled("tries"), ev.Failed("tries", True, "cut")])
def test_one_that_vanishes_leaves_the_trial_to_the_next(ends: ev.Event) -> None:
    made = incompatible_with_p("q")
    sent(made, "tries", OVER)
    made.handle([ends], OVER + 0.1)
    assert [sent(made, name, OVER + 0.2) for name in ("b", "c")] == [True, False]


def test_where_no_one_else_prefills_all_are_computed_there() -> None:
    made = incompatible_with_p()
    assert [sent(made, name, OVER) for name in ("a", "b", "c")] == [True, True, True]


def test_beside_one_that_reads_it_there_is_nothing_to_find_out() -> None:
    """At the price of a transfer, not of a prefill."""
    made = incompatible_with_p("q")
    made.handle([up("d1")], 1.0)
    assert [sent(made, name, OVER) for name in ("a", "b", "c")] == [True, True, True]


def test_a_source_where_one_tries_is_a_way_for_what_is_computed_elsewhere() -> None:
    """Of q the word is old, and one is being computed there for a long time; that of p is believed."""
    made = incompatible_with_p("q")
    made.handle([done("second", 0.2, source="q")], 0.2)
    not_readable(made, "second", "d0", 0.3)
    made.handle([ev.Cancelled("second"), done("third", 70.0)], 70.0)
    not_readable(made, "third", "d0", 70.1)
    assert sent(made, "tries", OVER, "q")
    (again,) = of(made.handle([ev.PrefillSent(asked := request("b"), "p")], OVER), ev.PrefillAgain)
    assert again.avoid == {"p"}
    assert made.handle([ev.PrefillSent(asked, "q")], OVER).actions == [], "there is nobody else"


def test_what_is_computed_waits_for_no_trial() -> None:
    """However long that lasts: who waits for room beside it would be given up before anybody knows."""
    made = incompatible_with_p()
    spec = up("d0").spec
    spec.kv_capacity_tokens = 1000
    made.handle([ev.InstanceDown("d0"), ev.InstanceUp(spec)], 0.5)
    made.handle([done("again", 0.5)], 0.5)
    not_readable(made, "again", "d0", 0.6)
    made.handle([ev.Cancelled("again"), ev.KvReleased("again", "p")], 0.6)
    made.handle([done("fills", OVER, prompt=900)], OVER)
    made.handle([ev.TransferStarted("fills", "d0")], OVER)
    waiting = [done(name, OVER, prompt=300) for name in ("x", "y", "z")]
    assert places(made.handle(waiting, OVER)) == []
    late = OVER + 2 * made.config.incompatible_hold_s
    room = made.handle([ev.TransferDone("fills", "d0", assumed=True), ev.Finished("fills", 10)], late)
    assert (len(places(room)), of(room, ev.GiveUp)) == (3, [])


def test_a_word_is_not_taken_back_by_what_was_sent_before_it() -> None:
    """p woke with other weights while `old` was on its way."""
    made = fleet("q", decoders=1)
    made.handle([done("old"), done("new")], 0.0)
    made.handle([ev.TransferStarted("old", "d0")], 0.0)
    not_readable(made, "new", "d0", 0.1)
    made.handle([ev.TransferDone("old", "d0")], 0.2)
    assert not sent(made, "b", 0.3)


def test_dead_ends_are_of_the_engines_of_one_backend() -> None:
    """KV of p is read by no engine of its kind; q's kind has one."""
    made = fleet(decoders=1)
    made.handle([done("a")], 0.0)
    kinds = {"q": Role.PREFILL, "e": Role.DECODE, "r": Role.PREFILL}
    backends = {"q": "sglang", "e": "sglang", "r": "other"}
    made.handle(
        [
            ev.InstanceUp(InstanceSpec(name, "m", backend=backends[name], latency=STEP, max_num_seqs=32, role=role))
            for name, role in kinds.items()
        ],
        0.0,
    )
    (again,) = of(not_readable(made, "a", "d0", 0.1), ev.PrefillAgain)
    assert again.avoid == {"p", "r"}
