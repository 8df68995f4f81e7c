"""What was typed into a form whose session had ended: it comes back into the form after the next sign-in, unsaved.

It travels in a signed cookie of the browser that sent it, for a quarter of an hour: no row that a stranger could make
us store, and nothing that another site could put there, since only a post with its CSRF token (or of our own origin)
is kept. Forms of the console hold no secrets.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from django.conf import settings
from django.contrib import messages
from django.core import signing
from django.http import HttpRequest, HttpResponse, QueryDict
from django.http.response import HttpResponseBase
from django.utils.http import url_has_allowed_host_and_scheme

COOKIE = f"slackline_typed_{settings.CONSOLE_PORT}"
SALT = "console.forms.unsaved_forms"
KEPT_S = 900
LONGEST = 3_500  # browsers take cookies of 4 kB
# Those whose views ask for `data_of`.
FORMS = (
    "class-new", "class-edit", "mapping-edit", "tenant-new", "tenant-edit", "key-new", "scaling-new", "scaling-edit",
    "experiment-new",
)  # fmt: skip
POSTED_ONLY = ("key-new",)  # a form on another page
BACK = (
    "Your session had ended or changed before this was saved. What you typed is in the form again; it is not saved yet."
)


def came_from(request: HttpRequest) -> str:
    """The page of ours that held the form, to come back to: where what was typed is shown again, if it is kept."""
    name = request.resolver_match.url_name if request.resolver_match else None
    if name in FORMS and name not in POSTED_ONLY:
        return request.path
    referer = request.headers.get("referer", "")
    if not url_has_allowed_host_and_scheme(referer, {request.get_host()}):
        return request.get_full_path()
    parts = urlsplit(referer)
    path = "/" + parts.path.lstrip("/")  # "//name" would be another host
    return f"{path}?{parts.query}" if parts.query else path


def keep(request: HttpRequest, response: HttpResponse) -> None:
    """Of a button only that it was pressed; a script knows that itself."""
    if "application/json" in request.headers.get("accept", ""):
        return
    if request.resolver_match and request.resolver_match.url_name in FORMS:
        fields = {name: values for name, values in request.POST.lists() if name != "csrfmiddlewaretoken"}
        whole = signing.dumps({"path": request.path, "fields": fields}, salt=SALT, compress=True)
        if len(whole) > LONGEST:
            whole = signing.dumps({"path": request.path, "lost": True}, salt=SALT)
    else:
        whole = signing.dumps({"path": request.path}, salt=SALT)
    response.set_cookie(
        COOKIE, whole, max_age=KEPT_S, httponly=True, samesite="Lax", secure=settings.SESSION_COOKIE_SECURE
    )


def kept(request: HttpRequest) -> dict[str, Any] | None:
    """`path`, and `fields` of a form, or `lost` where they were too long."""
    try:
        found: dict[str, Any] = signing.loads(request.COOKIES.get(COOKIE, ""), salt=SALT, max_age=KEPT_S)
    except signing.BadSignature:
        return None
    return found


def data_of(request: HttpRequest, path: str | None = None) -> QueryDict | None:
    """What a form is bound to: what is posted, else what was typed there (`path`) when the session had ended, else
    nothing."""
    if request.method == "POST":
        return request.POST
    if not hasattr(request, "typed"):
        request.typed = _shown(request, path or request.path)  # type: ignore[attr-defined]
    typed: QueryDict | None = request.typed  # type: ignore[attr-defined]
    return typed


def _shown(request: HttpRequest, path: str) -> QueryDict | None:
    found = kept(request)
    if found is None or found["path"] != path or "fields" not in found:
        return None
    data = QueryDict(mutable=True)
    for name, values in found["fields"].items():
        data.setlist(name, values)
    messages.info(request, BACK)
    return data


def forget_shown(request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
    """Once it is in its form it is kept no longer; nor is what is only for the page of the login."""
    if COOKIE in request.COOKIES:
        found = kept(request)
        if found is None or "fields" not in found or getattr(request, "typed", None) is not None:
            response.delete_cookie(COOKIE, samesite="Lax")
    if getattr(request, "typed", None) is not None and response.status_code == 422:
        response.status_code = 200  # it is looked at, not sent: its marks are only a help
    return response
