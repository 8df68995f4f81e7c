"""Settings of the transfer daemon, from environment variables: which policy, which link, which socket."""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass

from controller.core.errors import ConfigError
from controller.flow.gate import GATED, OFF
from workers.environment import read_variable
from workers.flowd.addresses import own_addresses

DEFAULT_LINK_GBPS = 10.0
LONGEST_PATH = 100  # bytes of a Unix socket's path; Linux allows 107
HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,119}")  # as the console takes it for a host


@dataclass(frozen=True, slots=True)
class FlowdSettings:
    """`policy`: OFF, or one of GATED, until the stored flow policy is known. `bandwidth`: bytes/s of the host's link.
    `socket`: path of the Unix socket, "" if there can be no daemon. `redis_url`: "" without a console. `host`: the name
    under which it reports there. `receives_at`: addresses of this host's links, none if nobody set the bandwidth."""

    policy: str
    bandwidth: float
    socket: str
    redis_url: str = ""
    host: str = ""
    receives_at: tuple[str, ...] = ()


def settings_from(environ: Mapping[str, str], socket: str = "") -> FlowdSettings:
    """`socket`: the default of FLOW_SOCKET. Raises ConfigError naming the variable."""
    policy = read_variable(environ, "FLOW_POLICY") or OFF
    if policy not in (OFF, *GATED):
        raise ConfigError(f"FLOW_POLICY is {policy!r}: use one of {', '.join((OFF, *GATED))}", "FLOW_POLICY")
    set_to = read_variable(environ, "FLOW_LINK_GBPS")
    raw = set_to or str(DEFAULT_LINK_GBPS)
    try:
        gbps = float(raw)
    except ValueError:
        gbps = math.nan
    if not 0 < gbps <= 100_000:
        raise ConfigError(f"FLOW_LINK_GBPS is {raw!r}: Gb/s of this host's link, above 0", "FLOW_LINK_GBPS")
    path = read_variable(environ, "FLOW_SOCKET") or socket
    if policy != OFF and not path:
        raise ConfigError("FLOW_SOCKET is not set: the path of the transfer daemon's socket", "FLOW_SOCKET")
    if len(path.encode()) > LONGEST_PATH:
        if policy != OFF:
            raise ConfigError(
                f"FLOW_SOCKET is {path!r}: at most {LONGEST_PATH} bytes, which is what a Unix socket's path may have",
                "FLOW_SOCKET",
            )
        path = ""
    host = read_variable(environ, "FLOW_HOST")
    if host and not HOST_NAME.fullmatch(host):
        raise ConfigError(f"FLOW_HOST is {host!r}: the name that this host has in the console", "FLOW_HOST")
    redis_url = read_variable(environ, "REDIS_URL")
    receives_at = own_addresses() if set_to else ()
    return FlowdSettings(policy, gbps * 1e9 / 8, path, redis_url, host or platform.node(), receives_at)
