"""Actions: orders to instances that take longer than one request. They are stored first, and the worker that holds the
lease carries them out.

The lease of a killed worker expires; the next worker asks the engine how far the order got and continues from there.
The end of an action, its Decision and the change of the instance are one transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from controller.models import Action, Decision, Instance
from controller.models.fleet import Weights
from controller.services import change
from controller.services.actors import Actor
from controller.services.config import config_version_raise
from controller.services.decisions import decision_record
from controller.services.fleet.instances import instance_locked, instance_observe, instance_stop
from controller.services.fleet.weight_transfers import transfers_record

LEASE = timedelta(seconds=10)  # longer than any single step takes
LOADABLE = ("reference",)  # backends whose engines load weights while they run
HOLLOW = (Weights.ABSENT, Weights.ASLEEP)  # an order to load changes these states
Kind, State = Action.Kind, Action.State


def weights_load_order(
    *,
    actor: Actor,
    instance_id: str,
    sources: Sequence[Mapping[str, str]] | None = None,
    version: int | None = None,
    scale_out: Mapping[str, Any] | None = None,
    woken: int | None = None,
) -> Action:
    """Order an instance to load its weights; an open order is returned unchanged.

    `sources` ({"kind": engine | host | disk, "url"}) in the order in which they are tried; None: chosen when the order
    is sent to the engine. `scale_out`: the decision that the load belongs to; the instance has failed if no source
    gives its weights. `woken`: the level of the sleep that the load ends; a copy in host memory is then tried first.
    Raises DoesNotExist, VersionConflict, ValidationError.
    """
    with transaction.atomic():
        row = instance_locked(instance_id, version)
        _check_loadable(row)
        there = Action.objects.filter(instance=row, kind=Kind.WEIGHTS_LOAD, state__in=Action.OPEN).first()
        if there is not None:
            return there
        params: dict[str, Any] = {} if sources is None else {"sources": [dict(source) for source in sources]}
        if scale_out is not None:
            params["scale_out"] = dict(scale_out)
        if woken is not None:
            params["woken"] = woken
        action = action_order(actor, row, Kind.WEIGHTS_LOAD, params)
        inputs = {"sources": params.get("sources", "chosen at the call"), "action": action.pk}
        if row.weights in HOLLOW:
            weights_set(row, Weights.LOADING)
        change.audit(actor, "instance", "load_ordered", row, inputs)
    return action


def first_served_watch(*, actor: Actor, instance: Instance, scale_out: Mapping[str, Any]) -> Action:
    """Watch for the first token of the instance, for the Decision of the scale-out that asked for it.

    An open watch is returned unchanged: the instance was woken, got no request, and was put to sleep again.
    """
    there = Action.objects.filter(instance=instance, kind=Kind.FIRST_SERVED, state__in=Action.OPEN).first()
    return there or action_order(actor, instance, Kind.FIRST_SERVED, {"scale_out": dict(scale_out)})


def actions_open(*, now: datetime | None = None) -> list[int]:
    """Ids of open actions without a valid lease, oldest first."""
    free = Q(lease_until__isnull=True) | Q(lease_until__lt=now or timezone.now())
    return list(Action.objects.filter(free, state__in=Action.OPEN).order_by("id").values_list("pk", flat=True))


def action_lease(*, action_id: int, now: datetime | None = None) -> Action | None:
    """Take the lease for LEASE and return the action with its instance and model. None: the action has ended, or
    another worker holds it."""
    now = now or timezone.now()
    with transaction.atomic():
        row = (
            Action.objects.select_for_update(of=("self",), skip_locked=True)
            .select_related("instance__model", "instance__host")
            .filter(Q(lease_until__isnull=True) | Q(lease_until__lt=now), pk=action_id, state__in=Action.OPEN)
            .first()
        )
        if row is not None:
            row.lease_until = now + LEASE
            row.save(update_fields=["lease_until"])
    return row


def action_keep(*, action: Action, release: bool = True, **fields: Any) -> bool:
    """Store its progress while the lease is ours. `release`: give the lease back for the next step. False: another
    worker holds it now."""
    lease = None if release else action.lease_until
    held = Action.objects.filter(pk=action.pk, lease_until=action.lease_until, state__in=Action.OPEN)
    kept = held.update(**fields, lease_until=lease) == 1
    for name, value in fields.items():
        setattr(action, name, value)
    action.lease_until = lease
    return kept


def action_end(
    *,
    action: Action,
    state: str,
    kind: str,
    subject: tuple[str, str],
    reason: str,
    inputs: Mapping[str, Any],
    outcome: Mapping[str, Any],
    error: str = "",
    attempts: Sequence[Mapping[str, Any]] = (),
    left_at: int | None = None,
) -> Decision | None:
    """Close the action with its one Decision about `subject` (type, name), and update its instance accordingly.

    `left_at`: of a sleep that failed, the level at which the engine sleeps nevertheless; 0 or None: it is awake.
    Returns None if it was closed before, or if the lease has expired and another worker holds it.
    """
    with transaction.atomic():
        held = Action.objects.select_for_update().filter(
            pk=action.pk, lease_until=action.lease_until, state__in=Action.OPEN
        )
        row = held.first()
        if row is None:
            return None
        decision = decision_record(
            actor=Actor(row.actor, row.actor_type),
            kind=kind,
            subject_type=subject[0],
            subject=subject[1],
            reason=reason,
            inputs=inputs,
            outcome=outcome,
            idempotency_key=f"action:{row.pk}",
        )
        row.state, row.error, row.decision, row.lease_until = state, error, decision, None
        row.attempts, row.ended_at = [*row.attempts, *(dict(each) for each in attempts)], timezone.now()
        row.save(update_fields=["state", "error", "decision", "lease_until", "attempts", "ended_at"])
        if row.kind == Kind.WEIGHTS_LOAD:
            transfers_record(action=row, attempts=attempts)
            _loaded(row, state == State.DONE, error)
        elif row.kind == Kind.SLEEP:
            _slept(row, int(row.params["level"]) if state == State.DONE else left_at or 0)
        elif row.kind == Kind.WAKE:
            _woke(row, state == State.DONE)
    return decision if decision.is_new else None


def weights_lost(*, actor: Actor, row: Instance) -> Decision | None:
    """Its process was started again, so the weights, the sleep and the host copy of the former process are gone.

    An instance that was started warm comes up without weights: it loads them again if it served, and joins the warm
    pool if it slept. Any other comes up awake with its weights. Returns the Decision that ended a sleep, else None. An
    open order to sleep or to load continues and is sent again.
    """
    warm = row.spec.get("weights") == Weights.ABSENT
    match row.weights:
        case Weights.ASLEEP:
            return sleep_ended(
                actor=actor, row=row, weights=Weights.ABSENT if warm else Weights.PRESENT, reason="new_run"
            )
        case Weights.LOADING:
            weights_set(row, Weights.LOADING, sleep_level=0)
        case Weights.PRESENT if warm and row.desired_state == Instance.Desired.RUNNING:
            weights_set(row, Weights.ABSENT)
            weights_load_order(actor=actor, instance_id=row.pk)
    return None


def sleep_ended(*, actor: Actor, row: Instance, weights: str, reason: str) -> Decision:
    """A sleeper woke up without an order of ours. The caller holds the row's lock and has checked that it sleeps."""
    decision = decision_record(
        actor=actor,
        kind="instance_awake",
        subject_type="instance",
        subject=row.pk,
        reason=reason,
        inputs={"level": row.sleep_level},
        outcome={"weights": str(weights)},
    )
    weights_set(row, weights, sleep_level=0)
    return decision


