"""Advances the open actions that `controller.services.fleet.actions` stores: once a second, and after each new one.

Queue `actions`. Each run is short, since engines load weights by themselves. The next run continues what a killed
worker left.
"""

from __future__ import annotations

import logging

from celery import shared_task

from workers.actions.runner import advance_actions
from workers.live import announce
from workers.tasks.names import ACTIONS
from workers.tasks.scaling import fleet_or_nothing

log = logging.getLogger(__name__)


@shared_task(name=ACTIONS, soft_time_limit=7, time_limit=9)
def work() -> None:
    for decision in advance_actions(fleet_or_nothing()):
        announce(decision)
