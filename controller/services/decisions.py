"""The audit log: decisions are added and never changed."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from django.utils import timezone

from controller.models import Decision
from controller.services.actors import Actor


def decision_record(
    *,
    actor: Actor,
    kind: str,
    subject_type: str,
    subject: str,
    reason: str,
    inputs: Mapping[str, Any] | None = None,
    outcome: Mapping[str, Any] | None = None,
    rejected: Mapping[str, Any] | None = None,
    request_id: str = "",
    idempotency_key: str | None = None,
    at: datetime | None = None,
) -> Decision:
    """Add a decision. If its `idempotency_key` was used before, the earlier decision is returned and none is added.

    `decision.is_new` tells the two apart. A job calls this first in the transaction of the change that the decision
    stands for, and stops if the decision is not new, so no decision is applied twice.
    """
    fields = {
        "at": at or timezone.now(),
        "actor_type": actor.type,
        "actor": actor.name,
        "kind": kind,
        "subject_type": subject_type,
        "subject": subject,
        "reason": reason,
        "inputs": dict(inputs or {}),
        "outcome": dict(outcome or {}),
        "rejected": dict(rejected or {}),
        "request_id": request_id,
    }
    if idempotency_key is None:
        decision, created = Decision.objects.create(**fields), True
    else:
        decision, created = Decision.objects.get_or_create(idempotency_key=idempotency_key, defaults=fields)
    decision.is_new = created
    return decision
