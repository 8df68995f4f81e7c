"""What is recorded of commands on workflows, whatever their outcome."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db import connection, transaction

from controller.core.types import WorkflowCancellation
from controller.models import Decision
from controller.services.actors import Actor
from controller.services.decisions import decision_record
from controller.services.records.goodput import workflow_cancelled_write


def workflow_cancel_record(*, actor: Actor, tenant: str, workflow: str, outcome: Mapping[str, Any]) -> Decision:
    """Audit it. `outcome`: how many requests were running, or the error."""
    return decision_record(
        actor=actor,
        kind="workflow_cancel",
        subject_type="workflow",
        subject=workflow,
        reason="person_asked",
        inputs={"tenant": tenant},
        outcome=outcome,
    )


def workflow_given_up(*, cancellation: WorkflowCancellation) -> None:
    """Count the workflow as cancelled. Again it changes nothing."""
    with transaction.atomic(), connection.cursor() as cursor:
        workflow_cancelled_write(cursor, cancellation)