def action_order(actor: Actor, row: Instance, kind: str, params: Mapping[str, Any]) -> Action:
    """Add an action. The caller holds the instance's lock and has checked that none of the kind is open."""
    return Action.objects.create(
        kind=kind,
        instance=row,
        params=dict(params),
        actor_type=actor.type,
        actor=actor.name,
        created_at=timezone.now(),
    )


def _check_loadable(row: Instance) -> None:
    if row.backend not in LOADABLE:
        raise ValidationError({"backend": f"The {row.backend} backend cannot load weights into a running engine."})
    if row.desired_state != Instance.Desired.RUNNING:
        raise ValidationError({"desired_state": f"The desired state of {row} is {row.desired_state}; must be running."})
    if row.weights == Weights.LEAVING:
        raise ValidationError({"weights": f"{row} is still falling asleep. Try again once it is asleep."})


def _loaded(action: Action, here: bool, error: str) -> None:
    """An instance of a scale-out that got no weights has failed, so that the scaler asks for another."""
    row = Instance.objects.select_for_update().get(pk=action.instance_id)
    if here and row.weights != Weights.LEAVING:  # what was seen before a sleep began no longer counts
        weights_set(row, Weights.PRESENT, sleep_level=0)
    elif row.weights == Weights.LOADING:
        weights_set(row, Weights.ASLEEP if row.sleep_level else Weights.ABSENT)
        if action.params.get("scale_out") and row.desired_state == Instance.Desired.RUNNING:
            instance_observe(instance_id=row.pk, observed_state=Instance.Observed.FAILED, error=error)
            instance_stop(actor=Actor(action.actor, action.actor_type), instance_id=row.pk)


def _slept(action: Action, level: int) -> None:
    """If it did not fall asleep it serves again; if it was found asleep at another level it sleeps at that level."""
    row = Instance.objects.select_for_update().get(pk=action.instance_id)
    if row.weights == Weights.LEAVING:
        weights_set(row, Weights.ASLEEP if level else Weights.PRESENT, level)


def _woke(action: Action, awake: bool) -> None:
    """An instance that woke up without whole weights stays asleep, so nothing is sent there."""
    row = Instance.objects.select_for_update().get(pk=action.instance_id)
    if row.weights == Weights.WAKING:
        weights_set(row, *((Weights.PRESENT, 0) if awake else (Weights.ASLEEP, row.sleep_level)))


def weights_set(row: Instance, weights: str, sleep_level: int | None = None) -> None:
    """Set the state of its weights, under the row's lock, and tell the gateways."""
    level = row.sleep_level if sleep_level is None else sleep_level
    if (row.weights, row.sleep_level) == (weights, level):
        return
    row.weights, row.sleep_level, row.version = weights, level, row.version + 1
    row.save(update_fields=["weights", "sleep_level", "version", "updated_at"])
    config_version_raise()
