"""Decisions of jobs, sent to the browsers that watch, once they are committed."""

from __future__ import annotations

import logging

from controller.core.messages import DecisionMessage
from controller.models import Decision
from workers.live import LiveUnavailable, send_decision

log = logging.getLogger(__name__)


def announce(decision: Decision | None) -> None:
    """The row is what counts: a browser that hears nothing reads it at its next look."""
    if decision is None:
        return
    log.info("decided %s %s: %s %s", decision.kind, decision.subject, decision.reason, decision.outcome or "")
    try:
        send_decision(message_of(decision))
    except LiveUnavailable as error:
        log.warning("decision %s was not sent live: %s", decision.pk, error)


def message_of(decision: Decision) -> DecisionMessage:
    words = f"{decision.kind} {decision.subject}: {decision.reason}".replace("_", " ")
    return DecisionMessage(
        id=str(decision.pk),
        at=decision.at.timestamp(),
        kind=decision.kind,
        actor=decision.actor,
        subject=decision.subject,
        reason=decision.reason,
        sentence=f"{decision.actor} decided {words}",
        figures={**decision.inputs, **decision.outcome},
    )
