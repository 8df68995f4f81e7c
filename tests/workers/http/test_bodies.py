"""The bound in front of Django: bodies too large never reach it, declared or not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
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
    bounded: BoundedBodies,
    parts: Sequence[bytes],
    path: str = "/login/",
    method: str = "POST",
    address: str = "203.0.113.5",
    **headers: str,
) -> tuple[int, dict[str, Any]]:
    answered: list[Any] = []
    waiting = list(parts)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": waiting.pop(0), "more_body": bool(waiting)}

    async def send(message: Any) -> None:
        answered.append(message)

    fields = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "path": path, "headers": fields, "client": (address, 40_000)}
    await bounded(scope, receive, send)
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


async def known(scope: Any) -> bool:
    return any(name == b"cookie" for name, _ in scope["headers"])


async def test_traces_may_be_larger_and_only_they():
    bounded = BoundedBodies(Pages(), LIMITS, ("/traces/",), known)
    assert (await post(bounded, [b"x" * 4_000], "/traces/", cookie="valid"))[0] == 200
    assert (await post(bounded, [b"x" * 4_000], "/login/", cookie="valid"))[0] == 413
    assert (await post(bounded, [b"x" * 4_000], "/traces/", "PUT", cookie="valid"))[0] == 413
    assert (await post(bounded, [b"x" * 3_000] * 2, "/traces/", cookie="valid"))[0] == 413


async def test_a_stranger_uploads_no_more_than_it_sends_elsewhere():
    bounded = BoundedBodies(Pages(), LIMITS, ("/traces/",), known)
    status, body = await post(bounded, [b"x" * 4_000], "/traces/", content_length="4000")
    assert (status, body["error"]["message"]) == (413, "The request body may have at most 1000 bytes.")


async def test_a_strangers_upload_gets_the_time_of_other_bodies():
    bounded = BoundedBodies(Pages(), replace(LIMITS, body_s=0.05), ("/traces/",), known)
    answered: list[Any] = []
    scope = {"type": "http", "method": "POST", "path": "/traces/", "headers": [], "client": ("203.0.113.5", 40_000)}

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: Any) -> None:
        answered.append(message)

    await bounded(scope, receive, send)
    assert (answered[0]["status"], bounded.held) == (408, 0)


LARGE = HttpLimits(body_bytes=2 << 20, upload_bytes=33 << 20, bodies_bytes=16 << 20)
PIECE = b"x" * (1 << 20)


async def held(bounded: BoundedBodies, size: int, address: str, path: str = "/login/", **headers: str) -> Any:
    """A request that has sent `size` bytes and stops. Returns its task and what it was answered."""
    answered: list[Any] = []
    left = [PIECE] * (size >> 20)
    fields = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": path, "headers": fields, "client": (address, 40_000)}

    async def receive() -> dict[str, Any]:
        if not left:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": left.pop(), "more_body": True}

    async def send(message: Any) -> None:
        answered.append(message)

    task = asyncio.create_task(bounded(scope, receive, send))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return task, answered


async def end(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_strangers_of_one_address_cannot_keep_others_from_sending():
    bounded = BoundedBodies(Pages(), LARGE, ("/traces/",), known)
    hogs = [await held(bounded, 2 << 20, "198.51.100.7") for _ in range(8)]
    assert bounded.held <= LARGE.bodies_bytes / 8
    assert [answered[0]["status"] for _, answered in hogs if answered] == [503] * 7
    assert (await post(bounded, [PIECE]))[0] == 200
    await end([task for task, _ in hogs])
    assert (bounded.held, bounded.by_address) == (0, {})


async def test_strangers_of_many_addresses_leave_room_to_sign_in_and_for_who_is_signed_in():
    bounded = BoundedBodies(Pages(), LARGE, ("/traces/",), known)
    hogs = [await held(bounded, 2 << 20, f"198.51.100.{number}") for number in range(20)]
    assert bounded.held == LARGE.bodies_bytes * 3 / 4
    assert (await post(bounded, [PIECE]))[0] == 503
    assert (await post(bounded, [b"x" * 10_000]))[0] == 200
    assert (await post(bounded, [PIECE], cookie="valid"))[0] == 200
    assert (await post(bounded, [PIECE] * 3, "/traces/", cookie="valid"))[0] == 200
    await end([task for task, _ in hogs])


async def test_all_bodies_together_are_bounded_for_who_is_signed_in_too():
    bounded = BoundedBodies(Pages(), LARGE, ("/traces/",), known)
    hogs = [await held(bounded, 8 << 20, f"198.51.100.{number}", "/traces/", cookie="valid") for number in range(2)]
    assert bounded.held == LARGE.bodies_bytes
    status, body = await post(bounded, [PIECE], cookie="valid")
    assert (status, body["error"]["code"], bounded.held) == (503, "no_capacity", LARGE.bodies_bytes)
    await end([task for task, _ in hogs])


async def test_a_caller_that_cannot_be_recognised_is_a_stranger():
    async def away(scope: Any) -> bool:
        raise OSError("the database is unavailable")

    bounded = BoundedBodies(Pages(), LIMITS, ("/traces/",), away)
    assert (await post(bounded, [b"x" * 500], "/traces/"))[0] == 200
    assert (await post(bounded, [b"x" * 4_000], "/traces/"))[0] == 413


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
