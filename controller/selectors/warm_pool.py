"""How many warm spares each policy has, and why it has fewer than it should."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from django.db.models import Count, QuerySet

from controller.models import Device, Instance, InstanceDevice, ScalingPolicy

NO_DEVICE, NOTHING_TO_START = "no_device", "nothing_to_start"


class WarmPool(NamedTuple):
    """`ready`: can be used now; `starting`: the process is not up yet; `held_by`: why there are not more, "" if nothing
    is known to prevent it."""

    ready: int = 0
    starting: int = 0
    held_by: str = ""


def warm_pools(policies: Sequence[ScalingPolicy], patterns: QuerySet[Instance]) -> dict[int, WarmPool]:
    """Warm pools by policy. One query, and three more if one has too few. `patterns`: what new instances are made
    like."""
    counted: dict[tuple[int, str], WarmPool] = {}
    groups = Instance.objects.warm().values_list("model_id", "role", "observed_state")
    for model, role, observed, count in groups.annotate(count=Count("pk")).order_by():
        known = counted.setdefault((model, role), WarmPool())
        state = "ready" if observed == Instance.Observed.READY else "starting"
        counted[model, role] = known._replace(**{state: getattr(known, state) + count})
    found = {policy.pk: counted.get((policy.model_id, policy.role), WarmPool()) for policy in policies}
    short = [each for each in policies if each.enabled and _too_few(each, found[each.pk])]
    for id, reason in _held(short, patterns).items():
        found[id] = found[id]._replace(held_by=reason)
    return found


def _too_few(policy: ScalingPolicy, pool: WarmPool) -> bool:
    return policy.warm is not None and pool.ready + pool.starting < policy.warm


def _held(short: Sequence[ScalingPolicy], patterns: QuerySet[Instance]) -> dict[int, str]:
    if not short:
        return {}
    rows = patterns.filter(model__in=[policy.model_id for policy in short])
    like = {(row.model_id, row.role): row for row in rows}
    free = _free(row.host_id for row in like.values())
    found = {}
    for policy in short:
        pattern = like.get((policy.model_id, policy.role))
        if pattern is None:
            found[policy.pk] = NOTHING_TO_START
        elif not _room(pattern, free.get(pattern.host_id or 0, {})):
            found[policy.pk] = NO_DEVICE
    return found


def _room(pattern: Instance, free: Mapping[str, int]) -> bool:
    """Whether there is room for one more. A host that lists no device of the kind has no bound
    (`topology.room_for`)."""
    kinds = [pattern.device_kind] if pattern.device_kind else list(free)
    usable = [free[kind] for kind in kinds if kind in free]
    return not usable or sum(usable) >= pattern.tp


def _free(hosts: Iterable[int | None]) -> dict[int, dict[str, int]]:
    """Free devices by host and kind; 0 if instances hold all of a kind."""
    devices = list(Device.objects.filter(host__in={host for host in hosts if host is not None}))
    held = set(
        InstanceDevice.objects.filter(device__in=devices, released_at__isnull=True).values_list("device_id", flat=True)
    )
    found: dict[int, Counter[str]] = {}
    for device in devices:
        found.setdefault(device.host_id, Counter())[device.kind] += device.pk not in held
    return {host: dict(kinds) for host, kinds in found.items()}
