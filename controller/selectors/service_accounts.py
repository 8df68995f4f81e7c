"""Service accounts and their tokens."""

from __future__ import annotations

from django.db.models import Count, Max, Q, QuerySet
from django.db.models.functions import Now

from controller.models import ServiceAccount, ServiceToken
from controller.models.tenants import secret_digest


def service_accounts() -> QuerySet[ServiceAccount]:
    """By name; `live`: its tokens that work now, `used_at`: when one was used last."""
    live = Count("tokens", filter=Q(tokens__revoked_at__isnull=True, tokens__expires_at__gt=Now()))
    return ServiceAccount.objects.annotate(live=live, used_at=Max("tokens__last_used_at")).order_by("name")


def service_tokens() -> QuerySet[ServiceToken]:
    return ServiceToken.objects.select_related("account")


def token_of_secret(secret: str) -> ServiceToken | None:
    """The token with this secret, unless it is revoked or expired, or its account is suspended."""
    rows = ServiceToken.objects.usable().select_related("account")
    return rows.filter(sha256=secret_digest(secret), account__state=ServiceAccount.State.ACTIVE).first()
