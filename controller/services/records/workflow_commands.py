"""Audit records of commands on workflows, whatever their outcome."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from controller.models import Decision
from controller.services.actors import Actor
from controller.services.decisions import decision_record


def workflow_cancel_record(*, actor: Actor, tenant: str, workflow: str, outcome: Mapping[str, Any]) -> Decision:
    """`outcome`: how many requests were running, or the error."""
    return decision_record(
        actor=actor,
        kind="workflow_cancel",
        subject_type="workflow",
        subject=workflow,
        reason="person_asked",
        inputs={"tenant": tenant},
        outcome=outcome,
    )
