"""Calls to engines: only to allowed addresses, without redirects, proxies or `.netrc`, and answers read up to a bound.

An instance's URL is typed by an operator, and its name may resolve to something else at each call. So the address is
checked where the connection is made, by each of the three clients that we use: `requests` in jobs (`get`, `post`,
`request`), aiohttp for telemetry and commands (`connector`), and the data path's own (`resolve`), which jobs use too
where they call many engines again and again (`kept_calls`).
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import aiohttp
import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import HTTPError, NewConnectionError, ReadTimeoutError

from controller.core.addresses import OWN_URLS, USUAL_NETWORKS, AddressRules, address_rules, own_services
from controller.engine.placement import dashboards
from workers.environment import read_variable

NETWORKS = "ENGINE_NETWORKS"
MOST_BYTES = 8 << 20  # of an answer to a job: a metrics page of a large fleet has some 200 kB
MOST_S = 30.0  # beyond a call's own time-outs, which count from one piece to the next
PIECE = 64 << 10
REFUSED = "its address is in no network of ENGINE_NETWORKS"


def rules(environ: Mapping[str, str] | None = None, to_dashboard: bool = False) -> AddressRules:
    """The rules of ENGINE_NETWORKS. `to_dashboard`: for a call to a dashboard of RAY_ADDRESS, which is no engine and
    has to be in these networks too. Raises ConfigError."""
    values = os.environ if environ is None else environ
    networks = read_variable(values, NETWORKS) or USUAL_NETWORKS
    clusters = () if to_dashboard else tuple(url for _, url in dashboards(_of(values, "RAY_ADDRESS")))
    return _rules(networks, _own(values), clusters)


def _own(values: Mapping[str, str]) -> tuple[str, ...]:
    """The URLs of our own services, those in files too."""
    return tuple(_of(values, name) for name in OWN_URLS)


def _of(values: Mapping[str, str], name: str) -> str:
    return _own_url(name, values.get(name, ""), values.get(f"{name}_FILE", ""))


@lru_cache(maxsize=64)
def _own_url(name: str, value: str, path: str) -> str:
    return read_variable({name: value, f"{name}_FILE": path}, name)


@lru_cache(maxsize=8)
def _rules(text: str, own: tuple[str, ...], clusters: tuple[str, ...]) -> AddressRules:
    return address_rules([entry.strip() for entry in text.split(",") if entry.strip()], own_services(own + clusters))


class AddressRefused(ConnectionRefusedError):
    """Nothing was sent. The same error as if nobody listened: which it was must not tell what is there."""

    def __init__(self) -> None:
        super().__init__(REFUSED)


def check_address(host: str, address: str, port: int) -> None:
    """Raises AddressRefused."""
    if not rules().allows(host, address, port):
        raise AddressRefused


async def resolve(host: str, port: int, to_dashboard: bool = False) -> list[tuple[int, str]]:
    """(family, address) of a host, the allowed ones. Raises AddressRefused, or OSError for a name that is none."""
    allowed = rules(to_dashboard=to_dashboard)
    if (version := _version(host)) is not None:  # no thread for what is an address already
        if not allowed.allows(host, host, port):
            raise AddressRefused
        return [(socket.AF_INET6 if version == 6 else socket.AF_INET, host)]
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    known = [(int(family), str(address[0])) for family, _, _, _, address in found]
    known = [each for each in known if allowed.allows(host, each[1], port)]
    if not known:
        raise AddressRefused
    return known


def _version(host: str) -> int | None:
    try:
        return ipaddress.ip_address(host).version
    except ValueError:
        return None


# ---- aiohttp --------------------------------------------------------------------------------------------------------


class _Resolver(aiohttp.ThreadedResolver):
    """Names whose addresses are not allowed are unknown."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[aiohttp.abc.ResolveResult]:
        found = await super().resolve(host, port, family)
        allowed = rules()
        known = [each for each in found if allowed.allows(host, each["host"], port)]
        if not known:
            raise AddressRefused
        return known


class _Connector(aiohttp.TCPConnector):
    """aiohttp asks no resolver about a URL that has an address."""

    async def _resolve_host(
        self, host: str, port: int, traces: Sequence[Any] | None = None
    ) -> list[aiohttp.abc.ResolveResult]:
        found = await super()._resolve_host(host, port, traces)
        for each in found:
            check_address(host, each["host"], port)
        return found


