"""The bound in front of Django: bodies too large never reach it, declared or not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from workers.http.bodies import BoundedBodies
from workers.http.limits import HttpLimits

LIMITS = HttpLimits(body_bytes=1_000, upload_bytes=5_000, bodies_bytes=8_000)


class Pages:
    """Reads everything, as Django does, and keeps what it was given."""

    def __init__(self) -> None:
        self.spooled = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        more = True
        while more:
            message = await receive()
            self.spooled += len(message.get("body", b""))
            more = message.get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


async def post(
    bounded: BoundedBodies, parts: Sequence[bytes], path: str = "/login/", method: str = "POST", **headers: str
) -> tuple[int, dict[str, Any]]:
    answered: list[Any] = []
    waiting = list(parts)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": waiting.pop(0), "more_body": bool(waiting)}

    async def send(message: Any) -> None:
        answered.append(message)

    fields = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    await bounded({"type": "http", "method": method, "path": path, "headers": fields}, receive, send)
    body = answered[1]["body"]
    return answered[0]["status"], json.loads(body) if body else {}


async def test_a_small_body_passes():
    pages = Pages()
    assert (await post(BoundedBodies(pages, LIMITS), [b"x" * 500, b"x" * 500]))[0] == 200
    assert pages.spooled == 1_000


@pytest.mark.parametrize("declared", ["1001", "9" * 18, "9" * 5_000])
async def test_a_large_declared_body_is_refused_before_it_is_read(declared):
    pages = Pages()
    status, body = await post(BoundedBodies(pages, LIMITS), [b""], content_length=declared)
    assert (status, body["error"]["code"], pages.spooled) == (413, "request_too_large", 0)


async def test_an_endless_body_is_cut_off_at_the_limit():
    pages = Pages()
    bounded = BoundedBodies(pages, LIMITS)
    status, _ = await post(bounded, [b"x" * 400] * 100, transfer_encoding="chunked")
    assert status == 413
    assert pages.spooled <= 1_000
    assert bounded.held == 0


async def test_traces_may_be_larger_and_only_they():
    bounded = BoundedBodies(Pages(), LIMITS, ("/traces/",))
    assert (await post(bounded, [b"x" * 4_000], "/traces/"))[0] == 200
    assert (await post(bounded, [b"x" * 4_000], "/login/"))[0] == 413
    assert (await post(bounded, [b"x" * 4_000], "/traces/", "PUT"))[0] == 413
    assert (await post(bounded, [b"x" * 3_000] * 2, "/traces/"))[0] == 413


async def test_all_bodies_together_are_bounded():
    bounded = BoundedBodies(Pages(), LIMITS, ("/traces/",))
    bounded.held = 5_000  # of others that are not answered yet
    status, body = await post(bounded, [b"x" * 3_500], "/traces/")
    assert (status, body["error"]["code"], bounded.held) == (503, "no_capacity", 5_000)


async def test_the_console_is_behind_it():
    """An anonymous POST of three megabytes to a page and to the control API."""
    from console.asgi import application

    for path in ("/login/", "/api/v1/slo-classes"):
        answered: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"x" * 1_000_000, "more_body": True}

        async def send(message: Any, answered: list[Any] = answered) -> None:
            answered.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b"", "client": None}
        await application(scope, receive, send)
        assert answered[0]["status"] == 413
