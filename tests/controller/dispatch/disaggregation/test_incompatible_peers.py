"""That KV of one engine is nothing to another is found out once, and believed until one of them begins a new run."""

from __future__ import annotations

import pytest

from controller.core import events as ev
from controller.core.errors import ConfigError
from controller.core.types import Load, Role
from controller.dispatch import Migrator, build_dispatcher
from controller.dispatch.disaggregation.migrator_config import MigratorConfig
from controller.dispatch.disaggregation.reach import IncompatiblePeers
from tests.controller.dispatch.disaggregation.decoders import done, of, places, up
from tests.controller.dispatch.disaggregation.test_links import fleet
from tests.controller.dispatch.disaggregation.test_other_model import not_readable
from tests.controller.dispatch.fleet import request, sends


def incompatible_with_p(*prefill: str) -> Migrator:
    """d0 does not read what p computes; `first`, which found that out at 0.1, is over."""
    made = fleet(*prefill, decoders=1)
    made.handle([done("first")], 0.0)
    not_readable(made, "first", "d0", 0.1)
    made.handle([ev.Cancelled("first")], 0.1)
    return made


def test_the_next_one_leaves_before_it_is_computed() -> None:
    made = incompatible_with_p("q")
    reply = made.handle([ev.PrefillSent(request("b"), "p")], 0.2)
    (again,) = of(reply, ev.PrefillAgain)
    assert (again.avoid, again.decision.reason, again.counts) == ({"p"}, "other_model", False)
    assert (made.state_of("b"), reply.actions) == (None, [ev.FreeKv("b", "p"), again])
    assert of(made.handle([ev.PrefillSent(request("b"), "q")], 0.3), ev.PrefillAgain) == []


def test_what_is_being_computed_is_not_offered_to_those_that_do_not_read_it() -> None:
    made = incompatible_with_p("q")
    reply = made.handle([done("b", 0.2)], 0.2)
    assert ([again.avoid for again in of(reply, ev.PrefillAgain)], places(reply)) == ([{"p"}], [])


def test_with_no_one_else_it_is_computed_and_waits_for_somebody() -> None:
    made = incompatible_with_p()
    assert made.handle([ev.PrefillSent(request("b"), "p")], 0.2).actions == []
    assert made.handle([done("b", 0.3)], 0.3).actions == []
    assert places(made.handle([up("d1")], 0.4)) == [("b", "d1")]


def test_one_that_comes_back_all_the_same_is_computed_there_and_counts() -> None:
    """Or it would go round forever where the dispatcher has nobody else for it."""
    made, asked = incompatible_with_p("q"), request("b")
    assert [again.counts for again in of(made.handle([ev.PrefillSent(asked, "p")], 0.2), ev.PrefillAgain)] == [False]
    assert made.handle([ev.PrefillSent(asked, "p")], 0.2).actions == []
    late = made.handle([ev.PrefillDone(asked, "p", asked.prompt_tokens)], 0.3)
    assert [again.counts for again in of(late, ev.PrefillAgain)] == [True]


def test_all_that_no_one_reads_are_avoided_at_once() -> None:
    made = incompatible_with_p("q", "r")
    made.handle([done("second", 0.2, source="q")], 0.2)
    assert [again.avoid for again in of(not_readable(made, "second", "d0", 0.3), ev.PrefillAgain)] == [{"p", "q"}]
    assert [a.avoid for a in of(made.handle([ev.PrefillSent(request("b"), "q")], 0.4), ev.PrefillAgain)] == [{"p", "q"}]


def slept(name: str) -> list[ev.Event]:
    return [ev.Telemetry(name, Load(1.0, awake=False)), ev.Telemetry(name, Load(2.0))]


def counted_from_the_start(name: str) -> list[ev.Event]:
    return [ev.Telemetry(name, Load(at, generation_tokens_total=count)) for at, count in ((1.0, 900), (2.0, 5))]


@pytest.mark.parametrize(
    "run",
    [
        [ev.InstanceDown("d0"), up("d0")],
        [ev.InstanceDown("p"), up("p", Role.PREFILL)],
        slept("d0"),
        slept("p"),
        counted_from_the_start("d0"),
        counted_from_the_start("p"),
    ],
    ids=["d_again", "p_again", "d_slept", "p_slept", "d_counts_again", "p_counts_again"],
)
def test_a_new_run_of_either_is_asked_again(run: list[ev.Event]) -> None:
    made = incompatible_with_p("q")
    made.handle(run, 2.0)
    assert made.handle([ev.PrefillSent(request("b"), "p")], 2.0).actions == []
    assert places(made.handle([done("b", 2.1)], 2.1)) == [("b", "d0")]


def test_news_of_the_same_run_and_runs_of_others_change_nothing() -> None:
    made = incompatible_with_p("q")
    made.handle([ev.Telemetry("d0", Load(at, generation_tokens_total=round(at))) for at in (1.0, 2.0)], 2.0)
    made.handle([ev.InstanceDown("q"), up("q", Role.PREFILL), up("d7"), ev.InstanceDown("d7")], 2.0)
    assert len(of(made.handle([ev.PrefillSent(request("b"), "p")], 2.0), ev.PrefillAgain)) == 1


def test_a_mistake_heals() -> None:
    made = incompatible_with_p("q")
    until = 0.1 + made.config.incompatible_s
    assert len(of(made.handle([ev.PrefillSent(request("b"), "p")], until - 0.1), ev.PrefillAgain)) == 1
    assert places(made.handle([done("c", until)], until)) == [("c", "d0")]


