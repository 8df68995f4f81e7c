"""Usage and attainment by tenant, from the roll-up by minute, and the tenant's keys."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import Count, Max, Q, QuerySet

from controller.models import ApiKey, Tenant
from controller.selectors.records.attainment import Attainment, attainment, attainment_series

MINUTE = timedelta(minutes=1)


@dataclass(frozen=True, slots=True)
class Peak:
    """The busiest minute of a window, to compare with quotas: requests, and tokens of prompts and outputs."""

    requests: int
    tokens: int


def tenants_with_keys(now: datetime) -> QuerySet[Tenant]:
    """Tenants with `keys`, the number of usable ones, and `last_used_at` of any. One query."""
    usable = Q(api_keys__revoked_at__isnull=True) & (
        Q(api_keys__expires_at__isnull=True) | Q(api_keys__expires_at__gt=now)
    )
    rows = Tenant.objects.select_related("default_class")
    return rows.annotate(keys=Count("api_keys", filter=usable), last_used_at=Max("api_keys__last_used_at"))


def usage_by_tenant(*, since: datetime, until: datetime) -> dict[str, Attainment]:
    rows = attainment(since=since, until=until, by=("tenant",), quantiles=False)
    return {row.tenant or "": row for row in rows}


def peaks(*, since: datetime, until: datetime, tenant: str | None = None) -> dict[str, Peak]:
    """Peaks by tenant. Refused requests count, since this is the demand, which may exceed a quota."""
    found: dict[str, Peak] = defaultdict(lambda: Peak(0, 0))
    for row in attainment_series(since=since, until=until, bucket=MINUTE, by=("tenant",), tenant=tenant):
        known = found[row.tenant or ""]
        tokens = row.prompt_tokens + row.output_tokens
        requests = row.finished + row.cancelled
        found[row.tenant or ""] = Peak(max(known.requests, requests), max(known.tokens, tokens))
    return dict(found)


def keys_of(tenant: Tenant) -> QuerySet[ApiKey]:
    """Usable keys first, then the others, each newest first."""
    return ApiKey.objects.filter(tenant=tenant).order_by("-revoked_at", "-created_at")
