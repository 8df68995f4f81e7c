"""The SGLang adapter over a session, and calls for it, in tests."""

from __future__ import annotations

from typing import Any

import aiohttp
import orjson

from controller.core.types import InstanceSpec
from tests.workers.backends.sglang_server import SglangServer
from workers.backends.base import AnswerChunk, Limits, UpstreamCall
from workers.backends.registry import backend_for
from workers.backends.sglang import SglangBackend

LIMITS = Limits(control_s=5.0)


def adapter(server: SglangServer, session: aiohttp.ClientSession) -> SglangBackend:
    backend = backend_for(InstanceSpec("s1", "demo", url=server.url, backend="sglang"), session, LIMITS)
    assert isinstance(backend, SglangBackend)
    return backend


def call(streamed: bool = True, offer: bytes = b"", path: str = "/v1/completions", **fields: Any) -> UpstreamCall:
    body: dict[str, Any] = {"model": "demo", "prompt": [1, 2, 3], "max_tokens": 4, "stream": streamed, **fields}
    if streamed:
        body["stream_options"] = {"include_usage": True}
    return UpstreamCall("req-1", path, orjson.dumps(body)[:-1], 42, streamed, False, offer)


async def collect(backend: SglangBackend, upstream: UpstreamCall) -> list[AnswerChunk]:
    return [chunk async for chunk in backend.generate(upstream)]
