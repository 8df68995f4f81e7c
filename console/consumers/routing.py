"""URLs of the live topics; any other WebSocket is refused."""

from __future__ import annotations

from channels.generic.websocket import AsyncWebsocketConsumer
from django.urls import path, re_path

from console.consumers.decisions import DecisionsConsumer
from console.consumers.experiments import ExperimentsConsumer
from console.consumers.overview import OverviewConsumer
from console.consumers.queue import QueueConsumer


class UnknownTopic(AsyncWebsocketConsumer):
    """Refuses the handshake. Without it an unknown URL would be logged as an error."""

    async def connect(self) -> None:
        await self.close()


websocket_urlpatterns = [
    path("ws/overview", OverviewConsumer.as_asgi()),
    path("ws/queue", QueueConsumer.as_asgi()),
    path("ws/decisions", DecisionsConsumer.as_asgi()),
    path("ws/experiments", ExperimentsConsumer.as_asgi()),
    re_path(r"", UnknownTopic.as_asgi()),
]
