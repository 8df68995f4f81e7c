"""Which devices an instance holds: chosen when the instance is created, free again once it is gone."""

from __future__ import annotations

from collections.abc import Iterable

from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone

from controller.models import Device, Instance, InstanceDevice
from controller.selectors.fleet.topology import free_among, usable_devices


def devices_hold(*, row: Instance, devices: Iterable[Device] = ()) -> None:
    """Hold these devices, or as many free ones of its host as it runs on, if the host lists devices of its kind.

    Raises ValidationError if too few are free, or if another instance holds one of `devices`.
    """
    with transaction.atomic():
        for device in list(devices) or _chosen(row):
            holding = InstanceDevice(instance=row, device=device)
            holding.validate_constraints()
            holding.save(force_insert=True)


def devices_move(*, row: Instance) -> None:
    """Hold other devices after a change of its host, device kind or tensor parallelism."""
    with transaction.atomic():
        row.holdings.filter(released_at__isnull=True).update(released_at=timezone.now())
        if row.observed_state not in Instance.GONE:
            devices_hold(row=row)


def _chosen(row: Instance) -> list[Device]:
    """The devices it will hold. All candidates are locked, so that two instances never choose the same."""
    usable = list(usable_devices(row.host, row.device_kind).select_for_update()) if row.host else []
    free = free_among(usable)
    if usable and len(free) < row.tp:
        kind = f" {row.device_kind}" if row.device_kind else ""
        raise ValidationError(
            {"host": f"{row.host} has {len(free)} of {len(usable)}{kind} devices free; {row.tp} required."}
        )
    return free[: row.tp]
