"""A link that was closed is tried by one: what becomes of it opens the link, closes it again, or says nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from controller.core import events as ev
from controller.core.kv_links import LinkState
from controller.core.types import Request, Role
from controller.dispatch import Migrator
from controller.dispatch.disaggregation.link_book import LinkBook, Trial
from controller.dispatch.disaggregation.reach import Reach
from controller.dispatch.lifecycle import State
from tests.controller.dispatch.disaggregation.decoders import done, of, places, up
from tests.controller.dispatch.disaggregation.test_links import fleet, on_its_way, seen
from tests.controller.dispatch.fleet import request

PAIR = ("p", "d0")
OPEN_AT = 2.0  # it is closed at 0.0, for two seconds


def closed() -> Migrator:
    """The first transfer over the link to d0 failed, and went to d1 in its stead, where it has ended."""
    made = fleet(migrator={"link_failures": 1})
    first = made.handle([done("first")], 0.0)
    assert places(first) == [("first", "d0")]
    made.handle([ev.TransferStarted("first", "d0"), ev.TransferFailed("first", "d0", "transfer_failed")], 0.0)
    made.handle([ev.TransferDone("first", "d1"), ev.Finished("first", 10)], 0.1)
    assert not made.links.usable(PAIR, OPEN_AT - 0.1)
    return made


def asked(made: Migrator, now: float, *names: str) -> list[str]:
    """Whose KV goes over the link that was closed; the others go over the one beside it, and have ended there."""
    reply = made.handle([done(name, now) for name in names], now)
    placed = places(reply)
    assert {name for name, _ in placed} >= set(names), "nobody need wait: there is another way"
    end_beside(made, now, *(name for name, target in placed if target == "d1"))
    return [name for name, target in placed if target == "d0"]


def end_beside(made: Migrator, now: float, *names: str) -> None:
    made.handle([ev.TransferDone(name, "d1") for name in names], now)
    made.handle([ev.Finished(name, 10) for name in names], now)


def many(first: str) -> list[str]:
    return [f"{first}{index}" for index in range(10)]


def tried() -> tuple[Migrator, str]:
    made = closed()
    (trial,) = asked(made, OPEN_AT, *many("a"))
    return made, trial


def test_of_many_that_find_it_open_again_one_takes_it_and_those_that_come_later_do_not() -> None:
    made, _ = tried()
    assert asked(made, OPEN_AT + 0.5, *many("b")) == []
    (view,) = [view for view in made.links.views(OPEN_AT + 0.5) if view.target == "d0"]
    assert view.closed, "for everybody else"


def test_one_that_arrives_opens_it_for_all() -> None:
    made, trial = tried()
    made.handle([ev.TransferStarted(trial, "d0"), ev.TransferDone(trial, "d0")], OPEN_AT + 0.1)
    assert len(asked(made, OPEN_AT + 0.1, *many("b"))) > 1


def test_one_that_fails_closes_it_again_for_twice_as_long_until_another_tries_it() -> None:
    made, trial = tried()
    again = OPEN_AT + 0.1
    made.handle([ev.TransferStarted(trial, "d0"), ev.TransferFailed(trial, "d0", "transfer_failed")], again)
    end_beside(made, again, trial)
    assert asked(made, again + 3.9, *many("b")) == []
    assert len(asked(made, again + 4.0, *many("c"))) == 1


def test_one_that_went_before_and_fails_during_the_trial_says_nothing_of_it() -> None:
    made = fleet(migrator={"link_failures": 1})
    placed = places(made.handle([done(name) for name in many("a")], 0.0))
    first, straggler, *rest = [name for name, target in placed if target == "d0"]
    made.handle([ev.TransferStarted(name, "d0") for name in (first, straggler)], 0.0)
    made.handle([ev.TransferDone(name, "d0") for name in rest] + [ev.Finished(name, 10) for name in rest], 0.0)
    made.handle([ev.TransferFailed(first, "d0", "cut")], 0.0)
    end_beside(made, 0.1, first, *(name for name, target in placed if target == "d1"))
    (trial,) = asked(made, OPEN_AT, *many("b"))
    made.handle([ev.TransferFailed(straggler, "d0", "cut")], OPEN_AT + 0.1)
    end_beside(made, OPEN_AT + 0.1, straggler)
    assert made.links.tried(PAIR, made.config.link_patience_s, OPEN_AT + 0.1), "still"
    assert asked(made, OPEN_AT + 0.2, *many("c")) == []
    made.handle([ev.TransferStarted(trial, "d0"), ev.TransferDone(trial, "d0")], OPEN_AT + 0.3)
    assert made.links.usable(PAIR, OPEN_AT + 0.3)


@pytest.mark.parametrize(
    "end",
    [
        ev.Cancelled,
        lambda name: ev.Failed(name, True, "prefill_failed"),
        lambda name: ev.TransferFailed(name, "d0", "refused"),
        lambda name: ev.TransferFailed(name, "d0", "kv_lost"),
        lambda name: ev.TransferFailed(name, "d0", "other_model"),
    ],
    ids=["cancelled", "starts_over", "refused", "kv_lost", "other_model"],
)
def test_one_that_vanishes_says_nothing_and_the_next_may_try(end: Callable[[str], ev.Event]) -> None:
    made, trial = tried()
    made.handle([end(trial)], OPEN_AT + 0.1)
    made.handle([up("d0")], OPEN_AT + 0.1)  # else the word of another model stands
    end_beside(made, OPEN_AT + 0.1, trial)  # where it went there
    assert made.links.usable(PAIR, OPEN_AT + 0.1)
    assert len(asked(made, OPEN_AT + 0.1, *many("b"))) == 1


def test_one_that_found_no_room_goes_elsewhere_or_tries_once_more_and_no_one_beside_it() -> None:
    made, trial = tried()
    made.handle([ev.TransferFailed(trial, "d0", "no_room")], OPEN_AT + 0.1)
    reply = made.handle([ev.Woke(), *(done(name, OPEN_AT + 0.2) for name in many("b"))], OPEN_AT + 0.2)
    assert [target for _, target in places(reply)].count("d0") == 1


def test_with_its_prefill_instance_the_trial_is_forgotten() -> None:
    made, _ = tried()
    made.handle([ev.InstanceDown("p")], OPEN_AT + 0.1)
    made.handle([up("p", Role.PREFILL)], OPEN_AT + 0.2)
    assert len(asked(made, OPEN_AT + 0.2, *many("b"))) > 1


def test_a_landing_that_is_only_assumed_holds_the_link_no_longer_than_others_would_wait_for_it() -> None:
    """The answer would tell, but may take minutes: what has not failed by then opens the link for all."""
    made, trial = tried()
    lasts = made.config.link_patience_s
    made.handle([ev.TransferStarted(trial, "d0"), ev.TransferDone(trial, "d0", assumed=True)], OPEN_AT)
    assert asked(made, OPEN_AT + lasts - 0.1, *many("b")) == []
    assert len(asked(made, OPEN_AT + lasts, *many("c"))) > 1


def test_what_fails_after_a_landing_was_assumed_closes_the_link_at_once_and_for_twice_as_long() -> None:
    made, trial = tried()
    made.handle([ev.TransferStarted(trial, "d0"), ev.TransferDone(trial, "d0", assumed=True)], OPEN_AT)
    (late, *_) = asked(made, OPEN_AT + made.config.link_patience_s, *many("b"))
    failed = OPEN_AT + made.config.link_patience_s + 1.0
    made.handle([ev.TransferStarted(late, "d0"), ev.TransferFailed(late, "d0", "transfer_failed")], failed)
    assert not made.links.usable(PAIR, failed + 3.9)
    assert made.links.usable(PAIR, failed + 4.0)


def test_an_assumed_landing_whose_answer_came_opens_it_and_one_that_failed_closes_it() -> None:
    for last, usable in ((lambda n: ev.Finished(n, 10), True), (lambda n: ev.TransferFailed(n, "d0", "gone"), False)):
        made, trial = tried()
        made.handle([ev.TransferStarted(trial, "d0"), ev.TransferDone(trial, "d0", assumed=True)], OPEN_AT)
        made.handle([last(trial)], OPEN_AT + 1.0)
        assert made.links.usable(PAIR, OPEN_AT + 1.0) is usable


def test_only_a_link_that_was_closed_is_tried_and_only_once_it_may_be_taken() -> None:
    book = LinkBook(1, 2.0)
    book.placed(PAIR, "a", on_its_way, 0.0)
    book.seen(PAIR, LinkState.UP, None, None)
    book.placed(PAIR, "b", on_its_way, 0.0)
    assert book.usable(PAIR, 0.0), "one of many"
    book.failed(PAIR, "a", 0.0)
    book.placed(PAIR, "c", on_its_way, 1.9)
    assert book.usable(PAIR, 2.0), "sent for want of another way: not the trial"
    book.placed(PAIR, "d", lambda now: Trial.ON_ITS_WAY if now < 3.0 else Trial.VANISHED, 2.0)
    book.placed(PAIR, "e", on_its_way, 2.5)
    book.failed(PAIR, "e", 2.6)
    assert (book.usable(PAIR, 2.9), book.usable(PAIR, 3.0)) == (False, True), "the first of them is the trial"


# ---- those that find no other way from where they were prefilled ----------------------------------------------------


def up_full() -> ev.InstanceUp:
    """d0 with room for a thousand tokens."""
    spec = up("d0").spec
    spec.kv_capacity_tokens = 1000
    return ev.InstanceUp(spec)


def tried_beside_another() -> tuple[Migrator, ev.Reply]:
    """Two were prefilled where the only way leads over the link that was closed: `tries` takes it, `waits` finds it
    taken. A second prefill instance has a way that nobody doubts."""
    made = fleet("q", decoders=1, migrator={"link_failures": 1})
    made.handle([done("first")], 0.0)
    made.handle([ev.TransferStarted("first", "d0"), ev.TransferFailed("first", "d0", "transfer_failed")], 0.0)
    assert len(of(made.handle([ev.Woke()], 0.5), ev.PrefillAgain)) == 1, "closed, not tried: nobody waits for it"
    reply = made.handle([done("tries", OPEN_AT), done("waits", OPEN_AT)], OPEN_AT)
    assert places(reply) == [("tries", "d0")]
    return made, reply


def test_what_was_computed_is_kept_while_another_tries_the_link_and_moves_once_it_arrived() -> None:
    made, reply = tried_beside_another()
    assert (of(reply, ev.PrefillAgain), of(reply, ev.FreeKv)) == ([], [])
    assert reply.wake_at is not None
    assert reply.wake_at <= OPEN_AT + made.config.link_patience_s
    later = made.handle([ev.TransferStarted("tries", "d0")], OPEN_AT + 0.1)
    assert (later.actions, made.state_of("waits")) == ([], State.WAITING)
    assert places(made.handle([ev.TransferDone("tries", "d0")], OPEN_AT + 0.2)) == [("waits", "d0")]


def test_of_those_that_wait_for_a_trial_one_a_pass_is_looked_at_and_no_one_waits_behind_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many there are; but who waits for all others gets no turn before them."""
    made, _ = tried_beside_another()
    looked, dead_ends = [], Reach.dead_ends

    def counted(reach: Reach, asked: Request, now: float) -> frozenset[str]:
        looked.append(asked.id)
        return dead_ends(reach, asked, now)

    monkeypatch.setattr(Reach, "dead_ends", counted)
    names = [f"r{number}" for number in range(100)]
    reply = made.handle([done(name, OPEN_AT) for name in names], OPEN_AT + 0.1)
    assert (places(reply), of(reply, ev.PrefillAgain)) == ([], [])
    assert len(looked) == 1
    behind = made.handle([done("x", OPEN_AT + 0.1, source="q")], OPEN_AT + 0.15)
    assert places(behind) == [("x", "d0")], "over a link that is open"
    looked.clear()
    hopeless = done("too_late", OPEN_AT - 50.0, tpot=0.001)
    reply = made.handle([hopeless], OPEN_AT + 0.2)
    assert "too_late" not in looked
    assert len(looked) == 1
    landed = made.handle([ev.TransferStarted("tries", "d0"), ev.TransferDone("tries", "d0")], OPEN_AT + 0.3)
    assert len(places(landed)) > made.config.scan_limit, "those that are placed do not count"


