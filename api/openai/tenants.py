"""Tenants at the gateway: whose an API key is, and what a tenant's quotas let in. Time is an argument.

Keys are kept and looked up as SHA-256 only, in memory.

Quotas are requests a minute, tokens a minute and requests at once. The first two are token buckets that hold one
minute's worth and start full, so a burst of a whole minute passes. Each gateway counts for itself: with N gateways a
tenant may reach N times its quota. Tokens are reserved at arrival as expected, and corrected by the engine's own count.

Bodies are kept in memory from their first byte until the request ends, since a retry needs them. So there is a bound on
the bytes and the number of open requests, and no tenant may have more than its share of either.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from hashlib import sha256

from api.openai.asgi import Header
from api.openai.protocol.errors import ApiError
from controller.core.snapshot import GatewaySnapshot, KeyConfig, TenantConfig

SCOPE = "inference"
MINUTE_S = 60.0
MIB = 1 << 20


class KeyRing:
    """The keys of one configuration. Expiry is checked at each use; a revoked key is not in the snapshot."""

    def __init__(self, snapshot: GatewaySnapshot) -> None:
        self._keys: dict[str, KeyConfig] = {key.sha256: key for key in snapshot.keys}
        self._tenants: dict[str, TenantConfig] = {tenant.name: tenant for tenant in snapshot.tenants}

    def revoked(self, newer: KeyRing, wall: float) -> set[int]:
        """Ids of keys that worked here until `newer` came: revoked, or of a tenant that was deactivated. Keys that
        expired by themselves are not among them. `wall`: epoch seconds."""
        return {
            key.id
            for key in self._keys.values()
            if not newer._works(key) and (key.expires_at is None or key.expires_at > wall)
        }

    def _works(self, key: KeyConfig) -> bool:
        tenant = self._tenants.get(key.tenant)
        return key.sha256 in self._keys and tenant is not None and tenant.active

    def tenant(self, authorization: bytes | None, wall: float) -> tuple[TenantConfig, KeyConfig]:
        """Raises ApiError. `wall` is epoch seconds."""
        if authorization is None or authorization[:7].lower() != b"bearer ":
            raise ApiError("invalid_api_key", "Send an API key: `Authorization: Bearer sk-...`.")
        key = self._keys.get(sha256(authorization[7:].strip()).hexdigest())
        if key is None:
            raise ApiError("invalid_api_key", "The API key is unknown or revoked.")
        if key.expires_at is not None and key.expires_at <= wall:
            raise ApiError("invalid_api_key", "The API key has expired.")
        tenant = self._tenants.get(key.tenant)
        if tenant is None or not tenant.active:
            raise ApiError("invalid_api_key", "The tenant of this API key is not active.")
        if SCOPE not in key.scopes:
            raise ApiError("permission_denied", f"This API key lacks the scope {SCOPE!r}.")
        return tenant, key


class Bucket:
    """A token bucket that refills by `limit` a minute."""

    __slots__ = ("_at", "level", "limit")

    def __init__(self, limit: float, now: float) -> None:
        self.limit = limit
        self.level = limit
        self._at = now

    def refill(self, now: float) -> None:
        self.level = min(self.limit, self.level + max(0.0, now - self._at) * self.limit / MINUTE_S)
        self._at = now

    def wait_for(self, amount: float) -> float:
        """Seconds until `amount` fits; 0 when it fits now. With a limit of zero: a minute, when it may have changed."""
        if self.limit <= 0:
            return MINUTE_S
        return max(0.0, (amount - self.level) * MINUTE_S / self.limit)

    def headers(self, what: str) -> list[Header]:
        """The limit, what is left of it, and the seconds until all of it is available again."""
        left = max(0, math.floor(self.level))
        whole_in_s = (self.limit - self.level) * MINUTE_S / self.limit if self.limit > 0 else MINUTE_S
        told = {"limit": f"{self.limit:.0f}", "remaining": str(left), "reset": f"{max(0.0, whole_in_s):.3f}s"}
        return [(f"x-ratelimit-{name}-{what}".encode(), value.encode()) for name, value in told.items()]

    def resized(self, limit: float, now: float) -> Bucket:
        """The bucket under a new limit: what was used stays used."""
        if limit == self.limit:
            return self
        self.refill(now)
        used = self.limit - self.level
        bucket = Bucket(limit, now)
        bucket.level = max(0.0, limit - used)
        return bucket


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """Of all open requests of a gateway, queued and in flight. `share`: the most that one tenant may have of their
    number and of their bytes, unless its entitlement says otherwise."""

    body_bytes: int = 64 << 20
    share: float = 0.5


CALLS_A_MINUTE = 6_000  # on stored responses and workflows, of one tenant
READ_AT_ONCE = 2  # large bodies of a tenant; the others wait at their clients
# Of the memory for bodies: a tenant that holds no more always finds room in the last quarter, so that large bodies of
# others do not shut it out. It is also all that a tenant may hold whose quota is used up.
LITTLE = 1 / 64
FOR_ALL = 3 / 4


class Held:
    """The bytes of one request's body that are in memory. `give_back` may be called again. `now`: when it begins."""

    __slots__ = ("_most", "_quotas", "_tenant", "size")

    def __init__(self, quotas: Quotas, tenant: TenantConfig, now: float) -> None:
        self._quotas, self._tenant = quotas, tenant
        self._most = LITTLE if quotas.used_up(tenant, now) else 1.0
        self.size = 0

    def add(self, size: int) -> None:
        """More bytes have come. Raises ApiError, and counts nothing, where they are too many."""
        self._quotas.hold(self._tenant, size, self._most)
        self.size += size

    def turns(self) -> asyncio.Semaphore:
        """For large bodies of the tenant, which are read few at a time."""
        return self._quotas.turns(self._tenant.name)

    def give_back(self) -> None:
        if self.size:
            self._quotas.give_back(self._tenant.name, self.size)
            self.size = 0


