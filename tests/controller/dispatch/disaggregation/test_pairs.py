"""Stages that begin together: the decode stage is placed when the prompt is sent, time-outs count when it has ended."""

from __future__ import annotations

import pytest

from controller.core import events as ev
from controller.core.types import InstanceSpec, Role
from controller.dispatch import build_migrator
from controller.dispatch.disaggregation.migrator import Migrator
from controller.dispatch.lifecycle import State
from tests.controller.dispatch.disaggregation.decoders import STEP, migrator, of, places, up
from tests.controller.dispatch.fleet import request

PATIENCE = {"migrator": {"placed_timeout_s": 1.0, "moving_timeout_s": 2.0, "retry_s": 0.05}}


def sent(name: str, prefill_s: float = 0.5, source: str = "p", **more) -> ev.PrefillSent:
    return ev.PrefillSent(request(name, **more), source, paired=True, prefill_s=prefill_s)


def test_a_pair_is_placed_when_its_prompt_is_sent() -> None:
    made = migrator()
    assert places(made.handle([sent("a")], 0.0)) == [("a", "d0")]
    assert made.state_of("a") is State.PLACED
    alone = ev.PrefillSent(request("b"), "p")
    assert places(made.handle([alone], 0.0)) == []


def test_its_first_byte_comes_after_the_expected_end_of_its_prefill() -> None:
    made = migrator()
    (place,) = of(made.handle([sent("a", prefill_s=3.0, ttft=2.9)], 0.0), ev.Place)
    assert place.decision.reason == "hopeless_harmless"
    assert place.decision.figures["kv_tokens"] == request("a").prompt_tokens


def test_one_token_goes_in_a_pair_too() -> None:
    asked = request("a", output=1)
    asked.max_tokens = 1
    made = migrator()
    assert places(made.handle([ev.PrefillSent(asked, "p", paired=True)], 0.0)) == [("a", "d0")]
    assert places(made.handle([ev.PrefillSent(asked, "p")], 0.0)) == []


def test_a_long_prompt_is_no_slow_transfer() -> None:
    made = migrator(**PATIENCE)
    made.handle([sent("a")], 0.0)
    made.handle([ev.TransferStarted("a", "d0")], 0.0)
    assert of(made.handle([ev.Woke()], 100.0), ev.Abort) == []
    made.handle([ev.PrefillDone(request("a"), "p", 10)], 101.0)
    assert made.state_of("a") is State.MOVING
    assert of(made.handle([ev.Woke()], 102.9), ev.Abort) == []
    (abort,) = of(made.handle([ev.Woke()], 103.0), ev.Abort)
    assert (abort.request_id, abort.instance_id) == ("a", "d0")


def test_a_decode_engine_that_fails_is_replaced_by_another() -> None:
    made = migrator(decoders=2)
    ((_, first),) = places(made.handle([sent("a")], 0.0))
    reply = made.handle([ev.TransferStarted("a", first), ev.TransferFailed("a", first, "unreachable")], 0.1)
    ((_, second),) = places(reply)
    assert {first, second} == {"d0", "d1"}


def test_a_prefill_that_ends_after_the_first_token_changes_nothing() -> None:
    made = migrator()
    made.handle([sent("a")], 0.0)
    made.handle([ev.TransferStarted("a", "d0"), ev.TransferDone("a", "d0")], 0.0)
    assert made.handle([ev.PrefillDone(request("a"), "p", 10)], 0.1).actions == []
    assert made.state_of("a") is State.COMMITTED


def test_only_engines_of_its_kind_read_its_kv() -> None:
    made = build_migrator("hyperflexis")
    made.handle([up("v"), up("s", backend="sglang"), up("p", Role.PREFILL, backend="sglang")], 0.0)
    for index in range(3):
        assert places(made.handle([sent(f"a{index}")], 0.0)) == [(f"a{index}", "s")]
    other = ev.InstanceUp(InstanceSpec("q", "m", latency=STEP, role=Role.PREFILL))
    made.handle([other], 0.0)
    assert places(made.handle([ev.PrefillDone(request("b"), "q", 10)], 0.0)) == [("b", "v")]


def test_what_became_of_an_earlier_attempt_does_not_undo_the_new_one() -> None:
    made = migrator()
    made.handle([sent("a")], 0.0)
    reply = made.handle([ev.InstanceDown("p"), sent("a", source="q")], 0.1)
    assert of(reply, ev.PrefillAgain) == []
    assert places(reply) == [("a", "d0")]


# ---- what the scaler of the decode stage is told ---------------------------------------------------------------------


def busy(slots: int = 1) -> Migrator:
    """Its only decode instance is full."""
    made = migrator(slots=slots)
    for index in range(slots):
        made.handle([sent(f"there{index}", prefill_s=0.1, ttft=4.1)], 0.0)
        made.handle([ev.TransferStarted(f"there{index}", "d0")], 0.0)
    return made


def test_a_pair_waits_for_a_decode_instance_while_its_prefill_instance_is_idle() -> None:
    made = busy()
    made.handle([ev.PrefillDone(request("there0"), "p", 10)], 0.1)
    assert places(made.handle([sent("a", prefill_s=0.5, ttft=4.5)], 0.1)) == []
    assert made.pressure(0.1)["m"] == (1, pytest.approx(0.0))
    assert made.pressure(2.1)["m"] == (1, pytest.approx(2.0 / (4.5 - 0.6)))


def test_it_waits_for_nothing_else_while_its_prefill_instance_computes_another() -> None:
    made = busy()
    made.handle([sent("a", prefill_s=1.5, ttft=4.5)], 0.0)
    assert made.pressure(1.0) == {"m": (1, 0.0)}, "the first one is still computed"
    made.handle([ev.PrefillDone(request("there0"), "p", 10)], 1.0)
    assert made.pressure(1.6)["m"] == (1, pytest.approx(0.6 / (4.5 - 1.5)))


def test_another_prefill_instance_that_computes_makes_no_difference() -> None:
    made = busy(slots=2)
    made.handle([ev.PrefillDone(request("there0"), "p", 10)], 0.0)
    made.handle([ev.PrefillDone(request("there1"), "p", 10)], 0.0)
    made.handle([ev.Finished("there1", 10)], 0.0)
    assert places(made.handle([sent("b", source="q", prefill_s=9.0, ttft=60.0)], 0.0)) == [("b", "d0")]
    made.handle([sent("a", prefill_s=0.5, ttft=4.5)], 0.0)
    assert made.pressure(1.0)["m"] == (1, pytest.approx(1.0 / 4.0))


ENDS = [ev.Cancelled("there0"), ev.Failed("there0", False, "x"), ev.TransferFailed("there0", "d0", "refused")]


@pytest.mark.parametrize("end", ENDS, ids=lambda end: type(end).__name__)
def test_a_prefill_that_ends_otherwise_is_computed_no_more(end: ev.Event) -> None:
    """The instance computes for one second. Whoever is in its place then ends its prefill at once."""
    made = busy()
    made.handle([sent("a", prefill_s=0.5, ttft=4.5), sent("b", prefill_s=0.5, ttft=4.5)], 0.0)
    ((name, _),) = places(made.handle([end], 1.0))
    made.handle([ev.TransferStarted(name, "d0"), ev.PrefillDone(request(name), "p", 10)], 1.0)
    assert made.pressure(1.0)["m"][1] == 0.0
    assert made.pressure(3.0)["m"][1] == pytest.approx(2.0 / 4.0)
