"""What a client is told when the dispatcher refuses or drops its request: a sentence, made of the decision's figures.

The figures themselves, and the engine and its error, stay in the request's record: they are for operators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from controller.core.decisions import Decision
from controller.wording.figures import took

Told = Mapping[str, Any]


def refusal(decision: Decision) -> str:
    """One sentence for every decision that ends a request, also for one that this gateway does not know."""
    told = REFUSALS.get(decision.reason)
    if told is not None:
        try:
            return told(decision.figures)
        except (KeyError, TypeError, ValueError):
            pass  # of another dispatcher, without those figures
    return f"This request was not served: {decision.reason.replace('_', ' ')}."


def _alone(figures: Told) -> str:
    """The one figure that breaks its promise, and that promise."""
    needs = _said_of(figures, NEEDS)
    return f"This request cannot meet its SLO even alone: {needs} and {_said_of(figures, PROMISES)}."


NEEDS = {"decode_step_s": "a token takes", "answer_s": "its whole answer takes", "prefill_s": "its prefill takes"}
PROMISES = {"tpot_s": "its target between tokens is", "ttft_s": "its TTFT target is", "deadline_s": "its deadline is"}


def _said_of(figures: Told, words: Mapping[str, str]) -> str:
    """Of the first of these that there is. Raises ValueError where there is none."""
    for name, text in words.items():
        if name in figures:
            return f"{text} {took(figures[name])}"
    raise ValueError(f"none of {', '.join(words)}")


def _behind(figures: Told) -> str:
    others = figures["queued"]
    waiting = f", and {_number(others, 'other request')} {'waits' if others == 1 else 'wait'}" if others else ""
    return f"This request cannot meet its SLO behind those before it: it waited {took(figures['waited_s'])}{waiting}."


def _queue_full(figures: Told) -> str:
    return f"The queue is full: {_number(figures['queued'], 'request')} wait, as many as it may hold."


def _no_instance(figures: Told) -> str:
    if "waited_s" not in figures:
        return "No instance serves this model, and none is on its way."
    waited = took(figures["waited_s"])
    return f"No instance serves this model any more, and none is on its way: this request waited {waited}."


def _starts_too_late(figures: Told) -> str:
    starts, may = took(figures["starts_in_s"]), took(figures["waiting_s"])
    return f"No instance serves this model yet: the next one is expected in {starts}, and this request may wait {may}."


def _engine_failed(figures: Told) -> str:
    attempts = figures["attempts"]
    each = f" at each of {attempts} attempts" if attempts > 1 else ""
    return f"The engine failed before the first token{each}."


def _expired(figures: Told) -> str:
    waited = f"it waited {took(figures['waited_s'])}"
    return f"This request was not sent to an engine within its waiting time: {waited}, and {_held_up(figures)}."


def _held_up(figures: Told) -> str:
    if figures["paused"]:
        return "an operator held it back"
    able = figures["instances"]
    if not able:
        return "no instance took requests"
    return "the only instance was busy" if able == 1 else f"all {able} instances were busy"


def _no_time(figures: Told) -> str:
    return "The engine failed before the first token, and the waiting time left none for another attempt."


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


REFUSALS: Mapping[str, Callable[[Told], str]] = {  # by the reasons of controller/dispatch
    "infeasible_alone": _alone,
    "unattainable_in_queue": _behind,
    "queue_full": _queue_full,
    "no_instance": _no_instance,
    "starts_too_late": _starts_too_late,
    "engine_failed": _engine_failed,
    "waiting_time": _expired,
    "no_time_to_retry": _no_time,
}
