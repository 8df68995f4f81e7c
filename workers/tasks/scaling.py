"""The tick of the scaler, once a second. Each policy has its own lock and its own transaction."""

from __future__ import annotations

import logging
import time

from celery import current_app, shared_task
from celery.exceptions import SoftTimeLimitExceeded
from kombu.exceptions import KombuError

from controller.core.messages import FailingPolicies, FleetMessage
from controller.models import ScalingPolicy
from controller.services.fleet.scaling import scaler_tick
from workers.live import LiveUnavailable, announce, read_fleet
from workers.tasks.failures import failed_again, read_failing_policies, write_failing_policies
from workers.tasks.names import ACTIONS, SCALE

log = logging.getLogger(__name__)
ORDERS = {"warm", "woken", "asleep"}  # outcomes of a decision that the queue `actions` carries out
SOON_S = 2.0


@shared_task(name=SCALE, soft_time_limit=6, time_limit=8)
def tick() -> None:
    """A policy that raises does not end the ticks of the others. It comes last until it works again, so that one that
    takes all the time leaves it to the others first."""
    fleet = fleet_or_nothing()
    before = _failing_before()
    policies = {
        str(pk): f"{model}/{role}"
        for pk, model, role in ScalingPolicy.objects.filter(enabled=True)
        .order_by("pk")
        .values_list("pk", "model__name", "role")
    }
    failing = {key: each for key, each in before.items() if key in policies}
    try:
        for key in sorted(policies, key=lambda key: key in before):
            error = _tick_one(int(key), policies[key], fleet)
            if error is None:
                failing.pop(key, None)
                continue
            failing[key] = failed_again(before.get(key), policies[key], error)
            if isinstance(error, SoftTimeLimitExceeded):
                raise error
    finally:
        write_failing_policies(failing)


def _tick_one(policy_id: int, name: str, fleet: list[FleetMessage]) -> Exception | None:
    """The exception that the tick raised, of whatever type; the next tick tries again."""
    try:
        decision = scaler_tick(policy_id=policy_id, fleet=fleet, now=time.time())
        announce(decision)
        if decision is not None and ORDERS & decision.outcome.keys():
            start_actions()
    except Exception as error:
        log.exception("scaling policy %s (%s): tick failed", policy_id, name)
        return error
    return None


def _failing_before() -> FailingPolicies:
    try:
        return read_failing_policies()
    except LiveUnavailable:
        return {}


def fleet_or_nothing() -> list[FleetMessage]:
    """The state that gateways publish; empty without Redis. The scaler then records stale telemetry, once."""
    try:
        return read_fleet()
    except LiveUnavailable as error:
        log.warning("no telemetry: %s", error)
        return []


def start_actions() -> None:
    """Carry new actions out now instead of at beat's next tick, which is also what finds them without a broker."""
    try:
        current_app.send_task(ACTIONS, expires=SOON_S, retry=False)
    except (KombuError, OSError) as error:
        log.warning("new actions wait for the next tick: %s", error)
