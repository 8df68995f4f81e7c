"""The instances a dispatcher knows and the lanes (one a served model) they belong to."""

from __future__ import annotations

from collections.abc import Callable

from controller.core import events as ev
from controller.dispatch.lane import Lane
from controller.dispatch.shadow import Worker


class Roster:
    """Instances by id. An event about an instance that is gone changes nothing."""

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}

    def handle(self, event: ev.Event) -> None:
        if isinstance(event, ev.InstanceUp):
            self.up(event)
        elif isinstance(event, ev.InstanceDown):
            self.down(event.instance_id)
        elif isinstance(event, ev.InstanceDraining | ev.RoleChanged | ev.SharesChanged | ev.Telemetry):
            worker = self.workers.get(event.instance_id)
            if worker is not None:
                _change(worker, event)

    def up(self, event: ev.InstanceUp) -> Worker:
        """A new instance, or new settings of a known one; what is known of its requests and latency stays."""
        spec = event.spec
        known = self.workers.get(spec.id)
        if known is not None and known.spec.model == spec.model:
            if spec.latency is not None and spec.latency != known.spec.latency:
                known.set_profile(spec.latency)
            known.spec = spec
            known.state = "up"
            return known
        if known is not None:
            self.down(spec.id)
        self.workers[spec.id] = worker = Worker(spec)
        return worker

    def down(self, instance_id: str) -> Worker | None:
        worker = self.workers.pop(instance_id, None)
        if worker is not None:
            worker.state = "down"
        return worker


class Fleet(Roster):
    """The same, by lane."""

    def __init__(self, new_lane: Callable[[], Lane]) -> None:
        super().__init__()
        self._new_lane = new_lane
        self.lanes: dict[str, Lane] = {}

    def lane(self, model: str) -> Lane:
        found = self.lanes.get(model)
        if found is None:
            found = self.lanes[model] = self._new_lane()
        return found

    def up(self, event: ev.InstanceUp) -> Worker:
        worker = super().up(event)
        self.lane(worker.spec.model).workers[worker.id] = worker
        return worker

    def down(self, instance_id: str) -> Worker | None:
        worker = super().down(instance_id)
        if worker is not None:
            self.lane(worker.spec.model).workers.pop(instance_id, None)
        return worker


def _change(worker: Worker, event: ev.InstanceDraining | ev.RoleChanged | ev.SharesChanged | ev.Telemetry) -> None:
    if isinstance(event, ev.InstanceDraining):
        worker.state = "draining"
    elif isinstance(event, ev.RoleChanged):
        worker.spec.role = event.role
    elif isinstance(event, ev.SharesChanged):
        worker.share = min(1.0, max(0.0, event.share))
    else:
        worker.observe_load(event.load)
