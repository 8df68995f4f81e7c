"""Actions on instances: the row is the truth, a queue only a hint. Claimed by conditional update, with a lease."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from django.db.models import F
from django.utils import timezone

from controller.models import Action, Decision, Instance


def action_create(
    *, kind: str, instance: Instance | None, params: Mapping[str, Any] | None = None, decision: Decision | None = None
) -> Action:
    """In the transaction of the decision it follows from; enqueue it after commit."""
    return Action.objects.create(kind=kind, instance=instance, params=dict(params or {}), decision=decision)


def action_claim(*, action_id: int, owner: str, lease_s: float) -> Action | None:
    """A task's first statement. None: done already, or somebody else holds a lease that still runs."""
    now = timezone.now()
    claimed = (
        Action.objects.claimable(now)
        .filter(pk=action_id)
        .update(
            state=Action.State.RUNNING,
            lease_owner=owner,
            lease_until=now + timedelta(seconds=lease_s),
            attempts=F("attempts") + 1,
            updated_at=now,
        )
    )
    return Action.objects.select_related("instance").get(pk=action_id) if claimed else None


def action_renew(*, action_id: int, owner: str, lease_s: float) -> bool:
    """False: the lease was lost; stop working on it."""
    now = timezone.now()
    held = Action.objects.filter(pk=action_id, state=Action.State.RUNNING, lease_owner=owner)
    return held.update(lease_until=now + timedelta(seconds=lease_s), updated_at=now) == 1


def action_finish(*, action_id: int, owner: str, error: str = "") -> bool:
    """Done, or failed with `error`. False: the lease was lost, and somebody else decides what became of it."""
    state = Action.State.FAILED if error else Action.State.DONE
    held = Action.objects.filter(pk=action_id, state=Action.State.RUNNING, lease_owner=owner)
    return held.update(state=state, error=error, lease_until=None, updated_at=timezone.now()) == 1
