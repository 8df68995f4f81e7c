"""The message for a client whose request is refused or times out: what happened, on which figures, what to do.

The figures themselves, and the engine and its error, stay in the request's record: they are for operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from controller.core.decisions import Decision
from controller.wording.measures import took

Told = Mapping[str, Any]


def refusal(decision: Decision) -> str:
    """The message of every decision that ends a request, also for a reason that this gateway does not know."""
    told = REFUSALS.get(decision.reason)
    if told is not None:
        try:
            return told(decision.figures)
        except (KeyError, TypeError, ValueError):
            pass  # of another dispatcher, without those figures
    return f"This request was not served: {decision.reason.replace('_', ' ')}."


def ended(cause: str) -> str:
    """The message of an end that no decision explains; `cause`: of `controller.dispatch.lifecycle`."""
    return ENDED[cause]


ENDED: Mapping[str, str] = {
    "cancelled by an operator": "The request was cancelled by an operator.",
    "unscheduled": "The request could not be scheduled.",
    "not decoded": "No engine could decode the answer.",
    "KV lost": "The engines that held this request's KV failed.",
    "engine failed": "The engine failed during the answer; it is incomplete.",
    "key revoked": "The API key was revoked, or its tenant deactivated, before the answer was complete.",
    "workflow cancelled": "The request's workflow was cancelled.",
    "gateway stopped": "The gateway is shutting down.",
}


def _alone(figures: Told) -> str:
    """The one figure that is too large, the target that it exceeds, and the field that raises it."""
    need = _first_of(figures, NEEDS)
    needs = f"{NEEDS[need]} {took(figures[need])}"
    bound = _first_of(figures, LIMITS)
    limit, field = LIMITS[bound]
    return (
        f"This request cannot meet its SLO even on an idle instance: {needs}, and {limit} {took(figures[bound])}. "
        f"Raise {field}."
    )


NEEDS = {"decode_step_s": "one token takes", "answer_s": "the whole answer takes", "prefill_s": "prefill takes"}
LIMITS = {  # how it is called, and the field of the client API that sets it
    "tpot_s": ("its TPOT target is", "target_tbt"),
    "ttft_s": ("its TTFT target is", "target_ttft"),
    "thinking_deadline_s": ("its thinking deadline is", "thinking_deadline"),
    "workflow_deadline_s": ("its workflow's deadline is", "workflow_deadline"),
    "deadline_s": ("its deadline is", "deadline"),
}


def _first_of(figures: Told, names: Iterable[str]) -> str:
    """The first of these figures that the decision has. Raises ValueError if it has none."""
    found = next((name for name in names if name in figures), None)
    if found is None:
        raise ValueError(f"none of {', '.join(names)}")
    return found


def _behind(figures: Told) -> str:
    others = figures["queued"]
    waiting = f", and {_number(others, 'other request')} {'is' if others == 1 else 'are'} waiting" if others else ""
    waited = f"it waited {took(figures['waited_s'])}{waiting}"
    return (
        f"This request cannot meet its SLO behind the requests ahead of it: {waited}. Retry later or raise its targets."
    )


def _queue_full(figures: Told) -> str:
    waiting = figures["queued"]
    are = "is" if waiting == 1 else "are"
    return f"The queue is full: {_number(waiting, 'request')} {are} waiting, which is its limit. Retry later."


def _no_instance(figures: Told) -> str:
    if "waited_s" not in figures:
        return "No instance of this model is up or starting. Retry later."
    waited = took(figures["waited_s"])
    return f"No instance of this model is up or starting any more; this request waited {waited}. Retry later."


def _starts_too_late(figures: Told) -> str:
    starts, may = took(figures["starts_in_s"]), took(figures["waiting_s"])
    return (
        f"No instance of this model is up yet: the next one is expected in {starts}, and this request can wait {may}. "
        "Raise waiting_time or retry later."
    )


def _engine_failed(figures: Told) -> str:
    attempts = figures["attempts"]
    each = f" in each of {attempts} attempts" if attempts > 1 else ""
    return f"The engine failed before the first token{each}. Retry the request."


def _ended_engines(figures: Told) -> str:
    lost = f"This request was not served: {figures['attempts']} engines died while they computed it"
    if "quarantine_s" not in figures:
        return f"{lost}. Change it before it is sent again."
    return (
        f"{lost}. The same request is refused for {took(figures['quarantine_s'])}; change it before it is sent again."
    )


def _quarantined(figures: Told) -> str:
    again = took(figures["quarantine_s"])
    return (
        f"This request ended engines when it was sent before, so it is refused for {again}. Change it before a retry."
    )


def _expired(figures: Told) -> str:
    waited = f"it waited {took(figures['waited_s'])}, and {_held_up(figures)}"
    return f"This request was not dispatched within its waiting time: {waited}. Raise waiting_time or retry later."


def _held_up(figures: Told) -> str:
    if figures["paused"]:
        return "an operator had paused it"
    able = figures["instances"]
    if not able and figures.get("instance_starting"):
        return "an instance was still starting"
    if not able:
        return "no instance accepted requests"
    return "the only instance was busy" if able == 1 else f"all {able} instances were busy"


def _no_time(figures: Told) -> str:
    return (
        "The engine failed before the first token, and too little waiting time was left for another attempt. "
        "Retry the request or raise waiting_time."
    )


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


REFUSALS: Mapping[str, Callable[[Told], str]] = {  # by the reasons of controller/dispatch
    "infeasible_alone": _alone,
    "unattainable_in_queue": _behind,
    "queue_full": _queue_full,
    "no_instance": _no_instance,
    "starts_too_late": _starts_too_late,
    "engine_failed": _engine_failed,
    "ended_engines": _ended_engines,
    "quarantined": _quarantined,
    "waiting_time": _expired,
    "no_time_to_retry": _no_time,
}
