"""Large bodies of one tenant are read few at a time, so that nobody else waits for all of them."""

from __future__ import annotations

import asyncio

import pytest

from api.openai.asgi import LARGE_BYTES, ClientGone, read_body
from api.openai.tenants import READ_AT_ONCE, Quotas
from tests.waiting import until_on_loop

PART = b"x" * (LARGE_BYTES + 1)
SCOPE = {"headers": []}


class Client:
    """Sends a large first part and, once `more` is called, the rest."""

    def __init__(self) -> None:
        self._parts: asyncio.Queue[dict] = asyncio.Queue()
        self._parts.put_nowait({"type": "http.request", "body": PART, "more_body": True})
        self.asked = 0

    async def receive(self) -> dict:
        self.asked += 1
        return await self._parts.get()

    def more(self, message: dict) -> None:
        self._parts.put_nowait(message)


LAST = {"type": "http.request", "body": b"y", "more_body": False}


async def test_only_some_of_a_tenants_large_bodies_are_read_at_once():
    quotas, clients = Quotas(), [Client() for _ in range(READ_AT_ONCE + 3)]
    reads = [
        asyncio.create_task(read_body(SCOPE, each.receive, turns=lambda: quotas.turns("acme"))) for each in clients
    ]
    await until_on_loop(lambda: sum(each.asked == 2 for each in clients) == READ_AT_ONCE)
    assert sum(each.asked == 1 for each in clients) == 3, "the others are not read beyond what had come"
    other = Client()
    other.more(LAST)
    whole = await read_body(SCOPE, other.receive, turns=lambda: quotas.turns("other"))
    assert len(whole) == len(PART) + 1, "another tenant does not wait for them"
    for each in clients:
        each.more(LAST)
    assert {len(each) for each in await asyncio.gather(*reads)} == {len(PART) + 1}


async def test_a_client_that_hangs_up_gives_its_turn_back():
    quotas = Quotas()
    for _ in range(READ_AT_ONCE + 1):
        client = Client()
        client.more({"type": "http.disconnect"})
        with pytest.raises(ClientGone):
            await read_body(SCOPE, client.receive, turns=lambda: quotas.turns("acme"))
    client = Client()
    client.more(LAST)
    assert len(await read_body(SCOPE, client.receive, turns=lambda: quotas.turns("acme"))) == len(PART) + 1


async def test_small_bodies_need_no_turn():
    taken = Quotas().turns("acme")
    for _ in range(READ_AT_ONCE):
        await taken.acquire()
    client = Client()
    client._parts = asyncio.Queue()
    client.more({"type": "http.request", "body": b"{", "more_body": True})
    client.more({"type": "http.request", "body": b"}", "more_body": False})
    assert await read_body(SCOPE, client.receive, turns=lambda: taken) == b"{}"
