"""The tick of the scaler, once a second. Each policy has its own lock and its own transaction."""

from __future__ import annotations

import logging
import time

from celery import current_app, shared_task
from django.core.exceptions import ValidationError
from django.db import Error
from kombu.exceptions import KombuError

from controller.core.messages import FleetMessage
from controller.models import ScalingPolicy
from controller.services.scaling import scaler_tick
from workers.live import LiveUnavailable, announce, read_fleet
from workers.tasks.names import ACTIONS, SCALE

log = logging.getLogger(__name__)
ORDERS = {"warm", "woken", "asleep"}  # outcomes of a decision that the queue `actions` carries out
SOON_S = 2.0


@shared_task(name=SCALE, soft_time_limit=6, time_limit=8)
def tick() -> None:
    fleet = fleet_or_nothing()
    for policy_id in ScalingPolicy.objects.filter(enabled=True).values_list("pk", flat=True):
        try:
            decision = scaler_tick(policy_id=policy_id, fleet=fleet, now=time.time())
            announce(decision)
            if decision is not None and ORDERS & decision.outcome.keys():
                start_actions()
        except (Error, ValidationError):  # the other policies still get their tick; the next tick tries again
            log.exception("scaling policy %s: tick failed", policy_id)


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
