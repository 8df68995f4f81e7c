"""Trains the forests that bound the lengths of answers, on recorded requests. Celery queue `analysis`.

A version is stored whole or not at all, so that a trainer that was killed leaves the last one in force.
"""

from __future__ import annotations

from celery import shared_task

from workers.tasks.names import LENGTHS


@shared_task(name=LENGTHS, soft_time_limit=280, time_limit=300)
def train() -> None:
    from workers.analysis.length_versions import train_models  # the library is large: only where it is needed

    train_models()
