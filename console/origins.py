"""Which pages may open a WebSocket of ours: those of the same scheme, host and port, as for forms.

A WebSocket handshake carries the session's cookie whatever page asks for it, and browsers apply no same-origin rule to
it, so the server has to compare. Behind a trusted proxy the scheme is that of the browser (`console.proxies`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from django.conf import settings
from django.http.request import split_domain_port, validate_host
from django.utils.http import is_same_domain

from console.proxies import App, Receive, Scope, Send

PORTS = {"http": 80, "https": 443}


class SameOrigin:
    """ASGI middleware for WebSockets. Without an `Origin`, which every browser sends, nothing is opened.

    Allowed are the request's own origin, if its host is one of ALLOWED_HOSTS, and those of CSRF_TRUSTED_ORIGINS.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if may_open(scope):
            await self._app(scope, receive, send)
        else:
            await receive()  # the handshake
            await send({"type": "websocket.close"})  # 403; a consumer of Channels would ask Redis for a channel first


def may_open(scope: Scope) -> bool:
    """Whether the page that asks for this WebSocket is ours. A header that is there twice is refused."""
    origins, hosts = _values(scope, b"origin"), _values(scope, b"host")
    origin = _read(origins[0]) if len(origins) == 1 else None
    if origin is None:
        return False
    if any(_trusted(origin, each) for each in settings.CSRF_TRUSTED_ORIGINS):
        return True
    if len(hosts) != 1 or not validate_host(split_domain_port(hosts[0])[0], settings.ALLOWED_HOSTS):
        return False
    scheme = "https" if scope.get("scheme") == "wss" else "http"
    return origin == _read(f"{scheme}://{hosts[0]}")


def _values(scope: Scope, name: bytes) -> Sequence[str]:
    return [value.decode("latin1").lower() for key, value in scope["headers"] if key == name]


class PageOrigin(NamedTuple):
    scheme: str
    host: str
    port: int


def _read(text: str) -> PageOrigin | None:
    """None if the text is not an origin of ours to compare with, such as `null`."""
    try:
        parts = urlsplit(text)
        return PageOrigin(parts.scheme, parts.hostname or "", parts.port or PORTS[parts.scheme])
    except (ValueError, KeyError):
        return None


def _trusted(origin: PageOrigin, setting: str) -> bool:
    """An entry of CSRF_TRUSTED_ORIGINS may stand for all subdomains, as `https://*.example.com`."""
    known = _read(setting.lower().replace("://*.", "://.", 1))
    return known is not None and origin[::2] == known[::2] and is_same_domain(origin.host, known.host)
