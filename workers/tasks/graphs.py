"""Makes the pattern graphs of tenants' workflows from recorded requests. Celery queue `analysis`.

A version is stored whole or not at all, so that a trainer that was killed leaves the last one in force.
"""

from __future__ import annotations

from celery import shared_task

from workers.tasks.names import GRAPHS


@shared_task(name=GRAPHS, soft_time_limit=280, time_limit=300)
def train() -> None:
    from workers.analysis.graph_versions import train_tenants  # numpy: only in the worker of this queue

    train_tenants()
