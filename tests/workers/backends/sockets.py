"""What contract fakes share: ports of their own, an end like kill -9, server-sent events."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiohttp
from aiohttp import web

Route = tuple[str, str, Callable[[web.Request], Awaitable[web.StreamResponse]]]


class Sockets:
    """Listens where it is told to, and asks others with `session`."""

    def __init__(self) -> None:
        self._runners: list[web.AppRunner] = []
        self._session: aiohttp.ClientSession | None = None

    @property
    def alive(self) -> bool:
        return bool(self._runners)

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession()
        return self._session

    async def listen(self, routes: Sequence[Route]) -> int:
        """The port."""
        app = web.Application()
        for method, path, handler in routes:
            app.router.add_route(method, path, handler)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._runners.append(runner)
        return int(runner.addresses[0][1])

    async def die(self) -> None:
        """As after kill -9: connections are reset, the ports are closed."""
        runners, self._runners = self._runners, []  # it may be killed again meanwhile
        for runner in runners:
            for site in list(runner.sites):
                await site.stop()
            assert runner.server is not None
            for connection in list(runner.server.connections):
                if connection.transport is not None:
                    connection.transport.abort()
        for runner in runners:
            await runner.cleanup()
        if self._session is not None:
            await self._session.close()


async def send_event(response: web.StreamResponse, data: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n")
