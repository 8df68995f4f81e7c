"""Hosts, their devices and links, and which instance holds what. Four queries, whatever the size of the fleet."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from controller.models import Device, Host, Instance, InstanceDevice, Link


@dataclass(slots=True)
class Place:
    """A host (None: instances whose host is not known), its devices with who holds them, and its instances."""

    host: Host | None
    devices: list[tuple[Device, str | None]] = field(default_factory=list)
    instances: list[Instance] = field(default_factory=list)

    @property
    def free(self) -> int:
        return sum(holder is None for _, holder in self.devices)


def places() -> list[Place]:
    """Hosts by name, then those without one. Instances wanted or still there, by model, role and id."""
    found = {host.pk: Place(host) for host in Host.objects.order_by("name")}
    holders: dict[int, str] = dict(
        InstanceDevice.objects.filter(released_at__isnull=True).values_list("device_id", "instance_id")
    )
    for device in Device.objects.order_by("host_id", "index"):
        found[device.host_id].devices.append((device, holders.get(device.pk)))
    nowhere = Place(None)
    for instance in Instance.objects.live().select_related("model").order_by("model__name", "role", "id"):
        found.get(instance.host_id or 0, nowhere).instances.append(instance)
    return [*found.values(), nowhere] if nowhere.instances else list(found.values())


def links() -> dict[str, list[Link]]:
    """By the name of their source."""
    by_source: dict[str, list[Link]] = defaultdict(list)
    for link in Link.objects.select_related("source", "target").order_by("source__name", "target__name", "medium"):
        by_source[link.source.name].append(link)
    return dict(by_source)
