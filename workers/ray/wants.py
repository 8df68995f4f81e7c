"""For want of what a job waits, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workers.ray.jobs import HostSeen


def why_pending(message: str, spec: Mapping[str, Any], hosts: Sequence[HostSeen]) -> str:
    """`message`: Ray's. `spec`: with `resources` and `labels`. `hosts`: none if they could not be read."""
    wanted, labels = dict(spec.get("resources") or {}), dict(spec.get("labels") or {})
    alive = [host for host in hosts if host.state == "alive"]
    fitting = [host for host in alive if all(_fits(host.labels.get(name), each) for name, each in labels.items())]
    if labels and hosts and not fitting:
        told = ", ".join(f"{name}={value}" for name, value in labels.items())
        return f"waits for a node with the labels {told}: the cluster has none"
    if not wanted or not hosts:
        detail = message.strip().splitlines()[0][:200] if message.strip() else "its job has not started yet"
        return f"waits on the cluster: {detail}"
    most = {name: max((host.resources.get(name, (0.0, 0.0))[1] for host in fitting), default=0.0) for name in wanted}
    needs = ", ".join(f"{amount:g} {name}" for name, amount in wanted.items())
    if too_much := [f"{most[name]:g} {name}" for name, amount in wanted.items() if most[name] < amount]:
        return f"waits for a node with {needs}: no node has more than {', '.join(too_much)}"
    if any(
        all(host.resources.get(name, (0.0, 0.0))[0] >= amount for name, amount in wanted.items()) for host in fitting
    ):
        return "waits until the cluster has started its job"
    free = ", ".join(f"{max(_free(host, name) for host in fitting):g} {name}" for name in wanted)
    return f"waits for {needs} on one node: the most that is free on one is {free}"


def _fits(label: str | None, condition: str) -> bool:
    """Whether a node with this label (None: it has none of the name) meets a condition as Ray writes it: `a`, `!a`,
    `in(a, b)` or `!in(a, b)`."""
    wanted = condition.removeprefix("!")
    if wanted.startswith("in(") and wanted.endswith(")"):
        named = [each.strip() for each in wanted[len("in(") : -1].split(",")]
    else:
        named = [wanted]
    return (label in named) != condition.startswith("!")


def _free(host: HostSeen, name: str) -> float:
    return host.resources.get(name, (0.0, 0.0))[0]
