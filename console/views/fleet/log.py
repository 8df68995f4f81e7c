"""The log of an engine that Slackline started: the end of what it printed."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404, render
from django.template.loader import render_to_string
from django.views.decorators.gzip import gzip_page
from django.views.decorators.http import require_GET

from console.access import allows
from console.live.polled import AsOf, PagePart
from controller.models import Instance
from controller.selectors import catalogue
from controller.selectors.roles import UserRole

LATE_S = 10.0  # the page says so if it was not updated for this long


@require_GET
@allows(UserRole.OPERATOR)
def instance_log(request: HttpRequest, instance_id: str) -> HttpResponse:
    """For operators: what an engine prints is not ours, and may tell more than figures."""
    row = get_object_or_404(catalogue.instances(), pk=instance_id)
    return render(request, "console/fleet/instance_log.html", _context(row))


@gzip_page
@require_GET
@allows(UserRole.OPERATOR)
def instance_log_live(request: HttpRequest, instance_id: str) -> JsonResponse:
    """The part of the page that updates."""
    context = _context(get_object_or_404(catalogue.instances(), pk=instance_id))
    return PagePart(render_to_string("console/fleet/_instance_log.html", context), context["as_of"]).answer()


def _context(row: Instance) -> dict[str, Any]:
    from workers.provisioners.logs import log_of  # what starts engines is large, and other pages do not need it

    log, problem = None, ""
    try:
        log = log_of(row.source, row.pk, settings.DATA_DIR)
    except OSError as error:
        problem = error.strerror or str(error)
    written_at = None if log is None else datetime.fromtimestamp(log.written_at, UTC)
    return {"row": row, "log": log, "written_at": written_at, "problem": problem, "as_of": AsOf(time.time(), LATE_S)}