def test_it_starts_over_elsewhere_once_the_trial_has_failed() -> None:
    made, _ = tried_beside_another()
    failed = ev.TransferFailed("tries", "d0", "transfer_failed")
    reply = made.handle([ev.TransferStarted("tries", "d0"), failed], OPEN_AT + 0.1)
    assert [(again.request.id, again.avoid) for again in of(reply, ev.PrefillAgain)] == [("waits", {"p"})]
    assert of(reply, ev.FreeKv) == [ev.FreeKv("waits", "p")]


def test_for_a_trial_that_says_nothing_for_long_it_waits_no_longer_than_for_a_link_that_is_down() -> None:
    made, _ = tried_beside_another()
    until = OPEN_AT + made.config.link_patience_s
    made.handle([ev.TransferStarted("tries", "d0")], OPEN_AT + 0.1)
    assert of(made.handle([ev.Woke()], until - 0.1), ev.PrefillAgain) == []
    assert [again.request.id for again in of(made.handle([ev.Woke()], until), ev.PrefillAgain)] == ["waits"]


def test_one_that_waited_for_room_before_has_the_same_patience_with_a_trial() -> None:
    made = fleet("q", decoders=1, migrator={"link_failures": 1})
    made.handle([up_full()], 0.0)
    made.handle([done("fills", prompt=900)], 0.0)
    made.handle([ev.TransferStarted("fills", "d0"), ev.TransferDone("fills", "d0")], 0.0)
    made.links.failed(PAIR, "another", 0.0)
    late = OPEN_AT + 10.0
    waiting = made.handle([done("tries", prompt=300), done("waits", prompt=300)], 0.1)
    assert (waiting.actions, made.links.usable(PAIR, late)) == ([], True)
    reply = made.handle([ev.Finished("fills", 10)], late)
    assert places(reply) == [("tries", "d0")]
    assert of(reply, ev.PrefillAgain) == []
    until = late + made.config.link_patience_s
    assert [again.request.id for again in of(made.handle([ev.Woke()], until), ev.PrefillAgain)] == ["waits"]


