"""Error pages: what happened and what to do next. None of them needs the database."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.template.loader import render_to_string

from console.forms.refused import refused_record
from console.forms.unsaved_forms import came_from, keep

RETRY_AFTER_S = 3


def problem(
    request: HttpRequest, status: int, headline: str, text: str, signed_in: bool = False, form_url: str = ""
) -> HttpResponse:
    if "application/json" in request.headers.get("accept", ""):
        return JsonResponse({"message": f"{headline}. {text}"}, status=status)
    context = {"headline": headline, "text": text, "signed_in": signed_in, "path": request.path, "form_url": form_url}
    # Without the request: its context processors would ask for the session, so for the database.
    return HttpResponse(render_to_string("problem.html", context), status=status)


def bad_request(request: HttpRequest, exception: Exception | None = None) -> HttpResponse:
    return problem(request, 400, "Bad request", "Go back, reload the page and try again.")


def forbidden(request: HttpRequest, exception: Any = None) -> HttpResponse:
    return problem(request, 403, "Access denied", str(exception) or "Your role does not allow this.", signed_in=True)


def csrf_failed(request: HttpRequest, reason: str = "") -> HttpResponse:
    """Recorded in the audit. A form of this console loaded before another sign-in is no attack: its input is kept."""
    refused_record(request, "csrf_failed")
    headline = "The form could not be verified"
    if request.headers.get("origin") != f"{request.scheme}://{request.get_host()}":
        text = "The form expired or was sent from another site. Go back, reload the page and submit it again."
        return problem(request, 403, headline, text)
    text = "Someone signed in or out after the page was loaded. Nothing was saved; your input is kept for 15 minutes."
    response = problem(request, 403, headline, text, form_url=came_from(request))
    keep(request, response)
    return response


def not_found(request: HttpRequest, exception: Any = None) -> HttpResponse:
    return problem(request, 404, "Page not found", "The address is wrong, or the item no longer exists.")


def defect(request: HttpRequest) -> HttpResponse:
    return problem(request, 500, "Something went wrong", "The error is in the console's log. No changes were made.")


def unstorable(request: HttpRequest) -> HttpResponse:
    text = "A value is out of range or contains characters that cannot be stored. No changes were made."
    return problem(request, 400, "Invalid value", text)


def database_away(request: HttpRequest) -> HttpResponse:
    text = "PostgreSQL is not responding. Requests are still served, and their records are kept until it is back."
    response = problem(request, 503, "The database is unavailable", text)
    response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return response
