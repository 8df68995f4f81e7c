"""Runs experiments: once a second, the next one in the queue. Celery queue `analysis`.

Beat triggers the task instead of the page that creates an experiment, so that an experiment whose worker was killed is
found like a new one.
"""

from __future__ import annotations

import logging

from celery import shared_task

from controller.services.actors import Actor
from controller.services.experiments.commands import experiments_retain
from workers.tasks.names import EXPERIMENTS, EXPERIMENTS_RETAIN

log = logging.getLogger(__name__)

LONGEST_S = 1000  # more than an experiment and the previews during it may take, as a last resort


@shared_task(name=EXPERIMENTS, soft_time_limit=LONGEST_S, time_limit=LONGEST_S + 20)
def work() -> None:
    from workers.experiments.runner import next_experiment

    next_experiment()


@shared_task(name=EXPERIMENTS_RETAIN, soft_time_limit=50, time_limit=60)
def retain() -> None:
    removed = experiments_retain(actor=Actor.job("retention"))
    if removed:
        log.info("removed %d experiments that ended long ago and were not kept", removed)
