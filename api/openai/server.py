"""uvicorn with another shutdown. By itself uvicorn closes its listeners first and cancels open requests when its grace
is over: new clients would not learn that the gateway stops, and open ones would get a bare 500 and leave no record."""

from __future__ import annotations

import asyncio
import math
import socket

import uvicorn

from api.openai.service import GatewayService

LOOK_S = 0.05  # how often a gateway that stops looks for open requests
LAST_BYTES_S = 1  # for the last bytes to clients that are still connected


class GatewayServer(uvicorn.Server):
    """`grace_s`: how long running requests may take to finish; new ones are refused meanwhile (`shutting_down`)."""

    def __init__(self, config: uvicorn.Config, service: GatewayService, grace_s: float) -> None:
        super().__init__(config)
        self._service = service
        self._grace_s = grace_s

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        over_at = loop.time() + self._grace_s
        self._service.close()
        while self._service.busy and not self.force_exit and loop.time() < over_at:
            await asyncio.sleep(LOOK_S)
        self._service.give_up()
        # The rest of the grace is for clients that have not read all of their answers.
        self.config.timeout_graceful_shutdown = math.ceil(max(0.0, over_at - loop.time())) + LAST_BYTES_S
        await super().shutdown(sockets)
