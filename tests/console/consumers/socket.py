"""A browser's end of a WebSocket, on asgiref's communicator (the one of Channels needs Daphne)."""

from __future__ import annotations

import json
from typing import Any

from asgiref.testing import ApplicationCommunicator

LONGEST_S = 20.0  # only an upper bound: a test machine under load may take seconds to open a session


class Browser(ApplicationCommunicator):
    def __init__(self, application: Any, path: str, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        scope = {"type": "websocket", "path": path, "query_string": b"", "headers": headers or [], "subprotocols": []}
        super().__init__(application, scope)

    async def connect(self) -> bool:
        """False when the handshake is refused."""
        await self.send_input({"type": "websocket.connect"})
        return (await self.receive_output(LONGEST_S))["type"] == "websocket.accept"

    async def frame(self, timeout: float = LONGEST_S) -> dict[str, Any]:
        message = await self.receive_output(timeout)
        assert message["type"] == "websocket.send", message
        return json.loads(message["text"])

    async def closed(self) -> int:
        """Reads on until the server closes; its code."""
        while (message := await self.receive_output(LONGEST_S))["type"] != "websocket.close":
            assert message["type"] == "websocket.send"
        return message["code"]

    async def say(self, text: str) -> None:
        await self.send_input({"type": "websocket.receive", "text": text})

    async def leave(self) -> None:
        if not self.future.done():
            await self.send_input({"type": "websocket.disconnect", "code": 1000})
            await self.wait(LONGEST_S)
