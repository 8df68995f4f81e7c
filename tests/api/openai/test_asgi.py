"""Bodies as they come in: whole, in parts, too slow."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from api.openai import asgi
from api.openai.errors import ApiError
from tests.api.openai.gateways import Answer, TestBed

SCOPE: dict[str, Any] = {"type": "http", "path": "/v1/completions", "method": "POST", "headers": []}


async def test_a_body_in_parts_is_put_together() -> None:
    parts = [b"c", b"b", b"a"]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": parts.pop(), "more_body": bool(parts)}

    assert await asgi.read_body(SCOPE, receive) == b"abc"


async def test_a_body_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "BODY_S", 0.01)

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError("never")

    with pytest.raises(ApiError) as caught:
        await asgi.read_body(SCOPE, receive)
    assert (caught.value.status, caught.value.code) == (408, "request_timeout")


async def test_a_slow_client_is_told_and_its_connection_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "BODY_S", 0.01)
    async with TestBed() as bed:
        client = bed.send(b"")
        client._parts.clear()
        answer: Answer = await client.done()
        assert (answer.status, answer.error["code"]) == (408, "request_timeout")
        assert answer.headers["connection"] == "close"
        assert not bed.gateway.runtime.flights
