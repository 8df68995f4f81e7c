"""Static files as a plain ASGI app, mounted by `console/asgi.py` beside Django.

Files come from the ordinary staticfiles finders and are kept in memory, plain and compressed: the whole folder is some
two megabytes. A file changed on disk is read again. `Cache-Control: no-cache` makes browsers revalidate by ETag, so
that a new release is seen at once without hashed names, which ES module imports would not survive.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import mimetypes
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from django.contrib.staticfiles import finders
from django.core.exceptions import SuspiciousFileOperation

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

COMPRESSED = ("text/", "application/javascript", "application/json", "image/svg+xml")
TYPES = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class Asset:
    body: bytes
    compressed: bytes | None
    etag: bytes
    content_type: bytes
    mtime_ns: int


def load(path: Path, mtime_ns: int) -> Asset:
    body = path.read_bytes()
    kind = TYPES.get(path.suffix) or mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    packed = gzip.compress(body, 6, mtime=0) if kind.startswith(COMPRESSED) and len(body) > 500 else None
    etag = f'"{hashlib.sha256(body).hexdigest()[:24]}"'
    return Asset(body, packed, etag.encode(), kind.encode(), mtime_ns)


class StaticFiles:
    """Serves GET and HEAD under `prefix`; 404 for what no finder knows."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._assets: dict[str, Asset] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in ("GET", "HEAD"):
            await respond(send, 405, [(b"allow", b"GET, HEAD")])
            return
        asset = await self._find(scope["path"][len(self.prefix) :])
        if asset is None:
            await respond(send, 404, [(b"content-type", b"text/plain")], b"no such file\n")
            return
        wanted = dict(scope["headers"])
        headers = [(b"etag", asset.etag), (b"cache-control", b"no-cache"), (b"vary", b"accept-encoding")]
        if asset.etag in wanted.get(b"if-none-match", b""):
            await respond(send, 304, headers)
            return
        headers += [(b"content-type", asset.content_type), (b"x-content-type-options", b"nosniff")]
        body = asset.body
        if asset.compressed is not None and b"gzip" in wanted.get(b"accept-encoding", b""):
            body = asset.compressed
            headers.append((b"content-encoding", b"gzip"))
        headers.append((b"content-length", str(len(body)).encode()))
        await respond(send, 200, headers, body if scope["method"] == "GET" else b"")

    async def _find(self, name: str) -> Asset | None:
        try:
            found = finders.find(name) if name and not name.endswith("/") else None
        except SuspiciousFileOperation:  # a path that climbs out of the folders
            return None
        if not isinstance(found, str) or not Path(found).is_file():
            return None
        mtime_ns = Path(found).stat().st_mtime_ns
        asset = self._assets.get(found)
        if asset is None or asset.mtime_ns != mtime_ns:
            # Compressing the chart library takes 60 ms: not on the loop that serves live pages.
            asset = await asyncio.to_thread(load, Path(found), mtime_ns)
            self._assets[found] = asset
        return asset


async def respond(send: Send, status: int, headers: Headers, body: bytes = b"") -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
