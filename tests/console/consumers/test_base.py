"""What every live topic promises: who may listen, snapshot and sequence, merging, slow browsers, Redis away."""

from __future__ import annotations

import asyncio
import time

import pytest
from channels.db import database_sync_to_async
from django.conf import settings
from django.test import Client

from console.asgi import application
from console.consumers import base
from console.consumers.overview import OverviewConsumer
from controller.core.messages import LIVE_OVERVIEW, LIVE_TYPE
from controller.selectors.roles import UserRole
from tests import factories
from tests.console.consumers.conftest import NOBODY
from tests.console.consumers.socket import LONGEST_S, Browser
from tests.console.live.live_data import fleet, window
from workers import live

HOST = (b"host", b"localhost:8000")
OURS = [HOST, (b"origin", b"http://localhost:8000")]


async def frames(socket, until, within_s=LONGEST_S):
    """Frames up to and including the first for which `until` holds."""
    seen = []
    async with asyncio.timeout(within_s):
        while not seen or not until(seen[-1]):
            seen.append(await socket.frame(within_s))
    return seen


async def publish(layer, message):
    await layer.group_send(LIVE_OVERVIEW, {"type": LIVE_TYPE, "message": {"topic": LIVE_OVERVIEW, "data": message}})


def is_data(frame):
    return frame["type"] in ("snapshot", "update")


async def test_no_one_listens_without_a_login(browser, live_store):
    assert not await browser(OverviewConsumer, NOBODY).connect()
    assert live_store.watched == []


@pytest.mark.parametrize("path", ["/ws/overview", "/ws/queue", "/ws/decisions", "/ws/experiments", "/ws/elsewhere"])
async def test_a_handshake_without_a_session_is_refused(path):
    assert not await Browser(application, path, OURS).connect()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(("origin", "let_in"), [(b"http://localhost:8000", True), (b"https://evil.example", False)])
async def test_a_session_opens_topics_only_to_our_own_pages(live_store, origin, let_in):
    cookie = await database_sync_to_async(session_cookie)()
    socket = Browser(application, "/ws/overview", [HOST, (b"origin", origin), (b"cookie", cookie)])
    assert await socket.connect() is let_in
    await socket.leave()


def session_cookie():
    client = Client()
    client.force_login(factories.user("viewer"))
    return f"{settings.SESSION_COOKIE_NAME}={client.cookies[settings.SESSION_COOKIE_NAME].value}".encode()


@pytest.mark.django_db(transaction=True)
async def test_signing_out_ends_the_sockets_of_that_session_at_once_and_no_others(live_store, layer):
    live_store.fleets = [fleet(at=time.time())]
    client, cookie = await database_sync_to_async(signed_in_client)()
    other = await database_sync_to_async(session_cookie)()
    sockets = [
        Browser(application, f"/ws/{topic}", [*OURS, (b"cookie", each)])
        for topic, each in (("overview", cookie), ("queue", cookie), ("overview", other))
    ]
    for socket in sockets:
        assert await socket.connect()
    group = base.session_group(client.cookies[settings.SESSION_COOKIE_NAME].value)
    async with asyncio.timeout(LONGEST_S):
        while len(layer.groups.get(group, ())) < 2:
            await asyncio.sleep(0.01)
    started = time.monotonic()
    await database_sync_to_async(client.post)("/logout/")
    for socket in sockets[:2]:
        assert await socket.closed() == base.CLOSE_NOT_ALLOWED
    assert time.monotonic() - started < 5 < base.REAUTHORISE_S
    assert (await sockets[2].frame())["topic"] == "overview"
    for socket in sockets:
        await socket.leave()


@pytest.mark.django_db(transaction=True)
def test_one_signs_out_while_redis_is_away(monkeypatch):
    def away(group, event):
        raise live.LiveUnavailable("test")

    monkeypatch.setattr(live, "send_to_group", away)
    client, _ = signed_in_client()
    assert client.post("/logout/").status_code == 302
    assert client.get("/")["location"].startswith("/login/")


def signed_in_client():
    client = Client()
    client.force_login(factories.user("viewer"))
    return client, f"{settings.SESSION_COOKIE_NAME}={client.cookies[settings.SESSION_COOKIE_NAME].value}".encode()


