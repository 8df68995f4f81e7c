"""Request limits of the control API. They protect the console from scripts in a loop and are not meant as quotas.

The counts are kept in this process, so they work without Redis, and N console processes allow N times the rate.
"""

from __future__ import annotations

from typing import Any

from django.core.cache.backends.locmem import LocMemCache
from rest_framework.request import Request
from rest_framework.throttling import SimpleRateThrottle

from api.control.access.auth import TenantPrincipal

KEY_RATE = "300/min"
PERSON_RATE = "1200/min"


class _LocalThrottle(SimpleRateThrottle):
    cache = LocMemCache("slackline-api-throttle", {"OPTIONS": {"MAX_ENTRIES": 10_000}})


class KeyThrottle(_LocalThrottle):
    """Per API key."""

    rate = KEY_RATE
    scope = "key"

    def get_cache_key(self, request: Request, view: Any) -> str | None:
        return f"key-{request.user.key_id}" if isinstance(request.user, TenantPrincipal) else None


class PersonThrottle(_LocalThrottle):
    """Per signed-in person. The limit is high, since the console's own pages may call the API."""

    rate = PERSON_RATE
    scope = "person"

    def get_cache_key(self, request: Request, view: Any) -> str | None:
        person = not isinstance(request.user, TenantPrincipal) and request.user.is_authenticated
        return f"person-{request.user.pk}" if person else None