def test_what_is_no_longer_known_takes_no_room() -> None:
    incompatible = IncompatiblePeers(60.0, lambda transfer: True)
    incompatible.met("p", "d0", 0.0)
    assert (len(incompatible), incompatible.of("p", 59.9), incompatible.of("q", 0.0)) == (1, {"d0"}, set())
    assert (incompatible.of("p", 60.0), len(incompatible)) == (set(), 1), "to be tried"
    incompatible.read("p", "d0", 60.0)
    assert len(incompatible) == 0


@pytest.mark.parametrize("gone", ["p", "d0"])
def test_one_that_has_gone_is_not_remembered_by_what_is_said_of_it_late(gone: str) -> None:
    made = fleet("q", decoders=1)
    made.handle([done("a")], 0.0)
    made.handle([ev.TransferStarted("a", "d0"), ev.TransferDone("a", "d0", assumed=True)], 0.0)
    made.handle([ev.InstanceDown(gone)], 1.0)
    made.handle([ev.TransferFailed("a", "d0", "other_model")], 2.0)
    assert len(made._incompatible) == 0


def test_a_landing_that_was_assumed_and_fails_late_may_go_to_one_that_was_started_again() -> None:
    made = fleet()
    ((_, first),) = places(made.handle([done("a")], 0.0))
    ((_, second),) = places(not_readable(made, "a", first, 0.1))
    made.handle([ev.TransferStarted("a", second), ev.TransferDone("a", second, assumed=True)], 0.2)
    made.handle([ev.InstanceDown(first), up(first)], 1.0)
    assert places(made.handle([ev.TransferFailed("a", second, "other_model")], 2.0)) == [("a", first)]


# ---- where one request was before -----------------------------------------------------------------------------------


def test_it_comes_back_to_no_instance_that_it_had_to_leave() -> None:
    """Neither for a second reason, nor when the first one is forgotten."""
    made, asked = fleet("q", "r", decoders=1), request("a")
    made.handle([ev.PrefillDone(asked, "p", 100)], 0.0)
    assert [again.avoid for again in of(not_readable(made, "a", "d0", 0.1), ev.PrefillAgain)] == [{"p"}]
    made.handle([up("d0")], 0.2)
    made.handle([ev.PrefillSent(asked, "q")], 0.2)
    late = 0.2 + made.config.prefilling_timeout_s
    (again,) = of(made.handle([ev.Woke()], late), ev.PrefillAgain)
    assert (again.avoid, again.counts) == ({"p", "q"}, True)
    made.handle([ev.PrefillDone(asked, "r", 100)], late)
    (again,) = of(made.handle([ev.TransferFailed("a", "d0", "kv_lost")], late), ev.PrefillAgain)
    assert again.avoid == {"p", "q"}, "r is not at fault"


def test_with_no_one_else_left_only_what_is_known_now_is_avoided() -> None:
    made, asked = fleet("q", decoders=1), request("a")
    made.handle([ev.PrefillDone(asked, "p", 100)], 0.0)
    not_readable(made, "a", "d0", 0.1)
    made.handle([ev.PrefillDone(asked, "q", 100), up("d0")], 0.2)
    assert [again.avoid for again in of(not_readable(made, "a", "d0", 0.3), ev.PrefillAgain)] == [{"q"}]


def test_an_engine_that_fails_in_between_changes_nothing_of_that() -> None:
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up(name, Role.PREFILL) for name in ("p", "q", "r")], 0.0)
    asked = request("a")
    asked.avoid = frozenset({"p"})
    ((sent,),) = [of(dispatcher.handle([ev.Arrived(asked, frozenset({"p", "q"}))], 0.0), ev.Send)]
    assert sent.instance_id == "r"
    ((sent,),) = [of(dispatcher.handle([ev.Failed("a", True, "cut")], 0.1), ev.Send)]
    assert sent.instance_id == "q"


def test_one_that_failed_it_is_asked_again_rather_than_one_whose_kv_got_nowhere() -> None:
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up(name, Role.PREFILL) for name in ("p", "q")], 0.0)
    asked = request("a")
    asked.avoid = frozenset({"p"})
    assert sends(dispatcher.handle([ev.Arrived(asked, frozenset({"p"}))], 0.0)) == [("a", "q")]
    reply = dispatcher.handle([ev.Failed("a", True, "cut")], 0.1)
    assert (sends(reply), reply.wake_at) == ([], pytest.approx(0.6))
    assert sends(dispatcher.handle([ev.Woke()], 0.6)) == [("a", "q")]


def test_with_the_one_that_failed_it_gone_it_goes_where_its_kv_got_nowhere() -> None:
    dispatcher = build_dispatcher("slackline")
    dispatcher.handle([up(name, Role.PREFILL) for name in ("p", "q")], 0.0)
    asked = request("a")
    asked.avoid = frozenset({"p"})
    dispatcher.handle([ev.Arrived(asked, frozenset({"p"}))], 0.0)
    assert sends(dispatcher.handle([ev.Failed("a", True, "cut"), ev.InstanceDown("q")], 0.1)) == [("a", "p")]


def test_a_pair_is_not_forgotten_while_somebody_waits_for_another() -> None:
    with pytest.raises(ConfigError) as refused:
        MigratorConfig(incompatible_s=2.0, incompatible_hold_s=3.0)
    assert refused.value.field == "incompatible_s"
    assert MigratorConfig(incompatible_s=3.0, incompatible_hold_s=3.0).incompatible_s == 3.0