class _Usage:
    __slots__ = ("active", "body_bytes", "calls", "requests", "tokens", "turns")

    def __init__(self) -> None:
        self.active = 0
        self.body_bytes = 0
        self.calls: Bucket | None = None
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None
        self.turns: asyncio.Semaphore | None = None


class Quotas:
    """The usage of each tenant; a tenant without limits costs a dictionary lookup."""

    def __init__(self, bounds: QueueBounds | None = None, most_open: int = 20_000) -> None:
        self.bounds = bounds or QueueBounds()
        self.most_open = most_open  # requests
        self.body_bytes = 0  # of all open requests
        self._usage: dict[str, _Usage] = {}

    def turns(self, tenant: str) -> asyncio.Semaphore:
        """For large bodies of the tenant: `READ_AT_ONCE` are read at the same time."""
        usage = self._usage.setdefault(tenant, _Usage())
        if usage.turns is None:
            usage.turns = asyncio.Semaphore(READ_AT_ONCE)
        return usage.turns

    def used_up(self, tenant: TenantConfig, now: float) -> bool:
        """Whether `admit` would refuse its next request, whatever that asks for."""
        usage = self._usage.setdefault(tenant.name, _Usage())
        if tenant.max_concurrency is not None and usage.active >= tenant.max_concurrency:
            return True
        usage.requests = _bucket(usage.requests, tenant.rpm, now)
        return usage.requests is not None and usage.requests.wait_for(1) > 0

    def hold(self, tenant: TenantConfig, size: int, most: float = 1.0) -> None:
        """Count bytes of a body. Raises ApiError, and counts nothing, where the tenant's share or memory is full.
        `most`: the part of the memory that its bodies may take, if less than its share."""
        usage = self._usage.setdefault(tenant.name, _Usage())
        share, memory = min(self._share(tenant), most), self.bounds.body_bytes
        its_bytes = usage.body_bytes + size
        if its_bytes > share * memory:
            if most < self._share(tenant):
                told = "Over the quota of requests, so no large body is read."
                raise ApiError("rate_limit_exceeded", told, retry_after_s=1.0)
            raise _over_share(f"{share * memory / MIB:.0f} MiB of request bodies", share)
        room = memory if its_bytes <= LITTLE * memory else FOR_ALL * memory
        if self.body_bytes + size > room:
            told = f"The request bodies of all tenants reach the limit of {self.bounds.body_bytes / MIB:.0f} MiB."
            raise ApiError("rate_limit_exceeded", told, retry_after_s=1.0)
        usage.body_bytes += size
        self.body_bytes += size

    def give_back(self, tenant: str, size: int) -> None:
        self._usage[tenant].body_bytes -= size
        self.body_bytes -= size

    def _share(self, tenant: TenantConfig) -> float:
        own = tenant.entitled.queue_share
        return self.bounds.share if own is None else own

    def admit(self, tenant: TenantConfig, tokens: int, now: float) -> None:
        """Count the request. Raises ApiError, and counts nothing, where a quota is reached."""
        usage = self._usage.setdefault(tenant.name, _Usage())
        # All checks come before anything is taken: what is refused must not use up a quota.
        usage.requests = _bucket(usage.requests, tenant.rpm, now)
        usage.tokens = _bucket(usage.tokens, tenant.tpm, now)
        share = self._share(tenant)
        most = max(1, int(share * self.most_open))
        if usage.active >= most:
            raise _over_share(f"{most} open requests", share)
        if tenant.max_concurrency is not None and usage.active >= tenant.max_concurrency:
            raise _refused(f"{tenant.max_concurrency} requests at once", 1.0)
        if usage.requests is not None and (wait := usage.requests.wait_for(1)) > 0:
            raise _refused(f"{tenant.rpm} requests a minute", wait)
        if usage.tokens is not None:
            if tokens > usage.tokens.limit:
                raise _refused(f"{tenant.tpm} tokens a minute, less than this one request's {tokens}", MINUTE_S)
            if (wait := usage.tokens.wait_for(tokens)) > 0:
                raise _refused(f"{tenant.tpm} tokens a minute", wait)
            usage.tokens.level -= tokens
        if usage.requests is not None:
            usage.requests.level -= 1
        usage.active += 1

    def call(self, tenant: str, now: float) -> None:
        """Count a call that asks for no tokens, as one on a stored response or a workflow. It takes nothing of the
        tenant's quotas. Raises ApiError, and counts nothing, where the tenant has called too often."""
        usage = self._usage.setdefault(tenant, _Usage())
        usage.calls = calls = _bucket(usage.calls, CALLS_A_MINUTE, now) or Bucket(CALLS_A_MINUTE, now)
        if (wait := calls.wait_for(1)) > 0:
            told = f"Over the limit of {CALLS_A_MINUTE} calls a minute on stored responses and workflows."
            raise ApiError("rate_limit_exceeded", told, retry_after_s=wait)
        calls.level -= 1

    def headers(self, tenant: str) -> tuple[Header, ...]:
        """What is left of the minute's requests and tokens as of the last admission, under OpenAI's names."""
        usage = self._usage.get(tenant)
        buckets = (("requests", usage.requests), ("tokens", usage.tokens)) if usage is not None else ()
        return tuple(pair for what, bucket in buckets if bucket is not None for pair in bucket.headers(what))

    def release(self, tenant: str, expected: int, actual: int) -> None:
        """The request ended: the difference between `expected` and `actual` tokens is given back, or taken."""
        usage = self._usage[tenant]
        usage.active -= 1
        if usage.tokens is not None:
            usage.tokens.level = min(usage.tokens.limit, usage.tokens.level + expected - actual)

    def active(self, tenant: str) -> int:
        usage = self._usage.get(tenant)
        return usage.active if usage else 0

    def open(self) -> dict[str, int]:
        """Open requests by tenant; tenants without any are left out."""
        return {tenant: usage.active for tenant, usage in self._usage.items() if usage.active}


def _bucket(current: Bucket | None, limit: int | None, now: float) -> Bucket | None:
    if limit is None:
        return None
    bucket = Bucket(limit, now) if current is None else current.resized(limit, now)
    bucket.refill(now)
    return bucket


def _over_share(what: str, share: float) -> ApiError:
    told = f"Over the tenant's share of the queue (queue_share {share:.0%}): {what}."
    return ApiError("rate_limit_exceeded", told, retry_after_s=1.0)


def _refused(what: str, retry_after_s: float) -> ApiError:
    return ApiError("rate_limit_exceeded", f"Over the quota of {what}.", retry_after_s=retry_after_s)
