"""Calls to engines that a job makes again every second, on connections that are kept, in an event loop.

`outbound.request` costs a job a millisecond of processor time and a thread for each call. `request` costs a tenth of
that, by the data path's own client, and has the same bounds and errors. A kept connection proves nothing by failing:
its server may have closed it, been started again or moved, so a call that may be repeated is then made once more on a
new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import ssl
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import requests
from yarl import URL

from workers.http import outbound
from workers.http.outbound import AddressRefused, UnboundedAnswer
from workers.http.wire import BadAnswer, Connection, NotConnected, Patience, TooLarge, Wire

RENEW_S = 45.0  # and up to as long again: connections are then made anew, since a name may lead elsewhere by now


class BrokenAnswer(requests.RequestException):
    """What came is not HTTP."""


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """`headers`: with lower-case names."""

    status_code: int
    headers: Mapping[str, str]
    content: bytes

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")

    def json(self) -> Any:
        """Raises ValueError."""
        return json.loads(self.content)


async def request(
    method: str,
    url: str,
    *,
    timeout_s: float,
    json: Any = None,
    headers: Mapping[str, str] | None = None,
    repeatable: bool | None = None,
    to_dashboard: bool = False,
) -> KeptAnswer:
    """`timeout_s`: to connect, and from one piece of the answer to the next; a name has as long as its look-up takes.
    `repeatable`: to call twice is the same as once; None: it is for a GET. `to_dashboard`: to a Ray dashboard of
    RAY_ADDRESS, and to no engine.

    Raises requests.RequestException.
    """
    again = method == "GET" if repeatable is None else repeatable
    call = _Call(method, url, b"" if json is None else _body(json), headers or {}, again, to_dashboard)
    return await _of_loop().answer(call, timeout_s)


async def get(url: str, *, timeout_s: float, headers: Mapping[str, str] | None = None) -> KeptAnswer:
    """As `request`."""
    return await request("GET", url, timeout_s=timeout_s, headers=headers)


def nobody_listens(error: requests.RequestException) -> bool:
    """Whether its server refused the connection. False where we refused its address, and nobody was asked."""
    refused = error.__cause__.__cause__ if error.__cause__ is not None else None
    return isinstance(refused, ConnectionRefusedError) and not isinstance(refused, AddressRefused)


def _body(json_value: Any) -> bytes:
    return json.dumps(json_value).encode()


class _Call(NamedTuple):
    method: str
    url: str
    body: bytes
    headers: Mapping[str, str]
    again: bool
    to_dashboard: bool


class _Server:
    """The connections to one server. `until`: loop time. `keep`: there is room for one that is idle."""

    def __init__(self, base: str, to_dashboard: bool, until: float, keep: bool) -> None:
        self.until, self.keep = until, keep
        self._wire = Wire(base, self._resolved)
        self._at, self._to_dashboard = URL(base), to_dashboard
        self._addresses: list[tuple[int, str]] = []

    async def ask(self, call: _Call, path: str, patience: Patience) -> Connection:
        """The headers. Only what may be repeated goes over a kept connection."""
        sent = (call.method, path, call.body, patience)
        if call.again and self._wire.keeps:
            with contextlib.suppress(OSError):
                return await self._wire.call(*sent, headers=call.headers)
        # Before the time for connecting begins, and never given up: a look-up has a thread, and a call ends with it, so
        # who bounds calls bounds threads.
        self._addresses = await outbound.resolve(self._at.host or "", self._at.port or 0, self._to_dashboard)
        return await self._wire.call(*sent, fresh=True, headers=call.headers)

    async def _resolved(self, host: str, port: int) -> list[tuple[int, str]]:
        return self._addresses


class _KeptCalls:
    """The connections of one event loop."""

    def __init__(self) -> None:
        # By scheme, user, host and port, and by whether it may be a dashboard. Longest known first.
        self._servers: dict[tuple[str, bool], _Server] = {}
        self._most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2  # each connection is an open file

    async def answer(self, call: _Call, timeout_s: float) -> KeptAnswer:
        """Raises requests.RequestException."""
        patience = Patience(timeout_s, timeout_s, timeout_s, timeout_s + outbound.MOST_S)
        try:
            base, path = _parts(call.url)
            server = self._server(base, call.to_dashboard)
            return await _read(await server.ask(call, path, patience), server.keep)
        except requests.RequestException:  # is an OSError too
            raise
        except NotConnected as error:
            raise requests.ConnectTimeout(str(error)) from error
        except TimeoutError as error:
            raise requests.ReadTimeout(str(error)) from error
        except TooLarge as error:
            raise UnboundedAnswer(str(error)) from error
        except BadAnswer as error:
            raise BrokenAnswer(str(error)) from error
        except OSError as error:
            distrusted = isinstance(error.__cause__, ssl.SSLError)
            kind = requests.exceptions.SSLError if distrusted else requests.ConnectionError
            raise kind(str(error)) from error
        except ValueError as error:  # also of a host that cannot be a name
            raise requests.exceptions.InvalidURL(str(error)) from error

    def _server(self, base: str, to_dashboard: bool) -> _Server:
        """Raises ValueError."""
        now, key = asyncio.get_running_loop().time(), (base, to_dashboard)
        found = self._servers.get(key)
        if found is None or found.until < now:
            self._servers.pop(key, None)
            while self._servers and (first := next(iter(self._servers.items())))[1].until + 2 * RENEW_S < now:
                del self._servers[first[0]]  # nobody calls it any more
            until = now + RENEW_S * (1 + zlib.crc32(base.encode()) % 100 / 100)  # not all of them at once
            keep = len(self._servers) < self._most
            found = self._servers[key] = _Server(base, to_dashboard, until, keep)
        return found


async def _read(connection: Connection, keep: bool) -> KeptAnswer:
    whole = False
    try:
        if 300 <= connection.status < 400:
            raise UnboundedAnswer("a redirect, which is not followed")
        content = await connection.read(outbound.MOST_BYTES)
        whole = True
    finally:
        connection.release() if whole and keep else connection.close()
    return KeptAnswer(connection.status, connection.headers, content)


_LOOPS: dict[asyncio.AbstractEventLoop, _KeptCalls] = {}


def _of_loop() -> _KeptCalls:
    loop = asyncio.get_running_loop()
    if (found := _LOOPS.get(loop)) is None:
        for closed in [each for each in list(_LOOPS) if each.is_closed()]:
            _LOOPS.pop(closed, None)
        found = _LOOPS[loop] = _KeptCalls()
    return found


@lru_cache(maxsize=4096)
def _parts(text: str) -> tuple[str, str]:
    """The server of a URL, as a URL, and path with query. Raises ValueError."""
    url = URL(text)
    if url.scheme not in ("http", "https") or not url.host or not url.port:
        raise ValueError(f"{text!r} is no URL of a server")
    return f"{url.scheme}://{url.raw_authority}", url.raw_path_qs