def connector(**named: Any) -> aiohttp.TCPConnector:
    """A connector for sessions that call engines."""
    return _Connector(resolver=_Resolver(), **named)


async def read_answer(response: aiohttp.ClientResponse, most: int = MOST_BYTES) -> bytes:
    """The body. Raises aiohttp.ClientPayloadError beyond `most` bytes."""
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > most:
            response.close()
            raise aiohttp.ClientPayloadError(f"an answer of more than {most} bytes")
        parts.append(part)
    return b"".join(parts)


# ---- requests -------------------------------------------------------------------------------------------------------


class UnboundedAnswer(requests.RequestException):
    """The answer was larger, or took longer, than any answer of an engine, or it was a redirect."""


def _checked(connection: HTTPConnection, connect: Any) -> socket.socket:
    """Resolve and check, connect, and check whom it reached: the name may have changed in between."""
    host = connection._dns_host
    try:
        for _, _, _, _, address in socket.getaddrinfo(host, connection.port, type=socket.SOCK_STREAM):
            check_address(host, str(address[0]), connection.port)
        reached: socket.socket = connect()
        try:
            check_address(host, str(reached.getpeername()[0]), connection.port)
        except BaseException:
            reached.close()
            raise
    except AddressRefused as error:
        raise NewConnectionError(connection, REFUSED) from error
    except socket.gaierror as error:
        raise NewConnectionError(connection, "its name is unknown") from error
    return reached


class _Http(HTTPConnection):
    def _new_conn(self) -> socket.socket:
        return _checked(self, super()._new_conn)


class _Https(HTTPSConnection):
    def _new_conn(self) -> socket.socket:
        return _checked(self, super()._new_conn)


class _HttpPool(HTTPConnectionPool):
    ConnectionCls = _Http


class _HttpsPool(HTTPSConnectionPool):
    ConnectionCls = _Https


class _Adapter(HTTPAdapter):
    def init_poolmanager(self, *arguments: Any, **named: Any) -> None:
        super().init_poolmanager(*arguments, **named)
        self.poolmanager.pool_classes_by_scheme = {"http": _HttpPool, "https": _HttpsPool}


def request(
    method: str,
    url: str,
    *,
    timeout: float | tuple[float, float],
    params: Mapping[str, Any] | None = None,
    json: Any = None,
    data: bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> requests.Response:
    """As `requests.request`, with the bounds of this module. Raises requests.RequestException."""
    read_s = timeout if isinstance(timeout, int | float) else timeout[1]
    due = time.monotonic() + read_s + MOST_S
    with requests.Session() as session:
        session.trust_env = False
        for scheme in ("http://", "https://"):
            session.mount(scheme, _Adapter())
        told = {"Accept-Encoding": "identity", **(headers or {})}
        answer = session.request(
            method,
            url,
            params=params,
            json=json,
            data=data,
            headers=told,
            timeout=timeout,
            allow_redirects=False,
            stream=True,
        )
        with answer:
            if answer.is_redirect or 300 <= answer.status_code < 400:
                raise UnboundedAnswer("a redirect, which is not followed")
            try:
                answer._content = _body(answer, due)
            except ReadTimeoutError as error:
                raise requests.ReadTimeout(str(error)) from error
            except HTTPError as error:
                raise requests.ConnectionError(str(error)) from error
            answer._content_consumed = True  # type: ignore[attr-defined]
    return answer


def _body(answer: requests.Response, due: float) -> bytes:
    parts: list[bytes] = []
    size = 0
    # Not decoded: a few bytes of gzip may be gigabytes, and nobody was told that we take it.
    while part := answer.raw.read1(PIECE, decode_content=False):
        size += len(part)
        if size > MOST_BYTES:
            raise UnboundedAnswer(f"an answer of more than {MOST_BYTES} bytes")
        if time.monotonic() > due:
            raise UnboundedAnswer("an answer that does not end")
        parts.append(part)
    return b"".join(parts)


def get(url: str, **named: Any) -> requests.Response:
    return request("GET", url, **named)


def post(url: str, **named: Any) -> requests.Response:
    return request("POST", url, **named)
