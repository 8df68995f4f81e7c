"""An in-memory channel layer, quick clocks, and sockets that are closed at the end of their test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from channels.layers import channel_layers
from django.contrib.auth.models import AnonymousUser, User

from console.consumers import base
from tests.console.consumers.socket import Browser


@pytest.fixture(autouse=True)
def layer(settings: Any) -> Any:
    settings.CHANNEL_LAYERS = {"default": {"BACKEND": "channels.layers.InMemoryChannelLayer"}}
    channel_layers.backends = {}
    yield channel_layers["default"]
    channel_layers.backends = {}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "FRAME_GAP_S", 0.01)
    monkeypatch.setattr(base, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(base, "WATCH_PERIOD_S", 0.05)
    monkeypatch.setattr(base, "REJOIN_MAX_S", 0.1)


ADMIN = User(username="ada", is_superuser=True)
NOBODY = AnonymousUser()


@pytest.fixture
async def browser() -> AsyncIterator[Callable[..., Browser]]:
    """`browser(Consumer, user)`: a socket that is not yet connected."""
    opened: list[Browser] = []

    def make(consumer: Any, user: Any = ADMIN) -> Browser:
        socket = Browser(consumer.as_asgi(), "/ws/topic")
        socket.scope["user"] = user
        opened.append(socket)
        return socket

    yield make
    for socket in opened:
        await socket.leave()
