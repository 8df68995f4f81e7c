"""Who may send now: turns of flows as permissions to senders that cannot be paced, only stopped and started.

The simulator shares a port to the byte. A transfer daemon can only let a sender go or hold it, so a flow that goes is
assumed to take its whole port until it has been measured. It drives a `FlowScheduler` and does no I/O.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypedDict

from controller.core.errors import ConfigError
from controller.flow.flows import FlowStage, MsFlow
from controller.flow.policies import Turn
from controller.flow.scheduler import (
    BatchComputed,
    Ended,
    FlowEvent,
    FlowProgress,
    FlowScheduler,
    LayerStarted,
    NotTaken,
    PortSeen,
    Pressed,
    Submitted,
)

OFF = "off"  # no flow policy: all flows send at once
# Policies that a gate can enforce. Karuna gives a flow a rate, and a sender that is only stopped and started has none.
GATED = ("mfs", "fair_sharing", "shortest_first", "earliest_deadline")
FADES = 0.8  # a window: a sender that paused for a moment keeps its place


class Go(NamedTuple):
    """The flow may send (`go`) or is held, with this turn, until the next one."""

    flow_id: str
    go: bool
    turn: Turn


class Expired(NamedTuple):
    """Nothing was heard of the flow for as long as its lease: it is no longer scheduled."""

    flow_id: str


GateAction = Go | NotTaken | Expired


class FlowView(TypedDict):
    """A flow for people. Seconds, bytes, bytes/s. `port`: that it leaves through; `due_in_s`: negative if it is late,
    None without a deadline; `level`: 1 (most urgent) to 8; `waiting`: it has nothing to send now."""

    id: str
    stage: int
    port: str
    to: str
    size_bytes: float
    left_bytes: float
    due_in_s: float | None
    level: int
    go: bool
    waiting: bool
    rate: float


@dataclass(frozen=True, slots=True)
class GateConfig:
    """Seconds, and shares of a port's bandwidth.

    - `lease_s`: how long a flow is scheduled without news of it, and a batch counts as computing.
    - `window_s`: over which a flow's rate is measured. `settle_s`: how long a flow that just started, or that nobody
      filled up, is assumed to take its whole port. `retest_s`: how often that is measured again.
    - `spare`: the least free share of both of its ports with which a flow is let in beside those before it.
    - `slice_s`: for how long a flow with a floor (weight loads) is let in, when its port had none for so long that this
      is their share. They take turns.
    """

    lease_s: float = 5.0
    window_s: float = 0.1
    settle_s: float = 0.3
    retest_s: float = 2.0
    spare: float = 0.25
    slice_s: float = 0.1

    def __post_init__(self) -> None:
        for name in ("lease_s", "window_s", "settle_s", "retest_s", "slice_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive", field=name)
        if not 0 < self.spare <= 1:
            raise ConfigError("spare must lie in (0, 1]", field="spare")


class _Sender:
    """One flow. `demand`: bytes/s that it takes of its ports; infinite until it was measured with nobody behind it."""

    __slots__ = (
        "demand", "flow", "go", "heard_at", "left", "moved", "number", "rate", "since", "slice_until", "told", "turn",
        "waiting",
    )  # fmt: skip

    def __init__(self, flow: MsFlow, number: int, now: float) -> None:
        self.flow, self.number = flow, number
        self.left = float(flow.size_bytes)
        self.turn = Turn((math.inf,))
        self.go = False
        self.told: tuple[bool, Turn] | None = None
        self.waiting = False  # it has nothing to send now
        self.heard_at = self.since = now  # `since`: when `go` or `waiting` last changed
        self.moved = 0.0  # bytes in this window
        self.rate = 0.0
        self.demand = math.inf
        self.slice_until = -math.inf


class Gate:
    """Flows of one host's senders. `bandwidth`: bytes/s of each port, which is known from its first flow on.

    A flow is let in by its turn if both of its ports have bandwidth left after those before it; flows of equal rank go
    together. So of two flows that could each fill a port only the first one sends, and where the first one cannot (it
    waits for its computing, or its other port is slower) the next one does. Cost of `step`: O(n log n).
    """

    def __init__(self, scheduler: FlowScheduler, bandwidth: float, config: GateConfig | None = None) -> None:
        if not (bandwidth > 0 and math.isfinite(bandwidth)):
            raise ConfigError("bandwidth must be positive and finite bytes/s", field="bandwidth")
        self.config = config or GateConfig()
        self.bandwidth = bandwidth
        self._scheduler = scheduler
        self._senders: dict[str, _Sender] = {}
        self._ports: set[str] = set()
        self._events: list[FlowEvent] = []
        self._measured_at = -math.inf
        self._retested_at = -math.inf
        self._number = 0
        self._computing: dict[tuple[str, str], float] = {}  # unit and batch: when a layer of it began
        self._rates_changed = True
        self._slice_ends: dict[str, float] = {}  # of the last slice on each port

    def __len__(self) -> int:
        return len(self._senders)

    # ---- what happened ----------------------------------------------------------------------------------------------

    def submit(self, flow: MsFlow, now: float) -> NotTaken | None:
        """Schedule it from the next `step` on, or say what is wrong with it."""
        if flow.id in self._senders:
            return NotTaken(flow.id, "id", f"flow {flow.id!r} was submitted before")
        if flow.deadline is not None and flow.deadline <= now:
            return NotTaken(flow.id, "deadline", "the deadline has passed")
        self._number += 1
        self._rates_changed |= not self._ports.issuperset((flow.egress, flow.ingress))
        self._ports |= {flow.egress, flow.ingress}
        self._senders[flow.id] = _Sender(flow, self._number, now)
        self._events.append(Submitted(flow))
        return None

    def progress(self, flow_id: str, left: float, waiting: bool, now: float) -> bool:
        """`left`: bytes not sent yet; `waiting`: there is nothing to send at the moment. Renews the lease. Returns
        whether others may send now who could not, or the other way round."""
        sender = self._senders.get(flow_id)
        if sender is None:
            return False
        changed = waiting != sender.waiting
        if changed:
            sender.since = now
        sender.heard_at, sender.waiting = now, waiting
        left = min(max(left, 0.0), sender.left)
        sender.moved += sender.left - left
        if left != sender.left:
            sender.left = left
            self._events.append(FlowProgress(flow_id, left))
        return changed

    def press(self, flow_id: str) -> bool:
        """An end of it is short of memory. False if the flow is not known."""
        if flow_id in self._senders:
            self._events.append(Pressed(flow_id))
        return flow_id in self._senders

    def layer_started(self, unit: str, batch: str, layer: int, now: float) -> None:
        """The unit computes this layer of the batch now, from 0, or waits for what it needs. Until `computed`, its KV
        transfers are promoted only when a layer begins."""
        self._computing[unit, batch] = now
        self._events.append(LayerStarted(unit, batch, layer))

    def computed(self, unit: str, batch: str) -> bool:
        """All layers of the batch are computed: its KV transfers are promoted at fixed intervals. False if the batch is
        not known."""
        if self._computing.pop((unit, batch), None) is None:
            return False
        self._events.append(BatchComputed(unit, batch))
        return True

    def end(self, flow_id: str) -> bool:
        """It was sent, or was given up. False if the flow is not known."""
        sender = self._senders.pop(flow_id, None)
        if sender is None:
            return False
        self._rates_changed |= sender.rate > 0
        self._events.append(Ended(flow_id))
        return True

    # ---- what follows -----------------------------------------------------------------------------------------------

    def step(self, now: float) -> tuple[list[GateAction], float]:
        """What has changed for flows, and when to call again if nothing happens until then (infinite: never)."""
        actions: list[GateAction] = []
        for flow_id, sender in list(self._senders.items()):
            if now - sender.heard_at >= self.config.lease_s:
                self.end(flow_id)
                actions.append(Expired(flow_id))
        for (unit, batch), began_at in list(self._computing.items()):
            if now - began_at >= self.config.lease_s:
                self.computed(unit, batch)
        self._measure(now)
        events, self._events = [*self._seen(), *self._events, *self._held()], []
        permits, wake_at = self._scheduler.handle(events, now)
        for permit in permits:
            if isinstance(permit, NotTaken):
                self._senders.pop(permit.flow_id, None)
                actions.append(permit)
            elif permit.flow_id in self._senders:
                sender = self._senders[permit.flow_id]
                self._rates_changed |= sender.rate > 0 and sender.turn.rank[0] != permit.turn.rank[0]
                sender.turn = permit.turn
        self._let_in(now)
        for flow_id, sender in self._senders.items():
            if sender.told != (sender.go, sender.turn):
                sender.told = (sender.go, sender.turn)
                actions.append(Go(flow_id, sender.go, sender.turn))
        return actions, min(wake_at, self._measured_at + self.config.window_s) if self._senders else math.inf

    def _measure(self, now: float) -> None:
        """Rates of the last window, and what flows take that nobody filled up."""
        passed = now - self._measured_at
        if passed < self.config.window_s - 1e-9:
            return
        last = self._last_going()
        for sender in self._senders.values():
            sender.rate = sender.moved / passed if math.isfinite(passed) else 0.0
            sender.moved = 0.0
            if not sender.go or sender.waiting or now - sender.since < self.config.settle_s:
                continue
            if math.isinf(sender.demand) and not _filled_up(sender, last):
                sender.demand = sender.rate
            else:
                kept = sender.demand if _filled_up(sender, last) else FADES * sender.demand
                sender.demand = max(kept, sender.rate)
        self._measured_at = now
        self._rates_changed = True
        if now - self._retested_at >= self.config.retest_s:
            self._retested_at = now
            for sender in self._senders.values():
                if _filled_up(sender, last):  # it may have become faster, which others in its place would hide
                    sender.demand, sender.since = math.inf, now

    def _held(self) -> list[FlowProgress]:
        """KV transfers that are held have not moved. Nobody reports that often enough, and a policy takes what was
        reported some time ago to have moved since: a late transfer would seem to be in time, and go first."""
        return [
            FlowProgress(flow_id, sender.left)
            for flow_id, sender in self._senders.items()
            if sender.told is not None and not sender.go and sender.flow.stage is FlowStage.KV_TRANSFER
        ]

    def _last_going(self) -> dict[str, tuple[float, ...]]:
        """By port, the latest rank that may send there."""
        last: dict[str, tuple[float, ...]] = {}
        for each in self._senders.values():
            if each.go:
                for port in (each.flow.egress, each.flow.ingress):
                    last[port] = max(last.get(port, each.turn.rank), each.turn.rank)
        return last

    def _seen(self) -> list[PortSeen]:
        """Rates of the last window, if they have changed since they were told last."""
        if not self._rates_changed:
            return []
        self._rates_changed = False
        rates: dict[str, dict[float, float]] = {port: {} for port in self._ports}
        for sender in self._senders.values():
            if not sender.rate:
                continue
            band = sender.turn.rank[0]
            for port in (sender.flow.egress, sender.flow.ingress):
                rates[port][band] = rates[port].get(band, 0.0) + sender.rate
        return [PortSeen(port, self.bandwidth, of) for port, of in rates.items()]

    def _let_in(self, now: float) -> None:
        room = dict.fromkeys(self._ports, self.bandwidth)
        least = self.config.spare * self.bandwidth
        ordered = sorted(self._senders.values(), key=lambda each: (each.turn.rank, each.number))
        for _, group in itertools.groupby(ordered, key=lambda each: each.turn.rank):
            taken: dict[str, float] = {}
            equal = list(group)
            if len(equal) > 1:
                equal.sort(key=lambda each: each.since)  # who was held for longest gets the next slice
            for sender in equal:
                ports = {sender.flow.egress, sender.flow.ingress}
                go = all(room[port] >= least for port in ports) or self._has_slice(sender, now)
                if go != sender.go:
                    sender.go, sender.since = go, now
                if go and not sender.waiting:
                    for port in ports:
                        taken[port] = taken.get(port, 0.0) + min(sender.demand, self.bandwidth)
            for port, rate in taken.items():
                room[port] -= rate

    def _has_slice(self, sender: _Sender, now: float) -> bool:
        """Whether a flow with a floor is let in for a moment: it and all others on its ports were held for so long."""
        if now < sender.slice_until:
            return True
        floor, slice_s = sender.turn.floor, self.config.slice_s
        if not floor or sender.go or sender.waiting:
            return False
        ports = (sender.flow.egress, sender.flow.ingress)
        last = max([sender.since, *(self._slice_ends.get(port, -math.inf) for port in ports)])
        if now - last < slice_s * (1 - floor) / floor:
            return False
        sender.slice_until = now + slice_s
        self._slice_ends |= dict.fromkeys(ports, sender.slice_until)
        return True

    def queued_bytes(self, port: str) -> float:
        """What transfers of requests have left to send over a port and could send now. Without weights, which go
        last."""
        return sum(
            each.left
            for each in self._senders.values()
            if each.flow.egress == port and each.flow.stage != FlowStage.WEIGHTS and not each.waiting
        )

    # ---- for people -------------------------------------------------------------------------------------------------

    def view(self, now: float) -> list[FlowView]:
        """Each flow, the first to send first."""
        ordered = sorted(self._senders.values(), key=lambda each: (each.turn.rank, each.number))
        return [
            {
                "id": each.flow.id,
                "stage": int(each.flow.stage),
                "port": each.flow.egress,
                "to": each.flow.ingress,
                "size_bytes": each.flow.size_bytes,
                "left_bytes": each.left,
                "due_in_s": None if each.flow.deadline is None else each.flow.deadline - now,
                "level": each.turn.wire_class + 1,
                "go": each.go,
                "waiting": each.waiting,
                "rate": each.rate,
            }
            for each in ordered
        ]


def _filled_up(sender: _Sender, last: Mapping[str, tuple[float, ...]]) -> bool:
    """Whether a flow of a later rank may send on one of its ports."""
    return any(last.get(port, ()) > sender.turn.rank for port in (sender.flow.egress, sender.flow.ingress))
