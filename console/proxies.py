"""Who the client is and whether it uses TLS, where a reverse proxy stands in between.

`X-Forwarded-For` and `X-Forwarded-Proto` are believed only from the addresses in TRUSTED_PROXIES. From anybody else
they are removed, so that nothing behind this can believe them by mistake: a client could otherwise choose the address
that its sign-in attempts are counted under, or have a page treat plain HTTP as TLS.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from typing import Any

from workers.http.details import was_forwarded

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Network = IPv4Network | IPv6Network

FORWARDED = frozenset(
    {b"x-forwarded-for", b"x-forwarded-proto", b"x-forwarded-host", b"x-forwarded-port", b"forwarded"}
)
# In the scope of a request that a proxy passed on, trusted or not: its peer is not the caller.
PASSED_ON = "slackline.passed_on"
UNKNOWN = "unknown"  # the client's address, where a trusted proxy says one that cannot be read
HOPS_MAX = 16  # proxies in a row


def networks(names: Sequence[str]) -> tuple[Network, ...]:
    """Addresses and networks such as 10.0.0.0/8. Raises ValueError naming the one that is neither."""
    return tuple(ip_network(name, strict=False) for name in names)


class TrustedProxies:
    """ASGI middleware; uvicorn's own reading of these headers must be off (`--no-proxy-headers`)."""

    def __init__(self, app: App, trusted: Sequence[Network]) -> None:
        self._app = app
        self._trusted = tuple(trusted)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            scope = self._resolved(scope)
        await self._app(scope, receive, send)

    def _resolved(self, scope: Scope) -> Scope:
        headers = scope["headers"]
        if was_forwarded(name for name, _ in headers):
            scope = {**scope, PASSED_ON: True}
        if not any(name in FORWARDED for name, _ in headers):
            return scope
        kept = [(name, value) for name, value in headers if name not in FORWARDED]
        peer = scope.get("client")
        if peer is None or not self._trusts(peer[0]):
            return {**scope, "headers": kept}
        resolved: Scope = {**scope, "headers": kept}
        address = self._client(peer[0], [value for name, value in headers if name == b"x-forwarded-for"])
        if address != peer[0]:
            resolved["client"] = (address, 0)
        schemes = [value for name, value in headers if name == b"x-forwarded-proto"]
        if len(schemes) == 1 and schemes[0].strip().lower() in (b"http", b"https"):
            secure = schemes[0].strip().lower() == b"https"
            plain = "http" if scope["type"] == "http" else "ws"
            resolved["scheme"] = f"{plain}s" if secure else plain
        return resolved

    def _client(self, peer: str, values: Sequence[bytes]) -> str:
        """The nearest address that is no trusted proxy: what stands left of it was written by that client itself. Never
        the proxy where it says something that cannot be read: all clients would share the proxy's rights."""
        hops = [hop for hop in b",".join(values).split(b",")[-HOPS_MAX:] if hop.strip()]
        address = peer
        for hop in reversed(hops):
            if not self._trusts(address):
                break
            address = _address(hop)
        return address

    def _trusts(self, address: str) -> bool:
        try:
            parsed = ip_address(address)
        except ValueError:
            return False
        mapped = getattr(parsed, "ipv4_mapped", None) or parsed
        return any(mapped in network for network in self._trusted)


def _address(hop: bytes) -> str:
    """Of one hop: an address, which some proxies write with a port (`192.0.2.1:4000`, `[2001:db8::7]:4000`)."""
    text = hop.strip().decode("latin-1")
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        return str(ip_address(text))
    except ValueError:
        return UNKNOWN
