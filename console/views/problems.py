"""Pages for what went wrong: said plainly, with a way on. None of them asks the database."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.template.loader import render_to_string

RETRY_AFTER_S = 3


def problem(request: HttpRequest, status: int, headline: str, text: str, signed_in: bool = False) -> HttpResponse:
    if "application/json" in request.headers.get("accept", ""):
        return JsonResponse({"message": f"{headline}. {text}"}, status=status)
    context = {"headline": headline, "text": text, "signed_in": signed_in, "path": request.path}
    # Without the request: its context processors would ask for the session, so for the database.
    return HttpResponse(render_to_string("problem.html", context), status=status)


def bad_request(request: HttpRequest, exception: Exception | None = None) -> HttpResponse:
    return problem(request, 400, "That request makes no sense", "Go back, load the page again, and try once more.")


def forbidden(request: HttpRequest, exception: Any = None) -> HttpResponse:
    return problem(request, 403, "Not allowed", str(exception) or "Your role does not allow this.", signed_in=True)


def csrf_failed(request: HttpRequest, reason: str = "") -> HttpResponse:
    text = "The form was too old, or came from another site. Go back, load the page again, and send it once more."
    return problem(request, 403, "The form could not be trusted", text)


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
