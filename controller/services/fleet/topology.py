"""Hosts, their devices, and the links between hosts. Gateways do not read these tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from controller.models import Device, Host, Link
from controller.services import change
from controller.services.actors import Actor


def host_create(*, actor: Actor, name: str, zone: str = "", labels: Mapping[str, str] | None = None) -> Host:
    row = Host(name=name, zone=zone, labels=dict(labels or {}))
    return change.create(row, actor=actor, kind="host", gateways=False)


def host_update(*, actor: Actor, host_id: int, version: int | None, changes: Mapping[str, Any]) -> Host:
    return _update(Host, host_id, actor, "host", version, changes, ("zone", "labels"))


def host_remove(*, actor: Actor, host_id: int, version: int | None = None) -> None:
    """Delete the host with its devices and links. Raises ValidationError if an instance ever held one of its
    devices."""
    change.remove(Host, host_id, actor=actor, kind="host", version=version, gateways=False)


def device_create(*, actor: Actor, host: Host, index: int, kind: str, memory_bytes: int) -> Device:
    row = Device(host=host, index=index, kind=kind, memory_bytes=memory_bytes)
    return change.create(row, actor=actor, kind="device", gateways=False)


def device_update(*, actor: Actor, device_id: int, version: int | None, changes: Mapping[str, Any]) -> Device:
    return _update(Device, device_id, actor, "device", version, changes, ("kind", "memory_bytes"))


def device_remove(*, actor: Actor, device_id: int, version: int | None = None) -> None:
    change.remove(Device, device_id, actor=actor, kind="device", version=version, gateways=False)


def link_create(
    *,
    actor: Actor,
    source: Host,
    target: Host,
    medium: str,
    bandwidth_bytes_s: float,
    latency_s: float = 0.0,
    state: str = Link.State.UP,
) -> Link:
    row = Link(
        source=source,
        target=target,
        medium=medium,
        bandwidth_bytes_s=bandwidth_bytes_s,
        latency_s=latency_s,
        state=state,
    )
    return change.create(row, actor=actor, kind="link", gateways=False)


def link_update(*, actor: Actor, link_id: int, version: int | None, changes: Mapping[str, Any]) -> Link:
    return _update(Link, link_id, actor, "link", version, changes, ("bandwidth_bytes_s", "latency_s", "state"))


def link_remove(*, actor: Actor, link_id: int, version: int | None = None) -> None:
    change.remove(Link, link_id, actor=actor, kind="link", version=version, gateways=False)


def _update(
    table: type[change.V],
    pk: int,
    actor: Actor,
    kind: str,
    version: int | None,
    changes: Mapping[str, Any],
    editable: tuple[str, ...],
) -> change.V:
    return change.update(
        table, pk, actor=actor, kind=kind, version=version, changes=changes, editable=editable, gateways=False
    )
