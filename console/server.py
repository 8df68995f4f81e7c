"""The HTTP and WebSocket protocols of the console, for `uvicorn --http` and `--ws`: uvicorn's, with our limits."""

from __future__ import annotations

from workers.http.limits import raise_file_limit, read_limits
from workers.http.protocol import bounded, counted_websocket

UPLOADS = ("/traces/", "/api/v1/traces")

LIMITS = raise_file_limit(read_limits("console"))
Protocol = bounded(LIMITS, UPLOADS)
WebSocket = counted_websocket(Protocol.book)
