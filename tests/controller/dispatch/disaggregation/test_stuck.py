"""Requests that no room would help hold up nobody behind them, however many there are."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from controller.core import events as ev
from controller.core.types import InstanceSpec, Load, Request, Role
from controller.dispatch import Migrator
from controller.dispatch.disaggregation.reach import Reach
from tests.controller.dispatch.disaggregation.decoders import STEP, done, of, places, up
from tests.controller.dispatch.disaggregation.test_links import fleet, seen
from tests.controller.dispatch.disaggregation.test_other_model import not_readable
from tests.controller.dispatch.fleet import request

MANY = 40  # more than a pass looks at


def of_m2(name: str, role: Role) -> ev.InstanceUp:
    return ev.InstanceUp(InstanceSpec(name, "m2", latency=STEP, max_num_seqs=32, role=role))


def other(name: str, now: float) -> ev.PrefillDone:
    """A request of another model, which has a decode instance of its own."""
    asked = request(name, arrival=now)
    asked.model = "m2"
    return ev.PrefillDone(asked, "p2", asked.prompt_tokens)


def names() -> list[str]:
    return [f"a{number:02}" for number in range(MANY)]


def incompatible() -> Migrator:
    made = fleet(decoders=1)
    made.handle([done("first")], 0.0)
    not_readable(made, "first", "d0", 0.1)
    return made


def no_decoder() -> Migrator:
    return fleet(decoders=0)


def links_down() -> Migrator:
    made = fleet(decoders=1)
    made.handle([seen("p", "d0")], 0.0)
    return made


@pytest.mark.parametrize("stuck", [incompatible, no_decoder, links_down])
def test_another_models_request_is_placed_in_the_same_pass(stuck: Callable[[], Migrator]) -> None:
    made = stuck()
    made.handle([of_m2("p2", Role.PREFILL), of_m2("d2", Role.DECODE)], 0.2)
    assert places(made.handle([done(name, 0.2) for name in names()], 0.2)) == []
    assert places(made.handle([other("z", 0.3)], 0.3)) == [("z", "d2")]


@pytest.mark.parametrize("stuck", [incompatible, no_decoder])
def test_so_is_one_that_waits_for_all_others_where_no_decode_instance_is_fought_for(
    stuck: Callable[[], Migrator],
) -> None:
    made = stuck()
    made.handle([of_m2("p2", Role.PREFILL), of_m2("d2", Role.DECODE)], 0.2)
    made.handle([done(name, 0.2) for name in names()], 0.2)
    assert places(made.handle([hopeless("late", -50.0)], 0.3)) == [("late", "d2")]


def test_all_of_them_are_given_up_in_time_those_that_were_passed_over_too() -> None:
    made = incompatible()
    hold_s = made.config.incompatible_hold_s
    older = [done(name, 1.0, tpot=0.2) for name in names()]
    made.handle(older, 1.0)
    reply = made.handle([done("younger", 2.0, tpot=0.1)], 2.0)
    assert of(reply, ev.GiveUp) == []
    over = made.handle([ev.Woke()], 1.0 + hold_s)
    assert {given.request.id for given in of(over, ev.GiveUp)} == {"first", *names()}
    assert {given.decision.reason for given in of(over, ev.GiveUp)} == {"other_model"}
    assert over.wake_at == 2.0 + hold_s


def test_those_that_were_passed_over_wake_it_in_time() -> None:
    made = incompatible()
    made.handle([ev.Cancelled("first"), ev.KvReleased("first", "p")], 0.5)
    made.handle([done("older", 1.0, tpot=0.2)], 1.0)
    assert made.handle([done("younger", 2.0, tpot=0.1)], 2.0).wake_at == 1.0 + made.config.incompatible_hold_s


def test_one_that_sleeps_or_starts_is_waited_for_as_long_as_one_that_is_not_there() -> None:
    made = incompatible()
    made.handle([up("d1"), ev.Telemetry("d1", Load(0.2, awake=False)), done("a", 0.3)], 0.3)
    assert of(made.handle([ev.Woke()], 0.3 + made.config.incompatible_hold_s), ev.GiveUp) == []
    assert ("a", "d1") in places(made.handle([ev.Telemetry("d1", Load(5.0))], 5.0))


def test_one_that_drains_is_not_waited_for() -> None:
    made = incompatible()
    made.handle([up("d1"), ev.InstanceDraining("d1"), done("a", 0.2)], 0.2)
    assert of(made.handle([ev.Woke()], 0.2 + made.config.incompatible_hold_s), ev.GiveUp) != []


def test_where_one_sleeps_what_was_sent_to_the_wrong_one_still_leaves_it_at_once() -> None:
    made = incompatible()
    made.handle([ev.Cancelled("first"), up("q", Role.PREFILL)], 0.2)
    made.handle([up("d1"), ev.Telemetry("d1", Load(0.2, awake=False))], 0.2)
    sent = made.handle([ev.PrefillSent(request("b"), "p")], 0.3)
    assert [(again.decision.reason, again.counts) for again in of(sent, ev.PrefillAgain)] == [("other_model", False)]


def test_where_there_is_no_decode_instance_at_all_it_is_waited_for_as_long_as_before() -> None:
    made = no_decoder()
    made.handle([done("a")], 0.0)
    assert of(made.handle([ev.Woke()], made.config.hold_s - 0.1), ev.GiveUp) == []
    reply = made.handle([ev.Woke()], made.config.hold_s)
    assert [given.decision.reason for given in of(reply, ev.GiveUp)] == ["no_decode_instance"]


def test_a_shorter_one_is_not_taken_for_one_of_their_kind() -> None:
    """The one with a context that is long enough for `long` reads nothing of p; a shorter one does."""
    made = fleet(decoders=0)
    contexts = {"p": (Role.PREFILL, 8192), "wide": (Role.DECODE, 8192), "short": (Role.DECODE, 1024)}
    made.handle(
        [
            ev.InstanceUp(InstanceSpec(name, "m", latency=STEP, max_model_len=length, role=role))
            for name, (role, length) in contexts.items()
        ],
        0.0,
    )
    assert places(made.handle([done("long", prompt=4000)], 0.0)) == [("long", "wide")]
    assert places(not_readable(made, "long", "wide", 0.1)) == []
    assert places(made.handle([done("a", 0.2, prompt=100)], 0.2)) == [("a", "short")]


def test_a_pass_looks_at_one_of_them_only(monkeypatch: pytest.MonkeyPatch) -> None:
    looked, other_way = [], Reach.other_way

    def counted(reach: Reach, transfer, candidates, now):  # type: ignore[no-untyped-def]
        looked.append(transfer.request.id)
        return other_way(reach, transfer, candidates, now)

    monkeypatch.setattr(Reach, "other_way", counted)
    made = incompatible()
    looked.clear()
    made.handle([done(name, 0.2) for name in names()], 0.2)
    assert len(looked) == 1


def full(made: Migrator, name: str = "d0") -> None:
    """A decode instance with room for 1,000 tokens, of which `fills` has 900."""
    spec = up(name).spec
    spec.kv_capacity_tokens = 1000
    made.handle([ev.InstanceUp(spec), done("fills", prompt=900)], 0.0)


def hopeless(name: str, now: float) -> ev.PrefillDone:
    late = other(name, now)
    late.request.targets = late.request.targets._replace(tpot_s=0.001)
    return late


def test_those_without_room_hold_up_no_other_model() -> None:
    """Neither one that can make it nor one that waits for all others of its model."""
    made = fleet(decoders=0)
    full(made)
    made.handle([of_m2("p2", Role.PREFILL), of_m2("d2", Role.DECODE)], 0.0)
    made.handle([done(name, 0.1, prompt=300) for name in names()], 0.1)
    assert places(made.handle([other("z", 0.3)], 0.3)) == [("z", "d2")]
    assert places(made.handle([hopeless("late", -50.0)], 0.4)) == [("late", "d2")]


def test_a_link_that_is_waited_for_holds_up_the_hopeless_of_its_model_only() -> None:
    """`mine` could go over q's link, and would take from those that wait for p's what they wait for."""
    made = links_down()
    made.handle([of_m2("p2", Role.PREFILL), of_m2("d2", Role.DECODE)], 0.2)
    made.handle([done(name, 0.2) for name in names()], 0.2)
    made.handle([up("q", Role.PREFILL), ev.InstanceDraining("q")], 0.2)
    mine = done("mine", -50.0, source="q", tpot=0.001)
    assert places(made.handle([hopeless("late", -50.0), mine], 0.3)) == [("late", "d2")]
    assert places(made.handle([ev.Cancelled(name) for name in names()], 0.4)) == [("mine", "d0")]


def test_those_without_room_hold_up_the_hopeless_of_their_model() -> None:
    made = fleet(decoders=0)
    full(made)
    made.handle([done("large", 0.1, prompt=300)], 0.1)
    assert places(made.handle([done("late", -50.0, prompt=50, tpot=0.001)], 0.2)) == []
    assert places(made.handle([ev.Cancelled("large")], 0.3)) == [("late", "d0")]


def test_one_whose_instance_was_chosen_when_it_was_sent_is_not_behind_those_without_room() -> None:
    """Its room is taken already."""
    made = fleet(decoders=0, migration={"name": "one_shot"})
    full(made)
    made.handle([ev.PrefillSent(early := request("early", prompt=50), "p")], 0.0)
    made.handle([done(name, 0.1, prompt=300, tpot=0.01) for name in names()], 0.1)
    assert places(made.handle([ev.PrefillDone(early, "p", 50)], 0.2)) == [("early", "d0")]


def test_who_waits_for_room_behind_a_closed_link_is_no_sign_for_others() -> None:
    """d0 has no room, and its link is closed for some time; d1 has room, and its link is down: `small` fits in both."""
    made = fleet(decoders=0, migrator={"link_failures": 1, "link_closed_s": 30.0})
    full(made)
    made.handle([ev.TransferStarted("fills", "d0"), ev.TransferDone("fills", "d0")], 0.0)
    made.links.failed(("p", "d0"), "somebody", 0.0)
    made.handle([up("d1"), seen("p", "d1")], 0.0)
    assert places(made.handle([done("large", 0.1, prompt=300)], 0.1)) == []
    assert places(made.handle([done("small", 0.1, prompt=50)], 0.2)) == [("small", "d0")]


def test_one_that_an_instance_failed_is_no_sign_for_those_it_did_not_fail() -> None:
    """It waits for d1's link rather than for d0, to which the link is closed; to others d0 is still the better one."""
    made = fleet(decoders=1, migrator={"link_failures": 1, "link_closed_s": 30.0})
    made.handle([done("failed", tpot=0.1)], 0.0)
    made.handle([ev.TransferStarted("failed", "d0"), up("d1"), seen("p", "d1")], 0.0)
    made.handle([ev.TransferFailed("failed", "d0", "cut")], 0.1)
    waited = 0.1 + 2 * made.config.retry_s
    assert places(made.handle([ev.Woke(), done("next", waited, tpot=0.2)], waited)) == [("next", "d0")]


def test_those_without_room_are_counted_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    made = fleet(decoders=0)
    full(made)
    looked, decoders = [], Reach.decoders

    def counted(reach: Reach, transfer, now):  # type: ignore[no-untyped-def]
        looked.append(transfer.request.id)
        return decoders(reach, transfer, now)

    monkeypatch.setattr(Reach, "decoders", counted)
    asked: list[Request] = [done(name, 0.1, prompt=300).request for name in names()]
    made.handle([ev.PrefillDone(each, "p", 300) for each in asked], 0.1)
    assert len(looked) == made.config.scan_limit