@pytest.mark.django_db(transaction=True)
async def test_a_session_has_a_bounded_number_of_sockets_and_others_have_theirs(live_store, monkeypatch):
    monkeypatch.setattr(base, "SOCKETS_OF_SESSION", 2)
    mine, other = [await database_sync_to_async(session_cookie)() for _ in range(2)]
    sockets = [
        Browser(application, f"/ws/{topic}", [*OURS, (b"cookie", each)])
        for topic, each in (("overview", mine), ("queue", mine), ("decisions", mine), ("overview", other))
    ]
    for socket in sockets:
        assert await socket.connect()
    assert await sockets[2].closed() == base.CLOSE_TOO_MANY
    await sockets[0].leave()  # there is room again
    again = Browser(application, "/ws/decisions", [*OURS, (b"cookie", mine)])
    assert await again.connect()
    assert (await again.frame())["type"] in ("snapshot", "heartbeat")
    assert (await sockets[3].frame())["type"] in ("snapshot", "heartbeat")
    for socket in (sockets[1], sockets[3], again):
        await socket.leave()


async def test_a_message_nested_too_deeply_ends_the_connection_only(browser, live_store):
    socket = browser(OverviewConsumer)
    await socket.connect()
    await socket.say("[" * 1999)
    assert await socket.closed() == 1003


async def test_the_first_frame_is_a_whole_snapshot_with_its_age(browser, live_store):
    live_store.fleets = [fleet(at=time.time() - 1)]
    socket = browser(OverviewConsumer)
    assert await socket.connect()
    frame = (await frames(socket, is_data))[-1]
    assert (frame["type"], frame["seq"], frame["stale"]) == ("snapshot", 1, False)
    assert frame["age_s"] == pytest.approx(1, abs=0.5)
    assert frame["data"]["classes"][0]["attainment"] == 0.98
    assert LIVE_OVERVIEW in live_store.watched


async def test_updates_follow_in_sequence(browser, live_store, layer):
    live_store.fleets = [fleet(at=time.time())]
    socket = browser(OverviewConsumer)
    await socket.connect()
    first = (await frames(socket, is_data))[-1]
    await publish(layer, fleet(at=time.time() + 1, queued=7))
    seen = await frames(socket, lambda frame: is_data(frame) and frame["data"]["totals"]["queued"] == 7)
    sequence = [frame["seq"] for frame in [first, *seen] if is_data(frame)]
    assert sequence == list(range(1, len(sequence) + 1))
    assert seen[-1]["type"] == "update"


async def test_a_browser_that_missed_a_frame_gets_a_new_snapshot(browser, live_store):
    live_store.fleets = [fleet(at=time.time())]
    socket = browser(OverviewConsumer)
    await socket.connect()
    await frames(socket, is_data)
    await socket.say('{"type": "refetch"}')
    assert (await frames(socket, lambda frame: frame["type"] == "snapshot"))[-1]["seq"] > 1


@pytest.mark.parametrize("text", ["nonsense", "[]", '{"type": "drop"}', "x" * 5000])
async def test_a_browser_that_talks_nonsense_is_closed(browser, live_store, text):
    socket = browser(OverviewConsumer)
    await socket.connect()
    await socket.say(text)
    assert await socket.closed() == 1003


async def test_a_burst_is_merged_to_its_newest_state(browser, live_store, layer, monkeypatch):
    monkeypatch.setattr(base, "FRAME_GAP_S", 0.2)
    live_store.fleets = [fleet(at=time.time())]
    socket = browser(OverviewConsumer)
    await socket.connect()
    await frames(socket, is_data)
    for number in range(1, 51):
        await publish(layer, fleet(at=time.time() + number, queued=number))
    seen = [f for f in await frames(socket, lambda f: is_data(f) and f["data"]["totals"]["queued"] == 50) if is_data(f)]
    assert len(seen) <= 3


async def test_an_older_message_does_not_overwrite_a_newer_state(browser, live_store, layer):
    live_store.fleets = [fleet(at=time.time(), queued=5)]
    socket = browser(OverviewConsumer)
    await socket.connect()
    await frames(socket, is_data)
    await publish(layer, fleet(at=time.time() - 30, queued=99))
    await socket.say('{"type": "refetch"}')
    frame = (await frames(socket, lambda frame: frame["type"] == "snapshot"))[-1]
    assert frame["data"]["totals"]["queued"] == 5


