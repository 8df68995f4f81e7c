"""Settings of the transfer daemon, from environment variables: which policy, which link, which socket."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from controller.core.errors import ConfigError
from workers.environment import read_variable

OFF = "off"
# Karuna is not among them: it gives flows a rate, and a daemon that only stops and starts senders cannot.
POLICIES = ("mfs", "fair_sharing", "shortest_first", "earliest_deadline")
DEFAULT_LINK_GBPS = 10.0
LONGEST_PATH = 100  # bytes of a Unix socket's path; Linux allows 107


@dataclass(frozen=True, slots=True)
class FlowSettings:
    """`policy`: OFF, or one of POLICIES. `bandwidth`: bytes/s of the host's link. `socket`: path of the Unix socket."""

    policy: str
    bandwidth: float
    socket: str


def settings_from(environ: Mapping[str, str], socket: str = "") -> FlowSettings:
    """`socket`: the default of FLOW_SOCKET. Raises ConfigError naming the variable."""
    policy = read_variable(environ, "FLOW_POLICY") or OFF
    if policy not in (OFF, *POLICIES):
        raise ConfigError(f"FLOW_POLICY is {policy!r}: use one of {', '.join((OFF, *POLICIES))}", "FLOW_POLICY")
    raw = read_variable(environ, "FLOW_LINK_GBPS") or str(DEFAULT_LINK_GBPS)
    try:
        gbps = float(raw)
    except ValueError:
        gbps = math.nan
    if not 0 < gbps <= 100_000:
        raise ConfigError(f"FLOW_LINK_GBPS is {raw!r}: Gb/s of this host's link, above 0", "FLOW_LINK_GBPS")
    path = read_variable(environ, "FLOW_SOCKET") or socket
    if policy != OFF and not path:
        raise ConfigError("FLOW_SOCKET is not set: the path of the transfer daemon's socket", "FLOW_SOCKET")
    if policy != OFF and len(path.encode()) > LONGEST_PATH:
        raise ConfigError(
            f"FLOW_SOCKET is {path!r}: at most {LONGEST_PATH} bytes, which is what a Unix socket's path may have",
            "FLOW_SOCKET",
        )
    return FlowSettings(policy, gbps * 1e9 / 8, path)
