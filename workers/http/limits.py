"""The limits of every HTTP server that we run: gateway, console, reference engine. One table, one setting for each.

Nobody has proved who they are when these apply, so they bound what a stranger can hold: bytes of a head, time for head
and body, connections in all and from one address, and how long an answer may wait for a client that does not read it.
"""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from controller.core.errors import ConfigError
from workers.environment import read_variable

SPARE_FILES = 256  # open files for everything that is not a client: engines, database, logs
MOST_OPEN_FILES = 65_536


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Seconds, bytes, counts. The defaults are the gateway's."""

    head_s: float = 10.0  # until the first byte of a request on a new connection, and for request line and headers
    head_bytes: int = 64 << 10
    headers: int = 128
    heads_bytes: int = 64 << 20  # of all heads that are not complete yet, together
    body_s: float = 30.0
    body_bytes: int = 2 << 20
    upload_s: float = 120.0  # the same for uploads of traces, which the console alone takes
    upload_bytes: int = 33 << 20
    bodies_bytes: int = 128 << 20  # of all bodies that the console has read and not answered yet, together
    send_s: float = 30.0  # a client must take in `send_bytes` of what waits for it in this time
    send_bytes: int = 16 << 10
    keep_alive_s: float = 75.0  # longer than clients keep idle connections, so that none sends on one that closes
    connections: int = 16_384
    connections_per_address: int = 8_192
    pipelined: int = 64  # requests of one connection that wait for the answer to an earlier one


# Clients of an engine are gateways: few addresses, long prompts as token ids.
LIMITS: Mapping[str, HttpLimits] = {
    "gateway": HttpLimits(),
    "console": HttpLimits(keep_alive_s=5.0, connections=2_048, connections_per_address=512),
    "engine": HttpLimits(body_bytes=16 << 20, connections_per_address=16_384),
}


class LimitSetting(NamedTuple):
    """An environment variable, what it sets, and the values that it takes."""

    variable: str
    field: str
    low: float
    high: float


SETTINGS = (
    LimitSetting("HTTP_HEAD_S", "head_s", 0.1, 600),
    LimitSetting("HTTP_HEAD_BYTES", "head_bytes", 1_024, 1 << 20),
    LimitSetting("HTTP_HEADERS", "headers", 16, 10_000),
    LimitSetting("HTTP_HEADS_BYTES", "heads_bytes", 1 << 20, 1 << 34),
    LimitSetting("HTTP_BODY_S", "body_s", 0.1, 3_600),
    LimitSetting("HTTP_BODY_BYTES", "body_bytes", 1_024, 1 << 30),
    LimitSetting("HTTP_UPLOAD_S", "upload_s", 0.1, 3_600),
    LimitSetting("HTTP_UPLOAD_BYTES", "upload_bytes", 1_024, 1 << 30),
    LimitSetting("HTTP_BODIES_BYTES", "bodies_bytes", 1 << 20, 1 << 34),
    LimitSetting("HTTP_SEND_S", "send_s", 0.1, 3_600),
    LimitSetting("HTTP_SEND_BYTES", "send_bytes", 1, 1 << 20),
    LimitSetting("HTTP_KEEP_ALIVE_S", "keep_alive_s", 1, 3_600),
    LimitSetting("HTTP_CONNECTIONS", "connections", 1, 1_000_000),
    LimitSetting("HTTP_CONNECTIONS_PER_ADDRESS", "connections_per_address", 1, 1_000_000),
    LimitSetting("HTTP_PIPELINED", "pipelined", 1, 10_000),
)


def read_limits(server: str, environ: Mapping[str, str] | None = None) -> HttpLimits:
    """The limits of `gateway`, `console` or `engine`. Raises ConfigError naming the variable and what it may be."""
    values = os.environ if environ is None else environ
    limits = LIMITS[server]
    changes: dict[str, Any] = {
        setting.field: _number(raw, setting, type(getattr(limits, setting.field)))
        for setting in SETTINGS
        if (raw := read_variable(values, setting.variable))
    }
    return replace(limits, **changes)


def _number(raw: str, setting: LimitSetting, kind: type[int] | type[float]) -> float:
    name, _, low, high = setting
    what = "a whole number" if kind is int else "a number"
    try:
        value = float(raw)
    except ValueError:
        value = math.nan
    if not low <= value <= high or (kind is int and value != int(value)):
        raise ConfigError(f"{name}={raw!r}: expected {what} from {low:g} to {high:g}", name)
    return kind(value)


def raise_file_limit(limits: HttpLimits) -> HttpLimits:
    """Each connection is an open file, and the usual soft limit is 1,024. Raises it as far as the hard limit allows.
    Returns the limits with no more connections than then fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(MOST_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    room = limits.connections if soft == resource.RLIM_INFINITY else max(1, soft - SPARE_FILES)
    most = min(limits.connections, room)
    return replace(limits, connections=most, connections_per_address=min(limits.connections_per_address, most))
