"""Carries out what `controller.services.actions` ordered: a look each second by beat, one at once after an order.

Queue `actions`. Each look is short: an engine loads by itself, and whatever a killed worker left is seen by the next.
"""

from __future__ import annotations

import logging

from celery import shared_task

from workers.actions.runner import look
from workers.live import announce
from workers.tasks.names import ACTIONS
from workers.tasks.scaling import fleet_or_nothing

log = logging.getLogger(__name__)


@shared_task(name=ACTIONS, soft_time_limit=7, time_limit=9)
def work() -> None:
    for decision in look(fleet_or_nothing()):
        announce(decision)
