"""Bodies as they come in: whole, in parts, too large."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from api.openai import asgi
from api.openai.protocol.errors import ApiError
from tests.api.openai.gateways import KEY, TestBed

SCOPE: dict[str, Any] = {"type": "http", "path": "/v1/completions", "method": "POST", "headers": []}
START_AND_BODY = ["http.response.start", "http.response.body"]


async def test_a_body_in_parts_is_put_together() -> None:
    parts = [b"c", b"b", b"a"]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": parts.pop(), "more_body": bool(parts)}

    assert await asgi.read_body(SCOPE, receive) == b"abc"


async def test_a_body_too_large_is_answered_at_once_and_the_rest_dropped_before_the_end() -> None:
    answered: list[dict[str, Any]] = []
    unread = [b"x" * asgi.MAX_BODY_BYTES] * 4

    async def receive() -> dict[str, Any]:
        # All but the part that went beyond the limit come after the answer's body, before its end.
        assert len(unread) > 2 or [each["type"] for each in answered] == START_AND_BODY
        return {"type": "http.request", "body": unread.pop(), "more_body": bool(unread)}

    async def send(message: dict[str, Any]) -> None:
        answered.append(message)

    async with TestBed() as bed:
        key = [(b"authorization", f"Bearer {KEY}".encode())]
        await bed.app({**SCOPE, "headers": key}, receive, send)
    assert answered[0]["status"] == 413
    assert b"request_too_large" in answered[1]["body"]
    assert answered[1]["more_body"]
    assert answered[2] == {"type": "http.response.body", "body": b""}
    assert not unread


async def test_a_client_that_neither_writes_nor_goes_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "LINGER_S", 0.01)
    answered: list[dict[str, Any]] = []

    async def silent() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError("never")

    async def send(message: dict[str, Any]) -> None:
        answered.append(message)

    await asgi.refuse_body(send, silent, ApiError("request_too_large", "too much"))
    assert len(answered) == 3
