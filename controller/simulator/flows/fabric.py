"""A fat tree of two layers without oversubscription (1:1), in which a hash puts each flow on one path (ECMP).

Servers hang on leaf switches; each leaf has as many links up as hosts' ports, and each goes to another spine switch. A
flow between two leaves takes the spine that the hash of its ends and its request names, and keeps it, as a connection
does. So two flows can share a link up or down although their hosts' ports are different and others are idle. Traffic
within a leaf takes none of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence

from controller.core.errors import ConfigError
from controller.flow.flows import MsFlow


class FatTree:
    """`hosts`: their ports to the network in the order in which they hang on leaves, `per_leaf` on each; `bandwidth`:
    bytes/s of each of them and of each link between switches. Raises ConfigError."""

    def __init__(self, hosts: Sequence[str], per_leaf: int, bandwidth: float) -> None:
        if per_leaf < 1:
            raise ConfigError("per_leaf must be at least 1", field="per_leaf")
        if not bandwidth > 0:
            raise ConfigError("bandwidth must be positive bytes/s", field="bandwidth")
        self._leaf = {host: place // per_leaf for place, host in enumerate(hosts)}
        self._spines = per_leaf
        self._bandwidth = bandwidth

    @property
    def links(self) -> Mapping[str, float]:
        """Bandwidth of each link between switches, one entry for each direction."""
        return dict.fromkeys(self._names(), self._bandwidth)

    def _names(self) -> Iterator[str]:
        for leaf in sorted(set(self._leaf.values())):
            for spine in range(self._spines):
                yield from (f"leaf{leaf}.{spine}.up", f"leaf{leaf}.{spine}.down")

    def path(self, flow: MsFlow) -> tuple[str, ...]:
        """From its egress to its ingress port, which are `HOST.out` and `HOST.in`."""
        source, target = (self._leaf[port.rpartition(".")[0]] for port in (flow.egress, flow.ingress))
        if source == target:
            return flow.egress, flow.ingress
        spine = zlib.crc32(" ".join((flow.egress, flow.ingress, *flow.requests)).encode()) % self._spines
        return flow.egress, f"leaf{source}.{spine}.up", f"leaf{target}.{spine}.down", flow.ingress
