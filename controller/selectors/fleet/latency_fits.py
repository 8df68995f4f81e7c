"""Which stored latency fit applies to an instance: one rule for gateways, previews, experiments and pages."""

from __future__ import annotations

from collections.abc import Iterable

from controller.core.types import Role
from controller.models import Instance, LatencyProfile

Key = tuple[int, str, int, str]  # model, kind of device, parallelism, role


class Fits:
    """The active profiles, looked up without a query."""

    def __init__(self, rows: Iterable[LatencyProfile]) -> None:
        self._rows: dict[Key, LatencyProfile] = {(row.model_id, row.device_kind, row.tp, row.role): row for row in rows}

    def of(self, row: Instance) -> LatencyProfile | None:
        """The fit of its role; without one the collocated fit, which is of the same model on the same device."""
        where = (row.model_id, row.device_kind, row.tp)
        return self._rows.get((*where, row.role)) or self._rows.get((*where, Role.COLLOCATED.value))


def active_fits(models: Iterable[int] | None = None) -> Fits:
    """The active fits of these models, or of all models. One query."""
    rows = LatencyProfile.objects.filter(active=True)
    return Fits(rows if models is None else rows.filter(model_id__in=set(models)))
