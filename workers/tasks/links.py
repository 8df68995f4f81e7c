"""The links between engines: a look each second by beat."""

from __future__ import annotations

from celery import shared_task
from django.conf import settings

from workers.actions.instance_links import look
from workers.live import announce
from workers.tasks.names import LINKS


@shared_task(name=LINKS, soft_time_limit=7, time_limit=9)
def look_at_links() -> None:
    if not settings.FLEET_TOKEN:  # engines would refuse to be told, and exchange nothing
        return
    for decision in look():
        announce(decision)
