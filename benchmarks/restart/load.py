"""Load on a gateway that dies and comes back elsewhere, as behind a load balancer."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Sequence

import aiohttp
import uvloop

from benchmarks.servers.engines import answers

LOOK_S = 0.01
REQUEST_TIMEOUT_S = 20.0


class SteadyLoad:
    """Sends `bodies` again and again at `rate` requests/s, each once, to where `url` points at that moment, while the
    `with` block lasts. Open loop: what comes back does not slow it.

    `ended`: (URL, sent, ended, answered with 200) of each request, in monotonic seconds, in the order in which they
    ended. It grows by `rate` a second, so the block should be short.
    """

    def __init__(self, url: str, api_key: str, bodies: Sequence[bytes], rate: float) -> None:
        self.url = url
        self.ended: list[tuple[str, float, float, bool]] = []
        self._headers = {"Content-Type": "application/json", "Authorization": f"Bearer {api_key}"}
        self._bodies, self._rate = bodies, rate
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: uvloop.run(self._send()))

    def __enter__(self) -> SteadyLoad:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    async def _send(self) -> None:
        limits = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        connector, start = aiohttp.TCPConnector(limit=0), time.monotonic()
        async with aiohttp.ClientSession(connector=connector, headers=self._headers, timeout=limits) as session:
            open_calls: set[asyncio.Task[None]] = set()
            for number, raw in enumerate(itertools.cycle(self._bodies)):
                await asyncio.sleep(max(0.0, start + number / self._rate - time.monotonic()))
                if self._over.is_set():
                    break
                call = asyncio.create_task(self._one(session, self.url, raw))
                open_calls.add(call)
                call.add_done_callback(open_calls.discard)
            await asyncio.gather(*open_calls)

    async def _one(self, session: aiohttp.ClientSession, url: str, raw: bytes) -> None:
        sent, well = time.monotonic(), False
        try:
            async with session.post(f"{url}/v1/completions", data=raw) as response:
                await response.read()
                well = response.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            pass
        self.ended.append((url, sent, time.monotonic(), well))

    def first_answer(self, url: str, patience_s: float) -> float:
        """Monotonic seconds at which `url` answered its first request. Raises TimeoutError after `patience_s`."""
        end = time.monotonic() + patience_s
        while time.monotonic() < end:
            found = next((done for at, _, done, well in list(self.ended) if well and at == url), None)
            if found is not None:
                return found
            time.sleep(LOOK_S)
        raise TimeoutError(f"{url} answered no request within {patience_s:.0f} s")

    def failed(self, url: str, since: float) -> int:
        """Requests sent to `url` from `since` on that were not answered with 200."""
        return sum(not well for at, sent, _, well in list(self.ended) if at == url and sent >= since)


class FirstHealthy:
    """When `/healthz` of a URL was 200 for the first time (`at`, monotonic seconds), asked every 10 ms while the `with`
    block lasts; None: not yet."""

    def __init__(self, url: str) -> None:
        self.at: float | None = None
        self._url, self._over = url, threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> FirstHealthy:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            if answers(self._url, "/healthz"):
                self.at = time.monotonic()
                return
