"""Restores the values of a form that was submitted after its session had expired, once the user signs in again.

The values are kept in a signed cookie of that browser for 15 minutes. Not in the database, since anonymous requests
must not store rows; and only for posts with a CSRF token or from our own origin, so that other sites cannot set them.
Forms of the console contain no secrets.
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
# Forms whose views call `data_of`.
FORMS = (
    "class-new", "class-edit", "mapping-edit", "tenant-new", "tenant-edit", "key-new", "scaling-new", "scaling-edit",
    "scaling-hold", "experiment-new", "service-account-new", "service-account-edit", "instance-new",
    "instance-start", "instance-edit", "flow-settings", "launch-template-new", "launch-template-edit",
)  # fmt: skip
POSTED_ONLY = ("key-new",)  # a form on another page
BACK = "Your session expired before this was saved. Your values have been restored but are not saved yet."


def came_from(request: HttpRequest) -> str:
    """The page with the form, to return to after signing in; there the values are restored if they were kept."""
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
    """Keep the values in a cookie; for a plain button only its path. Scripts restore their own state."""
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
    """`path` with the `fields` of a form, or with `lost` if they were too long to keep."""
    try:
        found: dict[str, Any] = signing.loads(request.COOKIES.get(COOKIE, ""), salt=SALT, max_age=KEPT_S)
    except signing.BadSignature:
        return None
    return found


def data_of(request: HttpRequest, path: str | None = None) -> QueryDict | None:
    """The data for a bound form: what is posted, else the values kept for `path`, else None."""
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
    """Delete the cookie once its values are restored, or if they are for the login page only."""
    if COOKIE in request.COOKIES:
        found = kept(request)
        if found is None or "fields" not in found or getattr(request, "typed", None) is not None:
            response.delete_cookie(COOKIE, samesite="Lax")
    if getattr(request, "typed", None) is not None and response.status_code == 422:
        response.status_code = 200  # restored, not submitted: its errors are only hints
    return response
