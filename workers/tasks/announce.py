"""Decisions of jobs, sent to the browsers that watch, once they are committed."""

from __future__ import annotations

import logging

from celery import current_app
from kombu.exceptions import KombuError

from controller.core.messages import DecisionMessage
from controller.models import Decision
from workers.live import LiveUnavailable, send_decision
from workers.tasks.names import ACTIONS

log = logging.getLogger(__name__)
SOON_S = 2.0


def announce(decision: Decision | None) -> None:
    """The row is what counts: a browser that hears nothing reads it at its next look."""
    if decision is None:
        return
    log.info("decided %s %s: %s %s", decision.kind, decision.subject, decision.reason, decision.outcome or "")
    try:
        send_decision(message_of(decision))
    except LiveUnavailable as error:
        log.warning("decision %s was not sent live: %s", decision.pk, error)


def announce_actions() -> None:
    """Something was ordered: a look now, not at beat's next tick. With the broker away that tick finds it."""
    try:
        current_app.send_task(ACTIONS, expires=SOON_S, retry=False)
    except (KombuError, OSError) as error:
        log.warning("no look at actions at once: %s", error)


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
