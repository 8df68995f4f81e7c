"""The port of each instance: its bandwidth, whether it is down, and what its engine reports when it joins."""

from __future__ import annotations

from controller.core import events as ev
from controller.core.kv_links import LinkState
from controller.simulator.fleet.cluster import Cluster
from controller.simulator.network import GIGA, LinkSettings


class Ports:
    """`differ`: some have a bandwidth of their own, which engines then report. Times are the run's seconds."""

    def __init__(self, links: LinkSettings, cluster: Cluster) -> None:
        self.differ = bool(links.ports)
        self._links = links
        self._cluster = cluster
        self._dead_until: dict[str, float] = {}  # by instance

    def cut(self, instance_id: str, until: float) -> None:
        self._dead_until[instance_id] = until

    def dead(self, instance_id: str, now: float) -> bool:
        return self._dead_until.get(instance_id, -1.0) > now

    def gb_s(self, instance_id: str) -> float:
        slot = self._cluster.slot_of(instance_id)
        own = (port.bandwidth_gb_s for port in self._links.ports if port.instance == slot)
        return next(own, self._links.bandwidth_gb_s)

    def links_of(self, instance_id: str) -> list[ev.LinkSeen]:
        """Its links to all others in both directions, as engines would measure them."""
        seen = []
        for other in self._cluster:
            if other.id != instance_id:
                speed = min(self.gb_s(instance_id), self.gb_s(other.id)) * GIGA
                for ends in ((instance_id, other.id), (other.id, instance_id)):
                    seen.append(ev.LinkSeen(*ends, LinkState.UP, speed, self._links.latency_s))
        return seen
