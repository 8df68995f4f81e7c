"""Commands of operators on workflows."""

from __future__ import annotations

import time
from typing import NamedTuple

from controller.models import Decision
from controller.services.actors import Actor
from controller.services.records.workflow_commands import workflow_cancel_record, workflow_given_up
from workers import live
from workers.workflows import BY_OPERATOR, WorkflowState, cancel_workflow


class CancelledWorkflow(NamedTuple):
    """`decision`: None if it had been cancelled before, so that nothing was done."""

    state: WorkflowState
    decision: Decision | None


def workflow_cancel(*, actor: Actor, tenant: str, workflow: str) -> CancelledWorkflow | None:
    """Gateways end its requests within a quarter of a second. None: gateways keep no such workflow. Raises
    LiveUnavailable; the attempt is audited then, since Redis may have taken it."""
    try:
        found = live.run(cancel_workflow(tenant, workflow, BY_OPERATOR))
    except live.LiveUnavailable as error:
        workflow_cancel_record(actor=actor, tenant=tenant, workflow=workflow, outcome={"error": str(error)})
        raise
    if found is None:
        return None
    # Also if it is not new: the first answer of Redis may have been lost, and the operator asks again.
    if (cancellation := found.cancellation(tenant, workflow, time.time())) is not None:
        workflow_given_up(cancellation=cancellation)
    if not found.new:
        return CancelledWorkflow(found, None)
    outcome = {"running": found.running, "left_s": round(found.left_s, 3)}
    return CancelledWorkflow(
        found, workflow_cancel_record(actor=actor, tenant=tenant, workflow=workflow, outcome=outcome)
    )
