"""Audit records of commands to the gateways' queues, whatever their outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from controller.core.messages import CommandAnswer
from controller.models import Decision
from controller.services.actors import Actor
from controller.services.decisions import decision_record


def queue_command_outcome(
    request_ids: Sequence[str], answers: Sequence[CommandAnswer], *, complete: bool
) -> dict[str, Any]:
    """The outcome for each request. It waits in one gateway only, so all others report it "gone". Unless every gateway
    that got the command has answered (`complete`), it may wait in one that did not: "unanswered"."""
    applied = {each for answer in answers for each in answer["applied"]}
    too_late = {each for answer in answers for each in answer["too_late"]} - applied
    rest = [each for each in request_ids if each not in applied | too_late]
    return {
        "applied": [each for each in request_ids if each in applied],
        "too_late": [each for each in request_ids if each in too_late],
        "gone": rest if complete else [],
        "unanswered": [] if complete else rest,
        "gateways": len(answers),
    }


IDS_KEPT = 1_000  # of a command on all matching requests; the record of a cancelled request names who cancelled it


def queue_filter_command_record(
    *,
    actor: Actor,
    kind: str,
    filter: Mapping[str, Any],
    request_ids: Sequence[str],
    outcome: Mapping[str, Any],
    priority: int | None = None,
) -> Decision:
    """One record of a command on all requests that match a filter. `outcome`: how many were applied, gone, too late or
    unanswered."""
    inputs: dict[str, Any] = {"filter": dict(filter), "matched": len(request_ids)}
    if priority is not None:
        inputs["priority"] = priority
    return decision_record(
        actor=actor,
        kind=f"queue_{kind}",
        subject_type="request",
        subject=f"{len(request_ids)} requests",
        reason="person_asked",
        inputs=inputs | {"request_ids": list(request_ids[:IDS_KEPT])},
        outcome=outcome,
    )


def queue_command_record(
    *,
    actor: Actor,
    kind: str,
    request_ids: Sequence[str],
    outcome: Mapping[str, Any],
    priority: int | None = None,
) -> Decision:
    """`kind`: cancel, reprioritise, pause or resume. `outcome`: which were applied, gone or too late, or the error."""
    single = request_ids[0] if len(request_ids) == 1 else ""
    inputs: dict[str, Any] = {"request_ids": list(request_ids)}
    if priority is not None:
        inputs["priority"] = priority
    return decision_record(
        actor=actor,
        kind=f"queue_{kind}",
        subject_type="request",
        subject=single or f"{len(request_ids)} requests",
        reason="person_asked",
        inputs=inputs,
        outcome=outcome,
        request_id=single,
    )
