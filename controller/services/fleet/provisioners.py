"""The last observation of each provisioner, for pages and the API."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from django.utils import timezone

from controller.models import ProvisionerLook


def provisioner_looked(
    *, name: str, instances: int | None, error: str = "", hosts: Sequence[Mapping[str, Any]] | None = None
) -> None:
    """Store an observation. `instances`: how many it has; None: it could not be seen, because of `error`.
    `hosts`: of its cluster; None: they are not known, or not better than before."""
    now = timezone.now()
    if instances is not None:
        seen: dict[str, Any] = {"seen_at": now, "failing_since": None, "error": "", "instances": instances}
        if hosts is not None:
            seen["hosts"] = list(hosts)
        ProvisionerLook.objects.update_or_create(name=name, defaults=seen)
        return
    row, _ = ProvisionerLook.objects.get_or_create(name=name)
    row.failing_since, row.error = row.failing_since or now, error
    row.save(update_fields=["failing_since", "error"])


def clusters_keep(*, sources: Collection[str]) -> None:
    """Forget observations of clusters that no worker has in its settings any longer, and that no instance needs."""
    rows = ProvisionerLook.objects.filter(name__contains="/")
    rows.exclude(name__in=list(sources)).delete()
