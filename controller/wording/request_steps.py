"""The steps of one request, as its record lists them: each in words, and how a disaggregated request ended.

`row`: its record.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from controller.wording.vocabulary import SOURCES, reason_in_words

# Steps of one request, as the gateway records them with it.
STEPS: dict[str, str] = {
    "slo": "Targets set",
    "dispatch": "Dispatched",
    "refuse": "Refused",
    "expire": "Timed out",
    "cancel": "Cancelled",
    "prefill": "Prefilled",
    "transfer": "KV cache transferred",
}
NOT_MOVED = "KV transfer failed"  # or was rolled back
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
    if kind == "transfer" and (recorded.get("figures") or {}).get("outcome", "done") != "done":
        what = NOT_MOVED
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


def due_s(row: RecordedRequest, token: int) -> float:
    """When token number `token` (from 1) was due: TTFT + (token - 1) x TPOT."""
    return row.target_ttft_s + max(0, token - 1) * row.target_tpot_s
