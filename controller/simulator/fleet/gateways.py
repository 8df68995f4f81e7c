"""Several gateways before one simulated fleet, each with a scheduler of its own that sees only its own requests.

What the others have at an engine is known from telemetry alone, and each is told an equal share of every instance, as
gateways with equal traffic agree on (api.openai.state.shares).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from controller.core import events as ev
from controller.core.snapshot import FleetState
from controller.dispatch import Scheduler


class GatewayQueues:
    """What waits at all gateways together."""

    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        self._queues = [scheduler.queue() for scheduler in schedulers]

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues)

    def pressure(self, limit: int, now: float) -> dict[str, tuple[int, float]]:
        """As `QueueView.pressure`: counts are added, and the largest wait over TTFT counts."""
        return _merged([queue.pressure(limit, now) for queue in self._queues])


class GatewayGroup:
    """Stands where one scheduler would. A request stays with the gateway that it came to; they take turns."""

    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        self.name = schedulers[0].name
        self.schedulers = list(schedulers)
        self._wakes = [math.inf] * len(schedulers)
        self._owners: dict[str, int] = {}
        self._arrived = 0

    def handle(self, events: Sequence[ev.Event], now: float) -> ev.Reply:
        """Each gateway hears of its own requests and of all instances."""
        batches: list[list[ev.Event]] = [[] for _ in self.schedulers]
        for event in events:
            owner = self._owner(event)
            if owner is not None:
                batches[owner].append(event)
            elif not isinstance(event, ev.Woke):
                for batch in batches:
                    batch.extend(self._shared(event))
        actions: list[ev.Action] = []
        for index, (scheduler, batch) in enumerate(zip(self.schedulers, batches, strict=True)):
            if self._wakes[index] <= now:
                batch.append(ev.Woke())
            if batch:
                reply = scheduler.handle(batch, now)
                self._wakes[index] = math.inf if reply.wake_at is None else reply.wake_at
                actions += reply.actions
        wake_at = min(self._wakes)
        return ev.Reply(actions, None if math.isinf(wake_at) else wake_at)

    def _owner(self, event: ev.Event) -> int | None:
        """The gateway whose request this is about; None: all of them hear it."""
        if isinstance(event, ev.Arrived):
            owner = self._owners.setdefault(event.request.id, self._arrived % len(self.schedulers))
            self._arrived += 1
            return owner
        request_id = event.request.id if isinstance(event, ev.PrefillDone) else getattr(event, "request_id", None)
        return None if request_id is None else self._owners.get(request_id, 0)

    def _shared(self, event: ev.Event) -> list[ev.Event]:
        if isinstance(event, ev.InstanceUp):
            return [event, ev.SharesChanged(event.spec.id, 1 / len(self.schedulers))]
        return [event]

    def fleet(self, now: float) -> list[FleetState]:
        """Each instance as the gateway sees it that counts the most there, and as the service reads several gateways:
        of utilisations the highest (`controller.scale.observation`)."""
        found: dict[str, FleetState] = {}
        for scheduler in self.schedulers:
            for state in scheduler.fleet(now):
                known = found.get(state.id)
                kept = state.kept_kv + (known.kept_kv if known is not None else 0)
                needed = state.needed or (known is not None and known.needed)
                busy = max(state.utilisation, known.utilisation if known is not None else 0.0)
                if known is None or state.running + state.waiting > known.running + known.waiting:
                    found[state.id] = state
                seen = found[state.id]
                seen.kept_kv, seen.needed, seen.utilisation = kept, needed, busy
        return list(found.values())

    def wanted(self, now: float) -> set[str]:
        return {name for scheduler in self.schedulers for name in scheduler.wanted(now)}

    def queue(self) -> GatewayQueues:
        return GatewayQueues(self.schedulers)

    def pending_above(self, priority: int) -> bool:
        return any(scheduler.pending_above(priority) for scheduler in self.schedulers)

    def decode_pressure(self, now: float) -> dict[str, tuple[int, float]]:
        return _merged([scheduler.decode_pressure(now) for scheduler in self.schedulers])


def _merged(pressures: Sequence[dict[str, tuple[int, float]]]) -> dict[str, tuple[int, float]]:
    merged: dict[str, tuple[int, float]] = {}
    for pressure in pressures:
        for model, (count, share) in pressure.items():
            known_count, known_share = merged.get(model, (0, 0.0))
            merged[model] = (known_count + count, max(known_share, share))
    return merged
