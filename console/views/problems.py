"""Pages for what went wrong: said plainly, with a way on. None of them needs the database."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.template.loader import render_to_string

from console.forms.refused import refused_record
from console.forms.unsaved_forms import came_from, keep

RETRY_AFTER_S = 3


def problem(
    request: HttpRequest, status: int, headline: str, text: str, signed_in: bool = False, again: str = ""
) -> HttpResponse:
    if "application/json" in request.headers.get("accept", ""):
        return JsonResponse({"message": f"{headline}. {text}"}, status=status)
    context = {"headline": headline, "text": text, "signed_in": signed_in, "path": request.path, "again": again}
    # Without the request: its context processors would ask for the session, so for the database.
    return HttpResponse(render_to_string("problem.html", context), status=status)


def bad_request(request: HttpRequest, exception: Exception | None = None) -> HttpResponse:
    return problem(request, 400, "That request makes no sense", "Go back, load the page again, and try once more.")


def forbidden(request: HttpRequest, exception: Any = None) -> HttpResponse:
    return problem(request, 403, "Not allowed", str(exception) or "Your role does not allow this.", signed_in=True)


def csrf_failed(request: HttpRequest, reason: str = "") -> HttpResponse:
    """Recorded. A form of ours from before another sign-in is no attack: what was typed into it is kept."""
    refused_record(request, "csrf_failed")
    headline = "The form could not be trusted"
    if request.headers.get("origin") != f"{request.scheme}://{request.get_host()}":
        text = "The form was too old, or came from another site. Go back, load the page again, and send it once more."
        return problem(request, 403, headline, text)
    text = "Somebody signed in or out since its page was loaded. Nothing was done; what you typed is kept for a while."
    response = problem(request, 403, headline, text, again=came_from(request))
    keep(request, response)
    return response


def not_found(request: HttpRequest, exception: Any = None) -> HttpResponse:
    return problem(request, 404, "There is nothing here", "The address is wrong, or what it named is gone.")


def defect(request: HttpRequest) -> HttpResponse:
    return problem(
        request, 500, "Something broke here", "It is in the console's log. Nothing was changed by this page."
    )


def unstorable(request: HttpRequest) -> HttpResponse:
    text = "Something in it is out of range, or holds characters that are no text. Nothing was changed."
    return problem(request, 400, "That cannot be stored or looked for", text)


def database_away(request: HttpRequest) -> HttpResponse:
    text = "PostgreSQL does not answer. Requests are still served, and their records are kept meanwhile."
    response = problem(request, 503, "The database is away", text)
    response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return response
