"""The network of a run on its clock: transfers that begin now, and what happens when each has ended or is lost."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from controller.flow.scheduler import OrderSent
from controller.simulator.fleet.cluster import Cluster
from controller.simulator.fleet.ports import Ports
from controller.simulator.heap import EventHeap, EventKind
from controller.simulator.network import LinkFailure, LinkSettings, Network, NetworkTransfer

Then = Callable[[], None]


class FleetLinks:
    """KV transfers and weight loads of all instances, over one network."""

    def __init__(self, settings: LinkSettings, cluster: Cluster, heap: EventHeap) -> None:
        self.ports = Ports(settings, cluster)
        self.network = Network(settings, self.ports.gb_s if self.ports.differ else None)
        self._settings, self._cluster, self._heap = settings, cluster, heap
        self._then: dict[str, tuple[Then, Then]] = {}  # by transfer: once it has ended, and if it is lost
        self._version = 0

    def start(self) -> None:
        for failure in self._settings.failures:
            self._heap.push(failure.at, EventKind.FAILURE, partial(self._fail, failure))

    def send(self, transfer: NetworkTransfer, ended: Then, lost: Then) -> None:
        """`lost`: its link or one of its ends failed. Neither is called once it was cancelled."""
        self._then[transfer.name] = ended, lost
        self.network.start(transfer, self._heap.now)
        self._plan()

    def cancel(self, name: str) -> None:
        if self._then.pop(name, None) is not None:
            self.network.cancel(name, self._heap.now)
            self._plan()

    def obey(self, order: OrderSent) -> None:
        """The coordinator's orders come to the daemons of all instances."""
        self.network.obey(order, self._heap.now)
        self._plan()

    def busy(self, instance_id: str) -> bool:
        """Whether it sends or receives something."""
        return bool(self.network.touching(instance_id))

    def died(self, instance_id: str) -> None:
        """All that it sends or receives is lost."""
        for name in self.network.touching(instance_id):
            _, lost = self._then[name]
            self.cancel(name)
            lost()

    def _fail(self, failure: LinkFailure) -> None:
        instance = self._cluster.in_slot(failure.instance)
        if instance is not None:
            self.ports.cut(instance.id, self._heap.now + failure.for_s)
            self.died(instance.id)

    def _plan(self) -> None:
        """Look again when the next transfer ends as things are now."""
        self._version += 1
        if len(self.network):
            do = partial(self._look, self._version)
            self._heap.push(max(self.network.next_event, self._heap.now), EventKind.DELIVERY, do)

    def _look(self, version: int) -> None:
        if version != self._version:
            return
        for name in self.network.ended(self._heap.now):
            if (then := self._then.pop(name, None)) is not None:
                then[0]()
        self._plan()
