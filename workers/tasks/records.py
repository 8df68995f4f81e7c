"""Retention of stored data: creates partitions in advance, drops old ones, trims the roll-up, actions and the audit."""

from __future__ import annotations

import logging

from celery import shared_task
from django.conf import settings

from controller.services.access.sessions import sessions_clear
from controller.services.fleet.instance_links import instance_links_retain
from controller.services.fleet.scaling import SAMPLES_KEPT_DAYS, samples_retain
from controller.services.records.partitions import partitions_ensure, records_retain, rollup_retain, workflows_retain
from controller.services.records.retention import actions_retain, decisions_retain
from workers.tasks.names import PARTITIONS, RETENTION

log = logging.getLogger(__name__)


@shared_task(name=PARTITIONS, soft_time_limit=50, time_limit=60)
def ensure_partitions() -> None:
    made = partitions_ensure()
    if made:
        log.info("created partitions for %s", ", ".join(map(str, made)))


@shared_task(name=RETENTION, time_limit=300, soft_time_limit=280)
def drop_old_records() -> None:
    dropped = records_retain(days=settings.RECORDS_KEPT_DAYS)
    if dropped:
        log.info("dropped the records of %s", ", ".join(map(str, dropped)))
    trimmed = rollup_retain(days=settings.ROLLUP_KEPT_DAYS)
    if trimmed:
        log.info("deleted %d rows of the roll-up by minute", trimmed)
    forgotten = workflows_retain(days=settings.RECORDS_KEPT_DAYS)
    if forgotten:
        log.info("deleted %d results of workflows", forgotten)
    samples_retain(days=SAMPLES_KEPT_DAYS)
    instance_links_retain(days=settings.RECORDS_KEPT_DAYS)
    actions_retain(days=settings.ACTIONS_KEPT_DAYS)
    sessions_clear()
    decided = decisions_retain(days=settings.DECISIONS_KEPT_DAYS)
    if decided:
        log.info("deleted %d old decisions of jobs", decided)
