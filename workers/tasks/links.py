"""Updates the links between engines, once a second."""

from __future__ import annotations

from celery import shared_task
from django.conf import settings

from workers.actions.instance_links import update_links
from workers.live import announce
from workers.tasks.names import LINKS


@shared_task(name=LINKS, soft_time_limit=7, time_limit=9)
def update() -> None:
    if not settings.FLEET_TOKEN:  # without it engines refuse to keep links and exchange nothing
        return
    for decision in update_links():
        announce(decision)