async def test_two_gateways_are_one_page_and_a_silent_one_leaves_it(browser, live_store):
    now = time.time()
    live_store.fleets = [
        fleet(at=now),
        fleet(gateway="gateway-2", at=now - 1, classes=[window(slo_class="b")]),
        fleet(gateway="gateway-3", at=now - 60, classes=[window(slo_class="old")]),
    ]
    socket = browser(OverviewConsumer)
    await socket.connect()
    data = (await frames(socket, is_data))[-1]["data"]
    assert [row["slo_class"] for row in data["classes"]] == ["b", "chat"]
    assert data["totals"]["gateways"] == 2


async def test_a_socket_opened_while_redis_is_away_lives_says_so_and_recovers(browser, live_store):
    live_store.away = True
    socket = browser(OverviewConsumer)
    assert await socket.connect()
    frame = (await frames(socket, lambda frame: frame["reason"] == "Redis is unavailable"))[-1]
    assert (frame["type"], frame["stale"], frame["age_s"]) == ("heartbeat", True, None)
    live_store.fleets, live_store.away = [fleet(at=time.time())], False
    frame = (await frames(socket, is_data))[-1]
    assert (frame["stale"], frame["data"]["totals"]["finished"]) == (False, 100)


async def test_a_message_ends_the_outage_before_redis_is_asked_again(browser, live_store, layer, monkeypatch):
    live_store.fleets = [fleet(at=time.time())]
    socket = browser(OverviewConsumer)
    await socket.connect()
    await frames(socket, is_data)
    monkeypatch.setattr(base, "REJOIN_MAX_S", 60.0)
    monkeypatch.setattr(base.asyncio, "sleep", slow_sleep(asyncio.sleep))
    live_store.away = True
    await frames(socket, lambda frame: frame["reason"] == "Redis is unavailable")
    await publish(layer, fleet(at=time.time() + 1, queued=7))
    frame = (await frames(socket, is_data))[-1]
    assert (frame["stale"], frame["reason"], frame["data"]["totals"]["queued"]) == (False, "", 7)


def slow_sleep(sleep):
    """The joiner's pauses last; the sender's do not."""
    return lambda seconds: sleep(60.0 if seconds >= 0.5 else seconds)


async def test_old_data_is_called_stale(browser, live_store):
    live_store.fleets = [fleet(at=time.time() - 20)]
    socket = browser(OverviewConsumer)
    await socket.connect()
    frame = (await frames(socket, is_data))[-1]
    assert frame["stale"]
    assert frame["age_s"] > 19


async def test_a_browser_that_stops_reading_is_closed_and_costs_no_memory(browser, live_store, layer, monkeypatch):
    monkeypatch.setattr(base, "SEND_TIMEOUT_S", 0.1)
    before = base.SLOW_SOCKETS.labels("overview")._value.get()

    async def never(self, **frame):
        await asyncio.Event().wait()

    live_store.fleets = [fleet(at=time.time())]
    monkeypatch.setattr(OverviewConsumer, "send", never)
    closed = asyncio.Event()
    codes = []

    async def close(self, code=None, reason=None):
        codes.append(code)
        closed.set()

    monkeypatch.setattr(OverviewConsumer, "close", close)
    monkeypatch.setattr(OverviewConsumer, "accept", lambda self: asyncio.sleep(0))
    socket = browser(OverviewConsumer)
    await socket.send_input({"type": "websocket.connect"})
    async with asyncio.timeout(LONGEST_S):
        await closed.wait()
    assert codes == [base.CLOSE_TOO_SLOW]
    assert base.SLOW_SOCKETS.labels("overview")._value.get() == before + 1


async def test_a_role_that_is_taken_ends_the_stream(browser, live_store, monkeypatch):
    async def none(session):
        return UserRole.NONE

    monkeypatch.setattr(base, "current_role", none)
    monkeypatch.setattr(base, "REAUTHORISE_S", 0.05)
    socket = browser(OverviewConsumer)
    socket.scope["session"] = None
    await socket.connect()
    assert await socket.closed() == base.CLOSE_NOT_ALLOWED
