"""The keys of instances, for jobs."""

from __future__ import annotations

from django.conf import settings

from controller.models import Instance
from workers.http.engine_keys import EngineKey


def key_of(row: Instance) -> EngineKey:
    return EngineKey(row.key, row.pk, row.url, settings.FLEET_TOKEN)
