"""Which origins may open a WebSocket: the handshake carries the session's cookie whatever page asks for it."""

from __future__ import annotations

import pytest

from console import proxies
from console.asgi import application
from console.origins import may_open
from tests.console.consumers.socket import Browser


def handshake(origin, host="slo.example:8000", scheme="ws", more=()):
    named = [(b"host", host.encode()), *([(b"origin", origin.encode())] if origin is not None else []), *more]
    return {"type": "websocket", "scheme": scheme, "headers": named}


@pytest.fixture(autouse=True)
def hosts(settings):
    settings.ALLOWED_HOSTS = ["slo.example", "[::1]"]
    settings.CSRF_TRUSTED_ORIGINS = []


@pytest.mark.parametrize(
    ("origin", "host", "scheme"),
    [
        ("http://slo.example:8000", "slo.example:8000", "ws"),
        ("HTTP://SLO.example:8000", "slo.EXAMPLE:8000", "ws"),
        ("http://slo.example", "slo.example:80", "ws"),
        ("https://slo.example", "slo.example", "wss"),
        ("https://slo.example:443", "slo.example", "wss"),
        ("http://[::1]:8000", "[::1]:8000", "ws"),
    ],
)
def test_a_page_of_the_same_origin_opens_it(origin, host, scheme):
    assert may_open(handshake(origin, host, scheme))


@pytest.mark.parametrize(
    ("origin", "host", "scheme"),
    [
        ("http://slo.example:9000", "slo.example:8000", "ws"),  # another server on this host
        ("http://slo.example", "slo.example:8000", "ws"),
        ("http://slo.example", "slo.example", "wss"),  # the page came in clear, so anybody may have changed it
        ("https://slo.example:8000", "slo.example:8000", "ws"),
        ("https://evil.example", "slo.example", "wss"),
        ("http://evil.example", "evil.example", "ws"),  # not one of ALLOWED_HOSTS, as after DNS rebinding
        ("http://slo.example.evil", "slo.example", "ws"),
        ("null", "slo.example", "ws"),
        ("", "slo.example", "ws"),
        ("http://", "slo.example", "ws"),
        ("http://slo.example:port", "slo.example", "ws"),
        ("file://slo.example", "slo.example", "ws"),
        (None, "slo.example", "ws"),
    ],
)
def test_no_other_page_does(origin, host, scheme):
    assert not may_open(handshake(origin, host, scheme))


@pytest.mark.parametrize("twice", [(b"origin", b"http://slo.example:8000"), (b"host", b"slo.example:8000")])
def test_a_header_that_is_there_twice_opens_nothing(twice):
    assert not may_open(handshake("http://slo.example:8000", more=[twice]))


@pytest.mark.parametrize(
    ("trusted", "origin", "opens"),
    [
        ("https://slo.example", "https://slo.example", True),
        ("https://slo.example", "http://slo.example", False),
        ("https://slo.example", "https://slo.example:8443", False),
        ("https://*.slo.example", "https://eu.slo.example", True),
        ("https://*.slo.example", "https://eslo.example", False),
        ("https://*.slo.example", "http://eu.slo.example", False),
    ],
)
def test_a_trusted_origin_opens_it_whatever_the_host_that_a_proxy_sends(settings, trusted, origin, opens):
    settings.CSRF_TRUSTED_ORIGINS = [trusted]
    assert may_open(handshake(origin, "console:8000")) is opens


@pytest.mark.parametrize(("forwarded", "opens"), [(b"https", True), (b"http", False)])
async def test_behind_a_trusted_proxy_the_scheme_is_the_browsers(forwarded, opens):
    asked = []

    async def app(scope, receive, send):
        asked.append(may_open(scope))

    trusting = proxies.TrustedProxies(app, proxies.networks(["10.0.0.1"]))
    scope = handshake("https://slo.example", "slo.example", more=[(b"x-forwarded-proto", forwarded)])
    await trusting({**scope, "client": ("10.0.0.1", 1)}, None, None)
    await trusting({**scope, "client": ("10.0.0.2", 1)}, None, None)  # no proxy of ours: its header is not believed
    assert asked == [opens, False]


async def test_the_console_refuses_the_handshake_of_another_port():
    headers = [(b"host", b"slo.example:8000"), (b"origin", b"http://slo.example:9000")]
    assert not await Browser(application, "/ws/overview", headers).connect()