def test_behind_a_landing_that_is_only_assumed_nothing_is_computed_twice() -> None:
    """Neither what waited from the beginning, nor what comes while the answer, which may take minutes, goes on."""
    made, _ = tried_beside_another()
    made.handle([ev.TransferStarted("tries", "d0"), ev.TransferDone("tries", "d0", assumed=True)], OPEN_AT)
    until = OPEN_AT + made.config.link_patience_s
    replies = [made.handle([done("later", until - 0.1)], until - 0.1)]
    assert places(replies[0]) == []
    replies.append(made.handle([ev.Woke()], until))
    assert places(replies[1]) == [("waits", "d0"), ("later", "d0")]
    replies.append(made.handle([done("last", until + 1.0)], until + 1.0))
    assert places(replies[2]) == [("last", "d0")]
    assert [again for reply in replies for again in of(reply, ev.PrefillAgain)] == []


def test_with_nowhere_else_to_go_it_goes_beside_the_trial() -> None:
    made = fleet(decoders=1, migrator={"link_failures": 1})
    made.handle([done("first")], 0.0)
    made.handle([ev.TransferStarted("first", "d0"), ev.TransferFailed("first", "d0", "transfer_failed")], 0.0)
    made.handle([ev.Cancelled("first")], 0.0)
    reply = made.handle([done("tries", OPEN_AT), done("waits", OPEN_AT)], OPEN_AT)
    assert places(reply) == [("tries", "d0"), ("waits", "d0")]


def test_of_a_pair_nothing_is_computed_yet_so_it_waits_for_no_trial() -> None:
    made, _ = tried_beside_another()
    reply = made.handle([ev.PrefillSent(request("pair", OPEN_AT), "p", paired=True)], OPEN_AT)
    assert [again.request.id for again in of(reply, ev.PrefillAgain)] == ["pair"]


def test_a_link_that_its_engine_says_is_down_is_not_waited_for_although_another_tries_it() -> None:
    made, _ = tried_beside_another()
    reply = made.handle([seen("p", "d0")], OPEN_AT + 0.1)
    assert [again.request.id for again in of(reply, ev.PrefillAgain)] == ["waits"]
