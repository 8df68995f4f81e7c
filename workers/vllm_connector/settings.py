"""Settings of the connector: `kv_connector_extra_config` of vLLM's `--kv-transfer-config`, and environment variables.

The variables are those of reference engines: FLEET_TOKEN, by which servers prove each other that they are of one
fleet, and FLOW_SOCKET, the path of the transfer daemon's socket.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from controller.core.errors import ConfigError
from workers.environment import read_variable
from workers.http.fleet_proof import address

DEFAULT_LEASE_S = 30.0
LONGEST_LEASE_S = 600.0


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """`host`, `port`: where other servers reach this one's KV, and where it listens. `peers`: addresses (`host:port`)
    of the servers to which it connects, whose hosts may connect to it. `lease_s`: how long KV waits to be loaded.
    `token`: of the fleet. `flow_socket`: "" without a transfer daemon."""

    host: str
    port: int
    peers: frozenset[str]
    token: str
    lease_s: float = DEFAULT_LEASE_S
    flow_socket: str = ""

    @property
    def peer_hosts(self) -> frozenset[str]:
        return frozenset(split_address(peer)[0] for peer in self.peers)


def settings_from(extra: Mapping[str, Any], port: int, environ: Mapping[str, str]) -> ConnectorSettings:
    """`port`: vLLM's `kv_port`. Raises ConfigError naming the field or the variable."""
    known = ("host", "peers", "lease_s")
    if unknown := sorted(set(extra) - set(known)):
        raise ConfigError(f"no setting {unknown[0]!r}; valid: {', '.join(known)}", field=unknown[0])
    host = extra.get("host")
    if not isinstance(host, str) or not host:
        raise ConfigError("host is the name or address by which other servers reach this one", field="host")
    if isinstance(port, bool) or not isinstance(port, int) or not 0 < port < 65536:
        raise ConfigError(f"kv_port is {port!r}: a port, 1 to 65535", field="kv_port")
    token = read_variable(environ, "FLEET_TOKEN")
    if not token:
        raise ConfigError("FLEET_TOKEN is not set: servers prove by it that they are of one fleet", field="FLEET_TOKEN")
    lease_s = extra.get("lease_s", DEFAULT_LEASE_S)
    if isinstance(lease_s, bool) or not isinstance(lease_s, int | float) or not 0 < lease_s <= LONGEST_LEASE_S:
        raise ConfigError(f"lease_s is {lease_s!r}: seconds, at most {LONGEST_LEASE_S:g}", field="lease_s")
    return ConnectorSettings(
        host, port, _peers(extra.get("peers")), token, float(lease_s), read_variable(environ, "FLOW_SOCKET")
    )


def _peers(given: Any) -> frozenset[str]:
    if not isinstance(given, list) or not given:
        raise ConfigError("peers is a list of addresses (host:port) of the other servers' KV", field="peers")
    found = set[str]()
    for peer in given:
        try:
            found.add(address(*split_address(peer)))
        except ValueError:
            raise ConfigError(f"peers has {peer!r}, which is no host:port", field="peers") from None
    return frozenset(found)


def split_address(text: Any) -> tuple[str, int]:
    """Host and port of `host:port` or `[host]:port`. Raises ValueError."""
    if not isinstance(text, str):
        raise ValueError("an address is a text")
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is no host:port")
    if host.startswith("["):
        if not host.endswith("]") or len(host) == len("[]"):
            raise ValueError(f"{text!r} is no [host]:port")
        return host[1:-1], int(port)
    if ":" in host:
        raise ValueError(f"{text!r}: an IPv6 address has brackets")
    return host, int(port)
