"""Security headers on every page, and the server time of each request.

The policy names no other origin and allows no inline script. `style-src` carries the hash of an *empty* style element:
Plotly inserts one and fills it through the style sheet's own interface, which the policy then permits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from asgiref.sync import iscoroutinefunction, markcoroutinefunction
from django.db import DataError, InterfaceError, OperationalError
from django.http import HttpRequest, HttpResponse
from django.utils.decorators import sync_and_async_middleware
from psycopg_pool import PoolTimeout

from console.metrics import REQUEST_SECONDS, REQUESTS
from console.views.site.problems import database_away, not_found, unstorable

if TYPE_CHECKING:
    from typing_extensions import TypeIs

log = logging.getLogger(__name__)

EMPTY_STYLE = "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self'",
        f"style-src 'self' {EMPTY_STYLE}",
        "img-src 'self' data: blob:",  # charts saved as PNG pass through a blob
        "connect-src 'self'",
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    )
)
SECURITY_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}

GetResponseAsync = Callable[[HttpRequest], Awaitable[HttpResponse]]
GetResponse = Callable[[HttpRequest], HttpResponse] | GetResponseAsync


def add_headers(response: HttpResponse) -> HttpResponse:
    for name, value in SECURITY_HEADERS.items():
        response.headers.setdefault(name, value)
    # Pages show tenants' figures: neither a proxy nor the back button of a shared machine may keep them.
    response.headers.setdefault("Cache-Control", "no-store")
    return response


@sync_and_async_middleware
def security_headers(get_response: GetResponse) -> GetResponse:
    if _is_async(get_response):

        async def middleware_async(request: HttpRequest) -> HttpResponse:
            return add_headers(await get_response(request))

        return middleware_async

    def middleware(request: HttpRequest) -> HttpResponse:
        return add_headers(get_response(request))

    return middleware


def record_time(request: HttpRequest, response: HttpResponse, started: float) -> HttpResponse:
    """Server-Timing for the browser's own tools, and the console's metrics by view name (never by raw path)."""
    seconds = time.perf_counter() - started
    match = getattr(request, "resolver_match", None)
    view = match.view_name if match and match.view_name else "unmatched"
    REQUESTS.labels(view=view, method=request.method, status=str(response.status_code)).inc()
    REQUEST_SECONDS.labels(view=view).observe(seconds)
    response.headers["Server-Timing"] = f"app;dur={seconds * 1000:.1f}"
    return response


@sync_and_async_middleware
def request_timing(get_response: GetResponse) -> GetResponse:
    if _is_async(get_response):

        async def middleware_async(request: HttpRequest) -> HttpResponse:
            started = time.perf_counter()
            return record_time(request, await get_response(request), started)

        return middleware_async

    def middleware(request: HttpRequest) -> HttpResponse:
        started = time.perf_counter()
        return record_time(request, get_response(request), started)

    return middleware


class Hooks:
    """Base of middleware with hooks only: passes requests through, sync or async."""

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: GetResponse) -> None:
        self.get_response = get_response
        if _is_async(get_response):
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> HttpResponse | Awaitable[HttpResponse]:
        return self.get_response(request)


class DatabaseAway(Hooks):
    """Answers 503 with an explanation, instead of 500, when a page cannot reach PostgreSQL."""

    def process_exception(self, request: HttpRequest, exception: Exception) -> HttpResponse | None:
        if not isinstance(exception, OperationalError | InterfaceError | PoolTimeout):
            return None
        log.warning("PostgreSQL is unavailable: %s", exception, extra={"action": "database_unavailable"})
        return database_away(request)


class UnstorableInput(Hooks):
    """Values that PostgreSQL cannot store (NUL, a number or time out of range) are client errors: 404 in a path, since
    nothing can have such a name, else 400."""

    def process_view(
        self, request: HttpRequest, view: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> HttpResponse | None:
        # The control API answers such paths in its own error format.
        named = "\x00" in request.path and not request.path.startswith("/api/")
        return not_found(request) if named else None

    def process_exception(self, request: HttpRequest, exception: Exception) -> HttpResponse | None:
        if not isinstance(exception, DataError):
            return None
        log.warning("cannot be stored: %s", exception, exc_info=exception, extra={"action": "unstorable_value"})
        return unstorable(request)


def _is_async(get_response: GetResponse) -> TypeIs[GetResponseAsync]:
    return iscoroutinefunction(get_response)
