"""Tells transfer daemons the stored flow policy, every few seconds: Redis may have lost it."""

from __future__ import annotations

from celery import shared_task

from workers.notices import publish_flow_policy
from workers.tasks.names import FLOWS


@shared_task(name=FLOWS, soft_time_limit=4, time_limit=5)
def publish() -> None:
    publish_flow_policy()
