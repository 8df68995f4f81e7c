"""How the windows and the roll-up count a request: as attained, as missed, or separately."""

from __future__ import annotations

from typing import NamedTuple

from django.db.models import Q

from controller.core.types import ENGINE_REJECTED, Outcome
from controller.models import RequestRecord

# The same as `core.types.RequestRecord.counted_as`: requests that their client cancelled or the engine refused.
COUNTED_SEPARATELY = Q(outcome=Outcome.CANCELLED.value) | Q(error_code=ENGINE_REJECTED)


class Attained(NamedTuple):
    """`badge`: its colour; `more`: what the word leaves open, "" where it says all."""

    badge: str
    word: str
    more: str = ""


CANCELLED_HOW = {
    "client_stalled": ": its client stopped reading",
    "response_cancelled": ": its client cancelled the response",
    "response_deleted": ": the response was deleted",
    "response_lost": ": its lease had ended, so that the response counts as failed",
    "response_unstored": ": the response could not be stored",
}


def cancelled_how(row: RequestRecord) -> str:
    """What follows the word of `attained`; "" if the request was not cancelled."""
    if row.outcome != Outcome.CANCELLED.value:
        return ""
    return CANCELLED_HOW.get(row.error_code, " by its client")


def attained(row: RequestRecord) -> Attained:
    if row.attained:
        return Attained("ok", "attained")
    if row.outcome == Outcome.CANCELLED.value:
        return Attained("", "cancelled")
    if row.error_code == ENGINE_REJECTED:
        return Attained("", "refused, not counted", f"by the engine, HTTP {row.http_status}")
    return Attained("bad", "missed", "" if row.outcome == Outcome.OK.value else f"{row.outcome} {row.error_code}")
