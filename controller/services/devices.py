"""Which devices an instance holds: chosen when it is wished for, free again once it is gone."""

from __future__ import annotations

from collections.abc import Iterable

from django.core.exceptions import ValidationError
from django.db import transaction
from django.utils import timezone

from controller.models import Device, Instance, InstanceDevice
from controller.selectors.topology import free_among, usable_devices


def devices_hold(*, row: Instance, devices: Iterable[Device] = ()) -> None:
    """These, or as many free ones of its host as it runs on, where its host lists devices of its kind.

    Raises ValidationError where too few are free, or where one of `devices` is held by another instance.
    """
    with transaction.atomic():
        for device in list(devices) or _chosen(row):
            holding = InstanceDevice(instance=row, device=device)
            holding.validate_constraints()
            holding.save(force_insert=True)


def devices_move(*, row: Instance) -> None:
    """Its host, kind of device or parallelism was changed: it holds what that says now."""
    with transaction.atomic():
        row.holdings.filter(released_at__isnull=True).update(released_at=timezone.now())
        if row.observed_state not in Instance.GONE:
            devices_hold(row=row)


def _chosen(row: Instance) -> list[Device]:
    """Under the locks of them all, so that two at once do not choose the same."""
    usable = list(usable_devices(row.host, row.device_kind).select_for_update()) if row.host else []
    free = free_among(usable)
    if usable and len(free) < row.tp:
        kind = f" {row.device_kind}" if row.device_kind else ""
        raise ValidationError(
            {"host": f"{row.host} has {len(free)} of {len(usable)}{kind} devices free; {row.tp} are needed."}
        )
    return free[: row.tp]
