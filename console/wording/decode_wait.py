"""Requests that were prefilled apart: what a decision of kind "place" was, and who waited for decode in vain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from controller.models import RequestRecord

PLACED, AGAIN, GIVEN_UP = "Placed for decoding", "Sent back to be prefilled again", "Given up"


def came_of_placing(recorded: Mapping[str, Any]) -> str:
    """The same kind of decision says that it was placed, begins anew or is given up: its figures tell them apart."""
    figures = recorded.get("figures") or {}
    if "failures" in figures:
        return GIVEN_UP
    return AGAIN if "instance" in figures else PLACED


def is_given_up(row: RequestRecord) -> bool:
    """Was giving it up the last that was decided?"""
    last = row.decisions[-1] if row.decisions else {}
    return last.get("kind") == "place" and came_of_placing(last) == GIVEN_UP


def end_code(row: RequestRecord) -> str:
    """Why it was not served. What its client was told says less of one that was given up: no capacity."""
    return str(row.decisions[-1].get("reason", "")) if is_given_up(row) else row.error_code


def prefilled_s(row: RequestRecord) -> float | None:
    """When the last prefill on an instance that only prefills had ended."""
    found = _prefill_step(row)
    return None if found is None else float(found["at"])


def never_decoded_s(row: RequestRecord) -> float | None:
    """When it was prefilled, of one that ended before an instance that decodes had it; None of all others.

    Its record then names where it was prefilled as its only instance.
    """
    found = _prefill_step(row)
    if found is None or row.prefill_instance or row.ttft_s is not None:
        return None
    there = (found.get("figures") or {}).get("instance") == row.instance
    return float(found["at"]) if there and found["at"] >= (row.queue_s or 0.0) else None


def _prefill_step(row: RequestRecord) -> Mapping[str, Any] | None:
    steps = (step for step in reversed(row.decisions) if step.get("kind") == "prefill")
    return next((step for step in steps if isinstance(step.get("at"), int | float)), None)
