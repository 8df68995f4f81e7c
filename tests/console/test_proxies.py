"""Forwarded addresses and schemes: believed from listed proxies only."""

from __future__ import annotations

import asyncio

import pytest

from console.proxies import PASSED_ON, TrustedProxies, networks

TRUSTED = networks(["127.0.0.1", "10.0.0.0/8", "::1"])


async def seen(client, *headers, kind="http", scheme=None):
    """What the application is given."""
    got = []

    async def app(scope, receive, send):
        got.append(scope)

    scope = {"type": kind, "client": client, "scheme": scheme or ("http" if kind == "http" else "ws")}
    scope["headers"] = [(b"host", b"console"), *headers]
    await TrustedProxies(app, TRUSTED)(scope, None, None)
    return got[0]


async def test_a_client_cannot_choose_its_address_or_its_scheme():
    headers = ((b"x-forwarded-for", b"192.0.2.1"), (b"x-forwarded-proto", b"https"), (b"forwarded", b"for=192.0.2.1"))
    scope = await seen(("203.0.113.5", 40000), *headers)
    assert (scope["client"], scope["scheme"]) == (("203.0.113.5", 40000), "http")
    assert scope["headers"] == [(b"host", b"console")]


@pytest.mark.parametrize(("peer", "client"), [("203.0.113.5", "203.0.113.5"), ("127.0.0.1", "192.0.2.1")])
async def test_the_console_believes_the_proxies_of_its_settings_alone(monkeypatch, peer, client):
    from console import asgi

    given = []

    async def pages(scope, receive, send):
        given.append(scope)

    monkeypatch.setattr(asgi, "bounded_pages", pages)
    scope = {"type": "http", "client": (peer, 1), "scheme": "http", "path": "/login/", "method": "POST"}
    await asgi.application({**scope, "headers": [(b"x-forwarded-for", b"192.0.2.1")]}, None, None)
    assert [scope["client"][0] for scope in given] == [client]


@pytest.mark.parametrize("proxy", ["127.0.0.1", "10.1.2.3", "::1", "::ffff:10.1.2.3"])
async def test_a_listed_proxy_is_believed(proxy):
    scope = await seen((proxy, 1), (b"x-forwarded-for", b"192.0.2.1"), (b"x-forwarded-proto", b"https"))
    assert (scope["client"][0], scope["scheme"]) == ("192.0.2.1", "https")
    assert scope["headers"] == [(b"host", b"console")]


@pytest.mark.parametrize(
    ("values", "address"),
    [
        ([b"198.51.100.7, 192.0.2.1, 10.0.0.9"], "192.0.2.1"),  # the first was written by the client itself
        ([b"198.51.100.7", b"192.0.2.1"], "192.0.2.1"),
        ([b"10.0.0.8, 10.0.0.9"], "10.0.0.8"),
        ([b"192.0.2.1:5123"], "192.0.2.1"),  # some proxies add the port
        ([b"[2001:db8::7]:5123, 10.0.0.9:80"], "2001:db8::7"),
        ([b"nonsense"], "unknown"),
        ([b"nonsense, 10.0.0.9"], "unknown"),
        ([b"192.0.2.1, unknown"], "unknown"),
        ([b"\xff\xfe"], "unknown"),
        ([b""], "127.0.0.1"),
        ([b"," * 100_000 + b"192.0.2.1"], "192.0.2.1"),
        ([b"2001:db8::7"], "2001:db8::7"),
    ],
)
async def test_the_client_is_the_nearest_address_that_is_no_proxy(values, address):
    scope = await seen(("127.0.0.1", 1), *((b"x-forwarded-for", value) for value in values))
    assert scope["client"][0] == address


async def test_a_scheme_that_is_said_twice_or_is_none_is_ignored():
    for schemes in ((b"https", b"http"), (b"gopher",), (b"https,http",)):
        scope = await seen(("127.0.0.1", 1), *((b"x-forwarded-proto", each) for each in schemes))
        assert scope["scheme"] == "http"


async def test_a_socket_behind_tls_is_one():
    scope = await seen(("127.0.0.1", 1), (b"x-forwarded-proto", b"https"), kind="websocket")
    assert scope["scheme"] == "wss"


@pytest.mark.parametrize("name", ["forwarded", "via", "x-real-ip", "x-forwarded-for"])
@pytest.mark.parametrize("peer", ["127.0.0.1", "203.0.113.5"])
async def test_a_request_that_a_proxy_passed_on_has_a_mark(name, peer):
    assert PASSED_ON in await seen((peer, 1), (name.encode(), b"for=8.8.8.8"))
    assert PASSED_ON not in await seen((peer, 1))


async def test_without_such_headers_nothing_is_copied():
    async def app(scope, receive, send):
        assert scope is given

    given = {"type": "http", "client": None, "scheme": "http", "headers": [(b"host", b"console")]}
    await TrustedProxies(app, TRUSTED)(given, None, None)


def test_what_is_no_network_is_named():
    with pytest.raises(ValueError, match="my-proxy"):
        networks(["my-proxy"])


@pytest.mark.django_db(transaction=True)
async def test_what_a_proxy_passed_on_reads_no_metrics():
    from console.asgi import application

    for headers, status in (([(b"forwarded", b"for=8.8.8.8")], 401), ([(b"x-real-ip", b"8.8.8.8")], 401), ([], 200)):
        answered: list[dict[str, object]] = []

        asked = [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive(asked: list[dict[str, object]] = asked) -> dict[str, object]:
            if not asked:
                await asyncio.Event().wait()
            return asked.pop()

        async def send(message: dict[str, object], answered: list[dict[str, object]] = answered) -> None:
            answered.append(message)

        scope = {
            "type": "http", "method": "GET", "path": "/metrics", "query_string": b"", "http_version": "1.1",
            "headers": [(b"host", b"localhost"), *headers], "client": ("127.0.0.1", 40_000), "scheme": "http",
            "server": ("127.0.0.1", 8000),
        }  # fmt: skip
        await application(scope, receive, send)
        assert answered[0]["status"] == status
