"""What the prefill instance keeps no longer is prefilled again; no link is blamed for it."""

import pytest

from controller.core import events as ev
from controller.dispatch.disaggregation.migrator_config import MigratorConfig
from controller.dispatch.disaggregation.transfers import UNEXPLAINED
from controller.dispatch.lifecycle import MAX_PREFILLS, State
from tests.controller.dispatch.disaggregation.decoders import done, migrator, of, places

LEASE_S = 30.0  # the engines' default


def failed(made, reason, now, target="d0"):
    return made.handle([ev.TransferFailed("a", target, reason)], now)


def fail_until_it_is_over(made, reason=UNEXPLAINED, now=0.0):
    """How many failures that took, and the last reply."""
    for count in range(1, 20):
        reply = failed(made, reason, now)
        if of(reply, ev.PrefillAgain) or of(reply, ev.GiveUp):
            return count, reply
        now = reply.wake_at
        assert places(made.handle([ev.Woke()], now)) == [("a", "d0")]
    raise AssertionError("it is tried forever")


@pytest.mark.parametrize("started", [False, True])
def test_kv_that_its_engine_calls_lost_is_prefilled_again_at_once_and_the_link_stays_open(started):
    made = migrator(migrator={"link_failures": 1})
    made.handle([done("a")], 0.0)
    if started:
        made.handle([ev.TransferStarted("a", "d0")], 0.0)
    reply = failed(made, "kv_lost", 0.1)
    assert [a.decision.reason for a in of(reply, ev.PrefillAgain)] == ["kv_lost"]
    assert (of(reply, ev.GiveUp), made.state_of("a")) == ([], None)
    assert made.links.usable(("p", "d0"), 0.1)
    assert all(each.waiting == each.running == 0 for each in made.fleet(0.1))


def test_a_refusal_of_the_engine_counts_and_the_link_stays_open():
    made = migrator(decoders=2, migrator={"link_failures": 1})
    made.handle([done("a")], 0.0)
    assert places(failed(made, "refused", 0.1)) == [("a", "d1")]
    assert made.links.usable(("p", "d0"), 0.1)
    failed(made, "cut", 0.2, "d1")
    assert not made.links.usable(("p", "d1"), 0.2), "of a way that broke it does not"


@pytest.mark.parametrize("before", range(MAX_PREFILLS - 1))
def test_an_engine_that_does_not_say_why_gets_a_second_try_before_the_kv_is_suspected(before):
    made = migrator()
    event = done("a")
    event.request.attempts = before
    made.handle([event], 0.0)
    count, reply = fail_until_it_is_over(made)
    assert (count, [a.decision.reason for a in of(reply, ev.PrefillAgain)]) == (2, ["kv_lost"])
    assert made.links.usable(("p", "d0"), 1.0)


def test_the_last_kv_that_a_request_may_have_gets_all_tries():
    made = migrator(migrator={"max_failures": 4})
    event = done("a")
    event.request.attempts = MAX_PREFILLS - 1
    made.handle([event], 0.0)
    count, reply = fail_until_it_is_over(made)
    assert (count, len(of(reply, ev.PrefillAgain)), len(of(reply, ev.GiveUp))) == (4, 0, 1)
    assert made.state_of("a") is None


@pytest.mark.parametrize("why", ["cut", "corrupt", "timeout", "unreachable"])
def test_what_is_known_to_be_another_fault_is_never_taken_for_lost_kv(why):
    made = migrator()
    made.handle([done("a")], 0.0)
    count, reply = fail_until_it_is_over(made, why)
    assert (count, [a.decision.reason for a in of(reply, ev.GiveUp)]) == (MigratorConfig().max_failures, [why])


def test_an_engine_that_turned_it_away_may_have_had_its_kv_freed():
    """It is asked on until it has room: only then the prompt is computed again."""
    made = migrator()
    made.handle([done("a")], 0.0)
    now = 0.0
    for _ in range(10):
        reply = failed(made, "no_room", now)
        assert of(reply, ev.PrefillAgain) == []
        now = reply.wake_at
        assert places(made.handle([ev.Woke()], now)) == [("a", "d0")]
    assert [a.decision.reason for a in of(failed(made, UNEXPLAINED, now), ev.PrefillAgain)] == ["kv_lost"]
    assert made.links.usable(("p", "d0"), now)


def test_an_answer_in_one_piece_that_was_turned_away_is_placed_again():
    made = migrator(migrator={"link_failures": 1})
    made.handle([done("a")], 0.0)
    made.handle([ev.TransferStarted("a", "d0"), ev.TransferDone("a", "d0", assumed=True)], 0.0)
    reply = failed(made, "no_room", 0.1)
    assert (of(reply, ev.PrefillAgain), made.state_of("a")) == ([], State.WAITING)
    assert made.links.usable(("p", "d0"), 0.1)
    assert places(made.handle([ev.Woke()], reply.wake_at)) == [("a", "d0")]


def test_nothing_is_held_for_longer_than_engines_keep_it():
    assert MigratorConfig().hold_s < LEASE_S
