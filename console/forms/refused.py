"""Posts that fail CSRF checks or come from anonymous users: all are counted, and audited up to a limit."""

from __future__ import annotations

import logging

from django.db import Error as DatabaseError
from django.http import HttpRequest
from psycopg_pool import PoolTimeout

from console.metrics import REFUSED
from controller.services.actors import Actor
from controller.services.records.refusals import NOBODY, access_refused

log = logging.getLogger(__name__)

SAFE = ("GET", "HEAD", "OPTIONS")


def refused_record(request: HttpRequest, reason: str) -> None:
    """Record the decision `access_refused`. Never raises: the refusal must not depend on the database."""
    REFUSED.labels(reason).inc()
    try:
        known = request.user.is_authenticated
    except (DatabaseError, PoolTimeout) as error:
        log.warning("refusal not recorded: %s", error, extra={"action": "refusal_not_recorded"})
        return
    access_refused(
        actor=Actor.person(request.user.get_username()) if known else NOBODY,
        bucket="people" if known else "anonymous",
        subject_type="page",
        subject=request.path,
        reason=reason,
        inputs={"method": request.method},
    )
