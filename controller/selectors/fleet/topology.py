"""Hosts, their devices and links, and which instance holds which device. Four queries, whatever the size of the
fleet."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from django.db.models import QuerySet

from controller.models import Device, Host, Instance, InstanceDevice, Link, ProvisionerLook
from controller.models.fleet import Weights
from controller.scale.provisioning import Hosts, abilities


class WarmOn(NamedTuple):
    """`pools`: warm spares by model and role. `devices`: how many they hold. `free`: how many no instance holds. A
    stopped instance holds its devices until it is gone, and is in no pool."""

    pools: Counter[tuple[int, str]]
    devices: int
    free: int


@dataclass(slots=True)
class HostPlace:
    """A host (None: for instances without a known host), its devices with their holders, and its instances. `cluster`:
    the source of instances whose hosts a cluster chooses."""

    host: Host | None
    cluster: str = ""
    devices: list[tuple[Device, str | None]] = field(default_factory=list)
    instances: list[Instance] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.host.name if self.host else f"Cluster {self.cluster}" if self.cluster else "Unknown host"

    @property
    def free(self) -> int:
        return sum(holder is None for _, holder in self.devices)


def places() -> list[HostPlace]:
    """Hosts by name, then clusters with instances, then instances without a host. Instances that should run or still
    do, by model, role and id."""
    found = {host.pk: HostPlace(host) for host in Host.objects.order_by("name")}
    holders: dict[int, str] = dict(
        InstanceDevice.objects.filter(released_at__isnull=True).values_list("device_id", "instance_id")
    )
    for device in Device.objects.order_by("host_id", "index"):
        found[device.host_id].devices.append((device, holders.get(device.pk)))
    elsewhere: dict[str, HostPlace] = {}
    for instance in Instance.objects.live().select_related("model").order_by("model__name", "role", "id"):
        cluster = instance.source if instance.abilities.hosts == Hosts.CLUSTER else ""
        place = found.get(instance.host_id or 0) or elsewhere.setdefault(cluster, HostPlace(None, cluster))
        place.instances.append(instance)
    return [*found.values(), *(elsewhere[name] for name in sorted(elsewhere, key=lambda name: (not name, name)))]


def usable_devices(host: Host, kind: str) -> QuerySet[Device]:
    """The host's devices that an instance of this device kind runs on; "": any."""
    rows = Device.objects.filter(host=host).order_by("index")
    return rows.filter(kind=kind) if kind else rows


def free_among(devices: Sequence[Device]) -> list[Device]:
    """The devices that no instance holds."""
    holdings = InstanceDevice.objects.filter(device__in=devices, released_at__isnull=True)
    held = set(holdings.values_list("device_id", flat=True))
    return [device for device in devices if device.pk not in held]


def room_for(pattern: Instance) -> int | None:
    """For how many more instances like this one its host has free devices. None: its host lists no devices for it, so
    nothing bounds them."""
    return rooms_for([pattern])[pattern.pk]


def rooms_for(patterns: Collection[Instance]) -> dict[str, int | None]:
    """The same by pattern, for each on its own. Two queries."""
    by_host: dict[int, list[Device]] = defaultdict(list)
    hosts = {pattern.host_id for pattern in patterns if pattern.host_id is not None}
    devices = list(Device.objects.filter(host__in=hosts)) if hosts else []
    for device in free_among(devices) if devices else []:
        by_host[device.host_id].append(device)
    kinds = {(device.host_id, device.kind) for device in devices}
    found: dict[str, int | None] = {}
    for pattern in patterns:
        listed = {kind for host, kind in kinds if host == pattern.host_id and pattern.device_kind in ("", kind)}
        free = sum(device.kind in listed for device in by_host[pattern.host_id or 0])
        found[pattern.pk] = free // pattern.tp if listed else None
    return found


def warm_on(pattern: Instance, kinds: Collection[tuple[int, str]]) -> WarmOn:
    """Warm spares of these models and roles on the devices that instances like this one run on."""
    usable = list(usable_devices(pattern.host, pattern.device_kind)) if pattern.host else []
    held = InstanceDevice.objects.filter(device__in=usable, released_at__isnull=True)
    warm = list(held.filter(instance__weights=Weights.ABSENT).select_related("instance"))
    ours = [each.instance for each in warm if (each.instance.model_id, each.instance.role) in kinds]
    wanted = {row.pk: row for row in ours if row.desired_state == Instance.Desired.RUNNING}
    return WarmOn(Counter((row.model_id, row.role) for row in wanted.values()), len(ours), len(free_among(usable)))


def provisioners_unseen(source: str = "") -> list[ProvisionerLook]:
    """Provisioners that cannot be reached now. Their instances are shown as they were last seen. `source`: this one
    alone."""
    unseen = ProvisionerLook.objects.filter(failing_since__isnull=False)
    return list(unseen.filter(name=source) if source else unseen)


def provisioner_looks() -> list[ProvisionerLook]:
    """The last look at each provisioner and cluster."""
    return list(ProvisionerLook.objects.all())


def clusters(looks: Collection[ProvisionerLook] | None = None) -> list[ProvisionerLook]:
    """The clusters that start engines, with their hosts as of the last look that succeeded."""
    known = provisioner_looks() if looks is None else looks
    return [look for look in known if abilities(look.name).hosts == Hosts.CLUSTER]


def links() -> dict[str, list[Link]]:
    """Links by the name of their source host."""
    by_source: dict[str, list[Link]] = defaultdict(list)
    for link in Link.objects.select_related("source", "target").order_by("source__name", "target__name", "medium"):
        by_source[link.source.name].append(link)
    return dict(by_source)
