"""Who may read what a server reports of itself: names of tenants, classes and instances, and load.

With METRICS_TOKEN: who sends it as `Authorization: Bearer`. Without: processes of the same machine, so that `make up`
and a Prometheus beside it need no setting. Whether a server is up is told to everybody (`/livez`, the status code of
`/healthz`), so load balancers need no token.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from ipaddress import ip_address

LIVE = "/livez"  # answered before anything else, and told from nothing: the process runs and accepts connections
KEPT_S = 1.0  # an answer is given again for this long, so that many who ask cost as much as one
SHORTEST_TOKEN = 16
MISSING = (
    "Send METRICS_TOKEN as a bearer token or, if it is not set, call from the machine of this server by address or as "
    "localhost."
)
FORWARDED = frozenset({b"forwarded", b"via", b"x-forwarded-for", b"x-real-ip"})


def may_read(token: str, authorization: bytes, peer: str | None, *, forwarded: bool) -> bool:
    """`peer`: address of the connection; `forwarded`: the peer is not the caller, since a proxy passed the call on or
    a browser of another site's page sent it (`calls_by_address`)."""
    if token:
        word, _, secret = authorization.partition(b" ")
        return word.lower() == b"bearer" and hmac.compare_digest(secret.strip(), token.encode())
    return not forwarded and _is_loopback(peer)


def calls_by_address(host: bytes | None) -> bool:
    """Whether the `Host` header is an address or `localhost`, as of a caller on the same machine.

    A page of another site whose name was made to resolve to 127.0.0.1 (DNS rebinding) calls from the same machine too,
    but its browser sends that name.
    """
    name = (host or b"").decode("latin1").strip().lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    try:
        ip_address(name)
    except ValueError:
        return name in ("", "localhost")
    return True


def bearer(token: str) -> dict[str, str]:
    """The header that shows this token; none without one."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def was_forwarded(names: Iterable[bytes]) -> bool:
    """Whether one of these header names (lower case) says that a proxy passed the call on."""
    return not FORWARDED.isdisjoint(names)


def _is_loopback(peer: str | None) -> bool:
    try:
        address = ip_address(peer or "")
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
