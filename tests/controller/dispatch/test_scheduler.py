"""One scheduler over both stages: roles, attempts, the two wake-ups, and that nothing is lost when a policy raises."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from controller.core import events as ev
from controller.core.types import InstanceSpec, Part, Role
from controller.dispatch import Scheduler, build_dispatcher, build_scheduler
from controller.dispatch.lifecycle import MAX_PREFILLS, State
from tests.controller.dispatch.disaggregation.decoders import STEP, of
from tests.controller.dispatch.fleet import request


def up(name: str, role: Role, *, paired: bool = False, **more: object) -> ev.InstanceUp:
    return ev.InstanceUp(InstanceSpec(name, "m", latency=STEP, max_num_seqs=32, role=role, **more), paired)


def fleet(paired: bool = False, **roles: str) -> Scheduler:
    """fleet(p="prefill", d="decode")"""
    made = build_scheduler("slackline")
    made.handle([up(name, Role(role), paired=paired and role == "prefill") for name, role in roles.items()], 0.0)
    return made


def sends(reply: ev.Reply) -> list[tuple[str, str, Part]]:
    return [(each.request.id, each.instance_id, each.part) for each in of(reply, ev.Send)]


def placed(made: Scheduler, name: str = "a", now: float = 0.0) -> str:
    """Arrived, prefilled and placed; where it is decoded."""
    asked = request(name, arrival=now)
    ((_, source, _),) = sends(made.handle([ev.Arrived(asked)], now))
    (place,) = of(made.handle([ev.PrefillDone(asked, source, asked.prompt_tokens)], now + 0.1), ev.Place)
    return place.target


# ---- roles ----------------------------------------------------------------------------------------------------------


def test_one_instance_gets_all_of_a_request() -> None:
    made = fleet(c="collocated")
    assert sends(made.handle([ev.Arrived(request("a"))], 0.0)) == [("a", "c", Part.WHOLE)]
    assert made.state_of("a") is State.SENT
    made.handle([ev.FirstToken("a")], 0.1)
    assert made.state_of("a") is State.ANSWERING
    made.handle([ev.Finished("a", 5)], 0.2)
    assert made.state_of("a") is State.ENDED
    assert not made.disaggregated


def test_a_prefill_instance_gets_the_prompt_and_a_decode_instance_none() -> None:
    made = fleet(p="prefill", d="decode")
    assert sends(made.handle([ev.Arrived(request("a"))], 0.0)) == [("a", "p", Part.PREFILL)]
    assert {each.id for each in made.dispatcher.fleet(0.0)} == {"p"}
    assert {each.id for each in made.fleet(0.0)} == {"p", "d"}


def test_a_pair_begins_with_its_decode_instance() -> None:
    made = fleet(paired=True, p="prefill", d="decode")
    reply = made.handle([ev.Arrived(request("a"))], 0.0)
    assert sends(reply) == [("a", "p", Part.PAIR)]
    assert [(each.source, each.target) for each in of(reply, ev.Place)] == [("p", "d")]


def test_one_token_needs_no_second_instance_but_in_a_pair() -> None:
    asked = request("a", output=1)
    asked.max_tokens = 1
    assert sends(fleet(p="prefill", d="decode").handle([ev.Arrived(asked)], 0.0)) == [("a", "p", Part.WHOLE)]
    again = request("a", output=1)
    again.max_tokens = 1
    made = fleet(paired=True, p="prefill", d="decode")
    assert sends(made.handle([ev.Arrived(again)], 0.0)) == [("a", "p", Part.PAIR)]


def test_an_instance_that_becomes_a_decode_instance_gets_no_prompts_any_more() -> None:
    made = fleet(a="collocated", b="collocated")
    made.handle([up("a", Role.DECODE)], 1.0)
    replies = made.handle([ev.Arrived(request(f"r{index}", arrival=1.0)) for index in range(4)], 1.0)
    assert {where for _, where, _ in sends(replies)} == {"b"}


# ---- the second stage -----------------------------------------------------------------------------------------------


def test_states_follow_the_table() -> None:
    made = fleet(p="prefill", d="decode")
    seen = []
    placed(made)
    for event in (
        ev.TransferStarted("a", "d", moves=False),
        ev.TransferMoves("a", "d"),
        ev.TransferDone("a", "d"),
        ev.KvReleased("a", "p"),
        ev.Finished("a", 9),
    ):
        seen.append(made.state_of("a"))
        assert made.migrator is not None
        assert made.migrator.state_of("a") is made.state_of("a")
        made.handle([event], 0.2)
    assert seen == [State.PLACED, State.RESERVED, State.MOVING, State.COMMITTED, State.RELEASED]
    assert made.state_of("a") is State.ENDED


def test_a_prefill_that_fails_takes_a_decode_stage_that_has_not_all_kv_with_it() -> None:
    made = fleet(p="prefill", q="prefill", d="decode")
    ((_, first, _),) = sends(made.handle([ev.Arrived(request("a"))], 0.0))
    made.handle([ev.PrefillEnding("a", first)], 0.1)
    reply = made.handle([ev.TransferStarted("a", "d"), ev.EngineFailed("a", first, "cut")], 0.2)
    assert of(reply, ev.Abort) == [ev.Abort("a", "d", "prefill_failed")]
    ((_, second, part),) = sends(reply)
    assert (second != first, part) == (True, Part.PREFILL)


def test_a_decode_stage_that_has_all_kv_needs_no_prefill_any_more() -> None:
    made = fleet(p="prefill", d="decode")
    made.handle([ev.Arrived(request("a"))], 0.0)
    made.handle([ev.PrefillEnding("a", "p")], 0.1)
    reply = made.handle([ev.TransferDone("a", "d", released=True), ev.EngineFailed("a", "p", "cut")], 0.2)
    assert (of(reply, ev.Abort), sends(reply)) == ([], [])
    assert not made.dispatcher.holds("a")
    assert made.state_of("a") is State.RELEASED


def test_what_a_decode_engine_loses_after_it_took_the_kv_is_prefilled_again_at_most_so_often() -> None:
    made = fleet(p="prefill", d="decode")
    asked = request("a")
    reply = made.handle([ev.Arrived(asked)], 0.0)
    for index in range(1, MAX_PREFILLS + 1):
        assert sends(reply) == [("a", "p", Part.PREFILL)]
        now = float(index)
        made.handle([ev.PrefillDone(asked, "p", 10)], now)
        made.handle([ev.TransferDone("a", "d")], now + 0.1)
        reply = made.handle([ev.TransferFailed("a", "d", "unreachable"), ev.KvReleased("a", "p")], now + 0.2)
    (end,) = of(reply, ev.GiveUp)
    assert (end.prefilled, end.decision.reason, sends(reply)) == (True, "decode_failed", [])
    assert made.state_of("a") is State.ENDED


def test_an_answer_that_ends_with_its_first_token_leaves_the_migrator() -> None:
    made = fleet(p="prefill", d="decode")
    made.handle([ev.Arrived(request("a"))], 0.0)
    made.handle([ev.PrefillEnding("a", "p")], 0.1)
    reply = made.handle([ev.AnsweredWhole("a", "p")], 0.2)
    assert [each.instance_id for each in of(reply, ev.Abort)] == ["d"]
    assert made.state_of("a") is State.SENT
    assert made.dispatcher.holds("a")


def test_an_answer_that_ended_with_its_first_token_is_retried_when_its_engine_fails() -> None:
    """Its KV had been pulled already, which says nothing about the engine that answers it from then on."""
    made = fleet(p="prefill", q="prefill", d="decode")
    ((_, source, _),) = sends(made.handle([ev.Arrived(request("a"))], 0.0))
    made.handle([ev.PrefillEnding("a", source)], 0.1)
    made.handle([ev.TransferDone("a", "d", released=True)], 0.1)
    assert len(of(made.handle([ev.AnsweredWhole("a", source)], 0.2), ev.AnswerThere)) == 1
    reply = made.handle([ev.EngineFailed("a", source, "cut")], 0.3)
    ((_, again, part),) = sends(reply)
    assert (len(of(reply, ev.Retry)), again != source, part) == (1, True, Part.PREFILL)
    assert of(reply, ev.Place) == []


def test_an_answer_that_ends_as_its_prefill_fails_is_not_computed_again() -> None:
    """The KV was only assumed to have landed, so the failure alone means another attempt."""
    made = fleet(p="prefill", q="prefill", d="decode")
    ((_, source, _),) = sends(made.handle([ev.Arrived(request("a"))], 0.0))
    made.handle([ev.PrefillEnding("a", source), ev.TransferDone("a", "d", assumed=True)], 0.1)
    reply = made.handle([ev.EngineFailed("a", source, "cut"), ev.Finished("a", 10)], 0.2)
    assert (sends(reply), len(made.queue())) == ([], 0)
    assert all(each.waiting == each.running == 0 for each in made.fleet(0.2))


@pytest.mark.parametrize(
    ("instance", "paired", "ends"), [("d", False, False), ("d", True, True), ("p", False, True), ("p", True, True)]
)
def test_an_offer_that_is_refused_is_the_requests_fault_unless_another_decode_engine_may_take_it(
    instance: str, paired: bool, ends: bool
) -> None:
    """Drivers report that the engine refused the KV; what that means depends on the stage that the call was for."""
    made = fleet(paired=paired, p="prefill", d="decode")
    made.handle([ev.Arrived(request("a"))], 0.0)
    made.handle([ev.PrefillEnding("a", "p")], 0.1)
    reply = made.handle([ev.EngineFailed("a", instance, "refused", "refused", "kv")], 0.2)
    assert [each.rejected for each in of(reply, ev.Fail)] == ([True] if ends else [])
    assert (made.state_of("a") is State.ENDED) is ends


# ---- wake-ups -------------------------------------------------------------------------------------------------------


def test_the_earlier_of_two_wake_ups_counts_and_the_other_is_not_forgotten() -> None:
    made = build_scheduler("slackline", {"migrator": {"prefilling_timeout_s": 50.0}})
    made.handle([up("p", Role.PREFILL), up("d", Role.DECODE), ev.Expected("n", 30.0)], 0.0)
    first = made.handle([ev.Arrived(request("a"))], 0.0).wake_at
    waiting = request("b")
    waiting.model = "n"
    both = made.handle([ev.Arrived(waiting)], 0.0).wake_at
    assert first is not None
    assert both is not None
    assert both < 40.0 < first
    assert made.handle([ev.TransferMoves("nobody", "d")], 0.1).wake_at == both


def test_a_wake_up_never_lies_in_the_past() -> None:
    made = fleet(p="prefill", d="decode")
    for index in range(30):
        wake_at = made.handle([ev.Arrived(request(f"r{index}"))], 0.0).wake_at
        assert wake_at is None or wake_at > 0.0


# ---- when a policy raises -------------------------------------------------------------------------------------------


def breaks(times: int, part: object, monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    handle, left = part.handle, [times]  # type: ignore[attr-defined]

    def sometimes(events: Sequence[ev.Event], now: float) -> ev.Reply:
        if left[0] and any(isinstance(event, kind) for event in events):
            left[0] -= 1
            raise RuntimeError("a defect")
        return handle(events, now)

    monkeypatch.setattr(part, "handle", sometimes)


def test_without_somebody_to_tell_exceptions_are_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Scheduler(build_dispatcher("slackline"))
    breaks(1, made.dispatcher, monkeypatch, ev.Arrived)
    with pytest.raises(RuntimeError):
        made.handle([ev.Arrived(request("a"))], 0.0)


def test_a_request_that_is_left_nowhere_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    made = build_scheduler("slackline", None, lambda who, events, error: told.append(who))
    made.handle([up("c", Role.COLLOCATED)], 0.0)
    breaks(1, made.dispatcher, monkeypatch, ev.Arrived)
    reply = made.handle([ev.Arrived(request("a"))], 1.0)
    assert [each.request.id for each in of(reply, ev.Unscheduled)] == ["a"]
    assert (told, reply.wake_at) == (["dispatcher"], 1.1)
    assert sends(made.handle([ev.Arrived(request("b", arrival=1.2))], 1.2)) == [("b", "c", Part.WHOLE)]


def test_a_prefilled_request_that_the_migrator_lost_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = build_scheduler("slackline", None, lambda who, events, error: None)
    made.handle([up("p", Role.PREFILL), up("d", Role.DECODE)], 0.0)
    asked = request("a")
    made.handle([ev.Arrived(asked)], 0.0)
    assert made.migrator is not None
    made.migrator.rollback.forget("a")
    breaks(2, made.migrator, monkeypatch, ev.PrefillDone)  # with the others, and alone
    reply = made.handle([ev.PrefillDone(asked, "p", 10)], 1.0)
    assert [each.decision.reason for each in of(reply, ev.PrefillAgain)] == ["migrator_failed"]
    assert sends(reply) == [("a", "p", Part.PREFILL)]
