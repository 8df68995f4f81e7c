"""Sleep and wake-up of instances, as actions. A sleeper keeps its process and releases its device memory.

The levels are vLLM's: 1 keeps a copy of the weights in host memory, 2 keeps none. Actions are stored here and carried
out by `workers.actions.sleeping`. From the order to sleep until the instance is awake, nothing is sent to it. A
reference engine wakes by loading its weights from the best source, like a warm spare.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from datetime import timedelta
from typing import Any

from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import F
from django.utils import timezone

from controller.models import Action, Instance
from controller.models.fleet import Weights
from controller.services import change
from controller.services.actors import Actor
from controller.services.fleet.actions import LOADABLE, Kind, action_order, weights_load_order, weights_set
from controller.services.fleet.instances import instance_locked

SLEEPABLE = ("reference", "vllm", "sglang")  # backends that can sleep
LEVELS = (1, 2)
NO_SLEEP_MODE = "no_sleep_mode"  # reason of an order that failed because the engine was started without it
AFTER_A_FAILURE = timedelta(minutes=5)  # before the scaler uses the instance again


def can_sleep(row: Instance) -> bool:
    """Whether it serves now and its engine can sleep."""
    wanted = row.desired_state == Instance.Desired.RUNNING and row.observed_state == Instance.Observed.READY
    return wanted and row.weights == Weights.PRESENT and row.backend in SLEEPABLE


def sleep_order(
    *,
    actor: Actor,
    instance_id: str,
    level: int = 1,
    version: int | None = None,
    scale_in: Mapping[str, Any] | None = None,
) -> Action:
    """Order an instance to sleep once its requests have ended. Idempotent: an open action is returned.

    Raises DoesNotExist, VersionConflict, ValidationError (naming the field that prevents it).
    """
    if level not in LEVELS:
        raise ValidationError({"level": f"Must be one of: {', '.join(map(str, LEVELS))}."})
    with transaction.atomic():
        row = instance_locked(instance_id, version)
        if row.weights in (Weights.LEAVING, Weights.ASLEEP):
            if row.sleep_level != level:
                raise ValidationError({"level": f"{row} is asleep at level {row.sleep_level}. Wake it first."})
            return Action.objects.filter(instance=row, kind=Kind.SLEEP).latest("id")
        _check_awake(row)
        params: dict[str, Any] = {"level": level}
        if scale_in is not None:
            params["scale_in"] = dict(scale_in)
        action = action_order(actor, row, Kind.SLEEP, params)
        weights_set(row, Weights.LEAVING, level)
        change.audit(actor, "instance", "sleep_ordered", row, {"level": level, "action": action.pk})
    return action


def wake_order(
    *, actor: Actor, instance_id: str, version: int | None = None, scale_out: Mapping[str, Any] | None = None
) -> Action:
    """Order a sleeper to wake up. Idempotent: the earlier action is returned.

    The action is a weight load if the engine loads weights while it runs. `scale_out`: the decision it belongs to.
    Raises DoesNotExist, VersionConflict, ValidationError.
    """
    with transaction.atomic():
        row = instance_locked(instance_id, version)
        if row.weights == Weights.LEAVING:
            raise ValidationError({"weights": f"{row} is still falling asleep. Try again once it is asleep."})
        if row.weights != Weights.ASLEEP:
            return _earlier(row)
        if row.desired_state != Instance.Desired.RUNNING:
            raise ValidationError(
                {"desired_state": f"The desired state of {row} is {row.desired_state}; must be running."}
            )
        if row.backend in LOADABLE:
            return weights_load_order(actor=actor, instance_id=row.pk, scale_out=scale_out, woken=row.sleep_level)
        params: dict[str, Any] = {"level": row.sleep_level, "woken": row.sleep_level}
        if scale_out is not None:
            params["scale_out"] = dict(scale_out)
        action = action_order(actor, row, Kind.WAKE, params)
        weights_set(row, Weights.WAKING)
        change.audit(actor, "instance", "wake_ordered", row, {"level": row.sleep_level, "action": action.pk})
    return action


def sleepable(rows: Iterable[Instance], level: int) -> set[str]:
    """Ids of those that can be put to sleep at the level, without those that failed to fall asleep a short while ago
    and those whose engine has no sleep mode."""
    able = [row for row in rows if can_sleep(row)]
    without = {name for name, at in without_sleep_mode(able) if at == level}
    return {row.pk for row in able} - failed_lately(able, Kind.SLEEP) - without


def without_sleep_mode(rows: Collection[Instance]) -> set[tuple[str, int]]:
    """Id and level where an engine was found to have no sleep mode since it was started: another try, which keeps
    requests away until it has failed, would fail as well."""
    failed = Action.objects.filter(instance__in=rows, kind=Kind.SLEEP, state=Action.State.FAILED)
    found = failed.filter(decision__reason=NO_SLEEP_MODE).exclude(ended_at__lt=F("instance__ready_at"))
    return {(name, int(params["level"])) for name, params in found.values_list("instance_id", "params")}


def failed_lately(rows: Collection[Instance], *kinds: str) -> set[str]:
    """Ids of those with an action of one of these kinds that failed a short while ago."""
    since = timezone.now() - AFTER_A_FAILURE
    found = Action.objects.filter(instance__in=rows, kind__in=kinds, state=Action.State.FAILED, ended_at__gte=since)
    return set(found.values_list("instance_id", flat=True))


def _check_awake(row: Instance) -> None:
    if row.backend not in SLEEPABLE:
        raise ValidationError({"backend": f"The {row.backend} backend does not support sleep."})
    if row.desired_state != Instance.Desired.RUNNING:
        raise ValidationError({"desired_state": f"The desired state of {row} is {row.desired_state}; must be running."})
    if row.observed_state != Instance.Observed.READY:
        raise ValidationError({"observed_state": f"{row} is {row.observed_state}; must be ready to sleep."})
    if row.weights != Weights.PRESENT:
        raise ValidationError({"weights": f"{row} has no weights loaded ({row.get_weights_display().lower()})."})
    if Action.objects.filter(instance=row, kind=Kind.ROLE_SWITCH, state__in=Action.OPEN).exists():
        raise ValidationError({"role": f"{row} is switching its role. Try again once it has switched."})


def _earlier(row: Instance) -> Action:
    """The last action that woke it, or that is waking it."""
    woken = Action.objects.filter(instance=row, params__has_key="woken").order_by("-id").first()
    if woken is None:
        raise ValidationError({"weights": f"{row} is not asleep."})
    return woken
