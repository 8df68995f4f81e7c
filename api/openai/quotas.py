"""Quotas of a tenant: requests a minute, tokens a minute, requests at once. Time is an argument.

Token buckets that hold one minute's worth and start full, so a burst of a whole minute passes. Each gateway counts
for itself: with N gateways a tenant may reach N times its quota. Token counts are reserved as expected at arrival
and corrected when the engine tells the truth.
"""

from __future__ import annotations

import math

from api.openai.asgi import Header
from api.openai.protocol.errors import ApiError
from controller.core.snapshot import TenantConfig

MINUTE_S = 60.0


class Bucket:
    """`limit` a minute."""

    __slots__ = ("_at", "level", "limit")

    def __init__(self, limit: float, now: float) -> None:
        self.limit = limit
        self.level = limit
        self._at = now

    def refill(self, now: float) -> None:
        self.level = min(self.limit, self.level + max(0.0, now - self._at) * self.limit / MINUTE_S)
        self._at = now

    def wait_for(self, amount: float) -> float:
        """Seconds until `amount` fits; 0 when it fits now. A limit of zero is asked about again in a minute."""
        if self.limit <= 0:
            return MINUTE_S
        return max(0.0, (amount - self.level) * MINUTE_S / self.limit)

    def headers(self, what: str) -> list[Header]:
        """Limit, what is left of it, and the seconds until it is whole again."""
        left = max(0, math.floor(self.level))
        whole_in_s = (self.limit - self.level) * MINUTE_S / self.limit if self.limit > 0 else MINUTE_S
        told = {"limit": f"{self.limit:.0f}", "remaining": str(left), "reset": f"{max(0.0, whole_in_s):.3f}s"}
        return [(f"x-ratelimit-{name}-{what}".encode(), value.encode()) for name, value in told.items()]

    def resized(self, limit: float, now: float) -> Bucket:
        """The same bucket under a new limit: what was used stays used."""
        if limit == self.limit:
            return self
        self.refill(now)
        used = self.limit - self.level
        bucket = Bucket(limit, now)
        bucket.level = max(0.0, limit - used)
        return bucket


class _Usage:
    __slots__ = ("active", "requests", "tokens")

    def __init__(self) -> None:
        self.active = 0
        self.requests: Bucket | None = None
        self.tokens: Bucket | None = None


class Quotas:
    """One usage a tenant; tenants without limits cost a dictionary lookup."""

    def __init__(self) -> None:
        self._usage: dict[str, _Usage] = {}

    def admit(self, tenant: TenantConfig, tokens: int, now: float) -> None:
        """Take the request into account, or raise ApiError and count nothing."""
        usage = self._usage.setdefault(tenant.name, _Usage())
        usage.requests = _bucket(usage.requests, tenant.rpm, now)
        usage.tokens = _bucket(usage.tokens, tenant.tpm, now)
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

    def headers(self, tenant: str) -> tuple[Header, ...]:
        """What is left of the minute's requests and tokens as of the last admission, under OpenAI's names."""
        usage = self._usage.get(tenant)
        buckets = (("requests", usage.requests), ("tokens", usage.tokens)) if usage is not None else ()
        return tuple(pair for what, bucket in buckets if bucket is not None for pair in bucket.headers(what))

    def release(self, tenant: str, expected: int, actual: int) -> None:
        """The request ended; give back, or take, the difference to what was expected."""
        usage = self._usage[tenant]
        usage.active -= 1
        if usage.tokens is not None:
            usage.tokens.level = min(usage.tokens.limit, usage.tokens.level + expected - actual)

    def active(self, tenant: str) -> int:
        usage = self._usage.get(tenant)
        return usage.active if usage else 0

    def open(self) -> dict[str, int]:
        """Requests at once, of each tenant with any."""
        return {tenant: usage.active for tenant, usage in self._usage.items() if usage.active}


def _bucket(current: Bucket | None, limit: int | None, now: float) -> Bucket | None:
    if limit is None:
        return None
    bucket = Bucket(limit, now) if current is None else current.resized(limit, now)
    bucket.refill(now)
    return bucket


def _refused(what: str, retry_after_s: float) -> ApiError:
    return ApiError("rate_limit_exceeded", f"Over the quota of {what}.", retry_after_s=retry_after_s)
