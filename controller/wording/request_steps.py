"""The steps of one request, as its record lists them: each in words, and how a disaggregated request ended.

`row`: its record.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from controller.wording.vocabulary import SOURCES, reason_in_words

# Steps of one request, as the gateway records them with it.
STEPS: dict[str, str] = {
    "slo": "Targets set",
    "workflow": "Deadline of its workflow",
    "share": "Call shared",
    "step": "Answer of its step",
    "fork": "Branch of a fork",
    "dispatch": "Dispatched",
    "refuse": "Refused",
    "expire": "Timed out",
    "prune": "Pruned",
    "unprune": "No longer pruned",
    "cancel": "Cancelled",
    "prefill": "Prefilled",
    "prefix": "Prefix copied from another instance",
    "transfer": "KV cache transferred",
}
NOT_MOVED = {"transfer": "KV transfer failed", "prefix": "Prefix lost on the way"}  # a transfer: or was rolled back
PLACED, AGAIN, GIVEN_UP = "Placed on a decode instance", "Sent back to prefill", "Given up"


class RecordedRequest(Protocol):
    """What is read of a request's record, of the gateway's (core.types.RequestRecord) or of the stored row."""

    @property
    def model(self) -> str: ...

    @property
    def instance(self) -> str: ...

    @property
    def outcome(self) -> str: ...

    @property
    def error_code(self) -> str: ...

    @property
    def output_tokens(self) -> int: ...

    @property
    def target_ttft_s(self) -> float: ...

    @property
    def target_tpot_s(self) -> float: ...

    @property
    def target_deadline_s(self) -> float | None: ...

    @property
    def target_thinking_s(self) -> float | None: ...

    @property
    def first_answer_s(self) -> float | None: ...

    @property
    def reasoning_tokens(self) -> int: ...

    @property
    def queue_s(self) -> float | None: ...

    @property
    def ttft_s(self) -> float | None: ...

    @property
    def tpot_s(self) -> float | None: ...

    @property
    def e2e_s(self) -> float | None: ...

    @property
    def ttft_met(self) -> bool: ...

    @property
    def tpot_met(self) -> bool: ...

    @property
    def deadline_met(self) -> bool: ...

    @property
    def attained(self) -> bool: ...

    @property
    def decisions(self) -> list[dict[str, Any]]: ...

    @property
    def prefill_instance(self) -> str: ...


def step(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """One decision in a request's record: what was done and why in words; its figures as they are."""
    kind, reason = str(recorded.get("kind", "")), str(recorded.get("reason", ""))
    why = SOURCES.get(reason, "") if kind == "slo" else ""
    what = STEPS.get(kind) or kind.replace("_", " ")
    if kind == "place":
        what = came_of_placing(recorded)
    if kind in NOT_MOVED and (recorded.get("figures") or {}).get("outcome", "done") != "done":
        what = NOT_MOVED[kind]
    return {**recorded, "what": what, "why": why or reason_in_words(reason)}


def came_of_placing(recorded: Mapping[str, Any]) -> str:
    """The same kind of decision says that it was placed, starts over or is given up: its figures tell them apart."""
    figures = recorded.get("figures") or {}
    if "failures" in figures:
        return GIVEN_UP
    return AGAIN if "instance" in figures else PLACED


def is_given_up(row: RecordedRequest) -> bool:
    """Was giving it up the last that was decided?"""
    last = row.decisions[-1] if row.decisions else {}
    return last.get("kind") == "place" and came_of_placing(last) == GIVEN_UP


def end_code(row: RecordedRequest) -> str:
    """Why it was not served. What its client was told says less of one that was given up: no capacity."""
    return str(row.decisions[-1].get("reason", "")) if is_given_up(row) else row.error_code


def outcome_in_words(row: RecordedRequest) -> str:
    """The outcome and, if it was not served, why: `refused: the queue was full`."""
    code = end_code(row)
    why = reason_in_words(code) if code else ""
    if why.startswith(f"{row.outcome}: "):
        return why
    return f"{row.outcome}: {why}" if why else row.outcome


def prefilled_s(row: RecordedRequest) -> float | None:
    """When the last prefill on an instance that only prefills had ended."""
    found = _prefill_step(row)
    return None if found is None else float(found["at"])


def never_decoded_s(row: RecordedRequest) -> float | None:
    """When it was prefilled, of one that ended before an instance that decodes had it; None of all others.

    Its record then names where it was prefilled as its only instance.
    """
    found = _prefill_step(row)
    if found is None or row.prefill_instance or row.ttft_s is not None:
        return None
    there = (found.get("figures") or {}).get("instance") == row.instance
    return float(found["at"]) if there and found["at"] >= (row.queue_s or 0.0) else None


def _prefill_step(row: RecordedRequest) -> Mapping[str, Any] | None:
    steps = (step for step in reversed(row.decisions) if step.get("kind") == "prefill")
    return next((step for step in steps if isinstance(step.get("at"), int | float)), None)


class StageTimes(NamedTuple):
    """A part of the time until the first token; seconds after arrival. `name`: queue, prefill, wait (for a decode
    instance, failed KV transfers included), transfer or decode (its first step); engine where nothing tells prefill and
    the engine's own queue apart."""

    name: str
    began_s: float
    ended_s: float

    @property
    def seconds(self) -> float:
        return self.ended_s - self.began_s


def first_token_stages(row: RecordedRequest) -> list[StageTimes]:
    """What the time until the first token went to, without a gap; empty if no first token was observed."""
    if row.ttft_s is None:
        return []
    first, sent = row.ttft_s, min(row.queue_s or 0.0, row.ttft_s)
    moved = last_transfer_s(row)
    if moved is None:
        return [StageTimes("queue", 0.0, sent), StageTimes("engine", sent, first)]
    prefilled = prefilled_s(row)
    began, ended = moved
    prefilled = min(max(began if prefilled is None else prefilled, sent), first)
    # KV that moves during the prefill (overlap) delays the first token only by what is left of it afterwards.
    began = min(max(began, prefilled), first)
    ended = min(max(ended, began), first)
    return [
        StageTimes("queue", 0.0, sent),
        StageTimes("prefill", sent, prefilled),
        StageTimes("wait", prefilled, began),
        StageTimes("transfer", began, ended),
        StageTimes("decode", ended, first),
    ]


def longest_stage(row: RecordedRequest) -> str:
    """The name of the stage that took most of the time until the first token; "" if none was observed."""
    found = first_token_stages(row)
    return max(found, key=lambda each: each.seconds).name if found else ""


def last_transfer_s(row: RecordedRequest) -> tuple[float, float] | None:
    """When the last attempt to transfer the KV began and ended; only the last one can have succeeded."""
    for recorded in reversed(row.decisions):
        ended, took = recorded.get("at"), (recorded.get("figures") or {}).get("after_s")
        timed = isinstance(ended, int | float) and isinstance(took, int | float)
        if recorded.get("kind") == "transfer" and timed:
            return max(0.0, float(ended) - float(took)), float(ended)  # type: ignore[arg-type]
    return None


def due_s(row: RecordedRequest, token: int) -> float:
    """When token number `token` (from 1) was due: TTFT + (token - 1) x TPOT. With a thinking deadline all reasoning is
    due then, with the first token after it."""
    if row.target_thinking_s is not None:
        return row.target_thinking_s + max(0, token - row.reasoning_tokens - 1) * row.target_tpot_s
    return row.target_ttft_s + max(0, token - 1) * row.target_tpot_s
