"""Composition root of the console: pages and control API (Django), static files, and live topics (Channels).

Run by `uvicorn console.asgi:application --http console.server:Protocol --ws console.server:WebSocket`: without these
two, nothing bounds connections, heads and times. A WebSocket needs a session of ours and an origin of ours.
"""

from __future__ import annotations

import os

from django.core.asgi import get_asgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "console.settings")
pages = get_asgi_application()  # before any import that needs the app registry

from channels.auth import AuthMiddlewareStack  # noqa: E402
from channels.routing import ProtocolTypeRouter, URLRouter  # noqa: E402
from django.conf import settings  # noqa: E402

from console.consumers.routing import websocket_urlpatterns  # noqa: E402
from console.known_callers import is_known  # noqa: E402
from console.origins import SameOrigin  # noqa: E402
from console.proxies import TrustedProxies  # noqa: E402
from console.server import LIMITS, UPLOADS  # noqa: E402
from console.static_files import Receive, Scope, Send, StaticFiles  # noqa: E402
from console.warm_up import warm  # noqa: E402
from workers.http.bodies import BoundedBodies  # noqa: E402
from workers.http.details import LIVE  # noqa: E402

warm()
bounded_pages = BoundedBodies(pages, LIMITS, UPLOADS, is_known)
static = StaticFiles(settings.STATIC_URL)


async def http(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["path"] == LIVE:
        await live(send)
    elif scope["path"].startswith(settings.STATIC_URL):
        await static(scope, receive, send)
    else:
        await bounded_pages(scope, receive, send)


async def live(send: Send) -> None:
    """The process runs. In front of Django, which would refuse a probe that calls by address (ALLOWED_HOSTS)."""
    head = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"3"), (b"cache-control", b"no-store")]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": b"ok\n"})


application = TrustedProxies(
    ProtocolTypeRouter(
        {
            "http": http,
            "websocket": SameOrigin(AuthMiddlewareStack(URLRouter(websocket_urlpatterns))),
        }
    ),
    settings.TRUSTED_PROXIES,
)
