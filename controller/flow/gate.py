"""Who may send now: turns of flows as permissions to senders that cannot be paced, only stopped and started.

The simulator shares a port to the byte. A transfer daemon can only let a sender go or hold it, so a flow that goes is
assumed to take its whole port until it has been measured. It drives a `FlowScheduler` and does no I/O.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple, TypedDict

from controller.core.errors import ConfigError
from controller.flow.flows import FlowStage, MsFlow
from controller.flow.policies import Turn
from controller.flow.scheduler import (
    BatchComputed,
    Ended,
    FlowEvent,
    FlowHeld,
    FlowProgress,
    FlowScheduler,
    LayerNeeded,
    LayerStarted,
    NotTaken,
    OrderSent,
    PortSeen,
    Pressed,
    Submitted,
)
from controller.flow.sorted_items import SortedItems

OFF = "off"  # no flow policy: all flows send at once
# Policies that a gate can enforce. Karuna gives a flow a rate, and a sender that is only stopped and started has none.
GATED = ("mfs", "fair_sharing", "shortest_first", "earliest_deadline")
Rank = tuple[float, ...]
NEVER: Rank = (math.inf, math.inf)  # after every rank
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
        "demand", "flow", "go", "left", "moved", "number", "ports", "rate", "since", "slice_until", "told", "turn",
        "waiting",
    )  # fmt: skip

    def __init__(self, flow: MsFlow, number: int, now: float) -> None:
        self.flow, self.number = flow, number
        self.ports = tuple({flow.egress, flow.ingress})
        self.left = float(flow.size_bytes)
        self.turn = Turn((math.inf,))
        self.go = False
        self.told: tuple[bool, Turn] | None = None
        self.waiting = False  # it has nothing to send now
        self.since = now  # when `go` or `waiting` last changed
        self.moved = 0.0  # bytes in this window
        self.rate = 0.0
        self.demand = math.inf
        self.slice_until = -math.inf


class Gate:
    """Flows of one host's senders. `bandwidth`: bytes/s of each port, which is known from its first flow on.

    A flow is let in by its turn if both of its ports have bandwidth left after those before it; flows of equal rank go
    together. So of two flows that could each fill a port only the first one sends, and where the first one cannot (it
    waits for its computing, or its other port is slower) the next one does.

    A port has room up to one rank, and only flows between that rank and the one of the last step can have changed. So
    `step` costs something for each flow that is new, sends or changes, and nothing for one that is held or waits.
    """

    def __init__(self, scheduler: FlowScheduler, bandwidth: float, config: GateConfig | None = None) -> None:
        if not (bandwidth > 0 and math.isfinite(bandwidth)):
            raise ConfigError("bandwidth must be positive and finite bytes/s", field="bandwidth")
        self.config = config or GateConfig()
        self.bandwidth = bandwidth
        self._scheduler = scheduler
        self._senders: dict[str, _Sender] = {}
        self._heard: dict[str, float] = {}  # when of each flow, the longest ago first
        self._on_port: dict[str, SortedItems[_Sender]] = {}  # that have a turn, by its rank
        self._ready: dict[str, SortedItems[_Sender]] = {}  # of these by egress port those with something to send
        self._floored: SortedItems[_Sender] = SortedItems()  # and apart from them those with a floor
        self._filled: dict[str, Rank] = {}  # after this rank the port has no room
        self._changed: dict[int, _Sender] = {}  # that may have to be told something
        self._measured: dict[int, _Sender] = {}  # that moved or may send, and so have a rate
        self._seen: dict[str, dict[float, float] | None] = {}  # rates of each port by band that the scheduler knows
        self._events: list[FlowEvent] = []
        self._measured_at = -math.inf
        self._retested_at = -math.inf
        self._number = 0
        self._computing: dict[tuple[str, str], float] = {}  # unit and batch: when a layer of it began, in this order
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
        self._senders[flow.id] = sender = _Sender(flow, self._number, now)
        for port in sender.ports:
            if port not in self._seen:
                self._seen[port] = None
                self._rates_changed = True
        self._heard[flow.id] = now
        self._events.append(Submitted(flow))
        return None

    def progress(self, flow_id: str, left: float, waiting: bool, now: float) -> bool:
        """`left`: bytes not sent yet; `waiting`: there is nothing to send at the moment. Renews the lease. Returns
        whether others may send now who could not, or the other way round."""
        sender = self._senders.get(flow_id)
        if sender is None:
            return False
        del self._heard[flow_id]
        self._heard[flow_id] = now
        changed = waiting != sender.waiting
        if changed:
            sender.since, sender.waiting = now, waiting
            if sender.number in self._on_port.get(sender.flow.egress, ()):
                self._place(sender)
        left = min(max(left, 0.0), sender.left)
        if left != sender.left:
            sender.moved += sender.left - left
            sender.left = left
            self._measured[sender.number] = sender
            self._events.append(FlowProgress(flow_id, left))
        return changed

    def needed_by(self, flow_id: str, layer: int) -> bool:
        """This layer waits for its next bytes. False if the flow is not known."""
        if flow_id in self._senders:
            self._events.append(LayerNeeded(flow_id, layer))
        return flow_id in self._senders

    def press(self, flow_id: str) -> bool:
        """An end of it is short of memory. False if the flow is not known."""
        if flow_id in self._senders:
            self._events.append(Pressed(flow_id))
        return flow_id in self._senders

    def obey(self, order: OrderSent) -> None:
        """The coordinator has sent an order."""
        self._events.append(order)

    def layer_started(self, unit: str, batch: str, layer: int, now: float) -> None:
        """The unit computes this layer of the batch now, from 0, or waits for what it needs. Until `computed`, its KV
        transfers are promoted only when a layer begins."""
        self._computing.pop((unit, batch), None)
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
        sender = self._senders.get(flow_id)
        if sender is None:
            return False
        self._remove(sender)
        self._rates_changed |= sender.rate > 0
        self._events.append(Ended(flow_id))
        return True

    def _remove(self, sender: _Sender) -> None:
        del self._senders[sender.flow.id], self._heard[sender.flow.id]
        self._changed.pop(sender.number, None)
        self._measured.pop(sender.number, None)
        self._floored.drop(sender.number)
        for groups, ports in ((self._on_port, sender.ports), (self._ready, (sender.flow.egress,))):
            for port in ports:
                if port in groups:
                    groups[port].drop(sender.number)
                    if not len(groups[port]):
                        del groups[port]

    def _place(self, sender: _Sender) -> None:
        """Its rank, or whether it waits, has changed."""
        rank, number, egress = sender.turn.rank, sender.number, sender.flow.egress
        for port in sender.ports:
            self._on_port.setdefault(port, SortedItems()).put(rank, number, sender)
        ready = self._ready.setdefault(egress, SortedItems())
        if sender.turn.floor:
            self._floored.put(rank, number, sender)
            ready.drop(number)
        else:
            self._floored.drop(number)
            if sender.waiting:
                ready.drop(number)
            else:
                ready.put(rank, number, sender)
        if sender.go and not sender.waiting:
            self._measured[number] = sender

    # ---- what follows -----------------------------------------------------------------------------------------------

    def step(self, now: float) -> tuple[list[GateAction], float]:
        """What has changed for flows, and when to call again if nothing happens until then (infinite: never)."""
        actions: list[GateAction] = [*self._expire(now)]
        self._measure(now)
        events, self._events = [*self._ports_seen(), *self._events], []
        permits, wake_at = self._scheduler.handle(events, now)
        for permit in permits:
            sender = self._senders.get(permit.flow_id)
            if sender is None:
                continue
            if isinstance(permit, NotTaken):
                self._remove(sender)
                actions.append(permit)
            else:
                self._rates_changed |= sender.rate > 0 and sender.turn.rank[0] != permit.turn.rank[0]
                sender.turn = permit.turn
                self._place(sender)
                self._changed[sender.number] = sender
        self._let_in(now)
        actions += self._tell(now)
        if not self._senders:
            return actions, math.inf
        return actions, min(wake_at, self._measured_at + self.config.window_s, self._slice_change(now))

    def _expire(self, now: float) -> Iterator[Expired]:
        while self._heard and now - next(iter(self._heard.values())) >= self.config.lease_s:
            flow_id = next(iter(self._heard))
            self.end(flow_id)
            yield Expired(flow_id)
        while self._computing and now - next(iter(self._computing.values())) >= self.config.lease_s:
            self.computed(*next(iter(self._computing)))

    def _measure(self, now: float) -> None:
        """Rates of the last window, and what flows take that nobody filled up."""
        passed = now - self._measured_at
        if passed < self.config.window_s - 1e-9:
            return
        last: dict[str, Rank] = {}
        for number, sender in list(self._measured.items()):
            sender.rate = sender.moved / passed if math.isfinite(passed) else 0.0
            sender.moved = 0.0
            sends = sender.go and not sender.waiting
            if not sends and not sender.rate:
                del self._measured[number]
            if not sends or now - sender.since < self.config.settle_s:
                continue
            filled_up = self._filled_up(sender, last)
            if math.isinf(sender.demand) and not filled_up:
                sender.demand = sender.rate
            else:
                sender.demand = max(sender.demand if filled_up else FADES * sender.demand, sender.rate)
        self._measured_at = now
        self._rates_changed = True
        if now - self._retested_at >= self.config.retest_s:
            self._retested_at = now
            for sender in self._senders.values():
                if self._filled_up(sender, last):  # it may have become faster, which others in its place would hide
                    sender.demand, sender.since = math.inf, now

    def _filled_up(self, sender: _Sender, last: dict[str, Rank]) -> bool:
        """Whether a flow of a later rank may send on one of its ports. `last`: what is known of that already."""
        for port in sender.ports:
            if port not in last:
                last[port] = self._last_going(port)
            if last[port] > sender.turn.rank:
                return True
        return False

    def _last_going(self, port: str) -> Rank:
        """The latest rank that may send there."""
        sliced = [rank for rank, _, sender in self._floored if sender.go and port in sender.ports]
        if port not in self._on_port:
            return ()
        before = self._on_port[port].backwards(self._filled.get(port, NEVER))
        return max([next((rank for rank, sender in before if sender.go), ()), *sliced])

    def _ports_seen(self) -> list[PortSeen]:
        """Rates of the last window where they are others than the scheduler knows."""
        if not self._rates_changed:
            return []
        self._rates_changed = False
        rates: dict[str, dict[float, float]] = {port: {} for port, known in self._seen.items() if known != {}}
        for sender in self._measured.values():
            if not sender.rate:
                continue
            band = sender.turn.rank[0]
            for port in sender.ports:
                of_port = rates.setdefault(port, {})
                of_port[band] = of_port.get(band, 0.0) + sender.rate
        changed = {port: of for port, of in rates.items() if of != self._seen[port]}
        self._seen |= changed
        return [PortSeen(port, self.bandwidth, of) for port, of in changed.items()]

    # ---- who may send -----------------------------------------------------------------------------------------------

    def _let_in(self, now: float) -> None:
        filled = self._fill(now)
        for port in self._filled.keys() | filled.keys():
            before, after = self._filled.get(port, NEVER), filled.get(port, NEVER)
            if before != after and port in self._on_port:
                among = self._on_port[port].between(min(before, after), max(before, after))
                self._changed |= {sender.number: sender for sender in among}
        self._filled = filled
        for sender in self._changed.values():
            if not sender.turn.floor:
                flow, rank = sender.flow, sender.turn.rank
                go = rank <= filled.get(flow.egress, NEVER) and rank <= filled.get(flow.ingress, NEVER)
                self._let(sender, go, now)

    def _fill(self, now: float) -> dict[str, Rank]:
        """By port, the last rank that finds room there, if it takes it. Lets in those with a floor."""
        room: dict[str, float] = {}
        filled: dict[str, Rank] = {}
        least = self.config.spare * self.bandwidth
        some = heapq.merge(*(self._with_room(port, filled) for port in self._ready), self._floored)
        for rank, group in itertools.groupby(some, key=itemgetter(0)):
            taken: dict[str, float] = {}
            equal = [sender for _, _, sender in group]
            if equal[0].turn.floor:
                equal.sort(key=lambda each: each.since)  # who was held for longest gets the next slice
            for sender in equal:
                go = filled.keys().isdisjoint(sender.ports)
                if sender.turn.floor:
                    go = go or self._has_slice(sender, now)
                    self._let(sender, go, now)
                if go and not sender.waiting:
                    for port in sender.ports:
                        taken[port] = taken.get(port, 0.0) + min(sender.demand, self.bandwidth)
            for port, rate in taken.items():
                room[port] = room.get(port, self.bandwidth) - rate
                if room[port] < least:
                    filled.setdefault(port, rank)
        return filled

    def _with_room(self, port: str, filled: dict[str, Rank]) -> Iterator[tuple[Rank, int, _Sender]]:
        """Those with something to send over this egress port, until it is filled."""
        for entry in self._ready[port]:
            if port in filled:
                return
            yield entry

    def _let(self, sender: _Sender, go: bool, now: float) -> None:
        if go == sender.go:
            return
        sender.go, sender.since = go, now
        self._changed[sender.number] = sender
        if go and not sender.waiting:
            self._measured[sender.number] = sender

    def _has_slice(self, sender: _Sender, now: float) -> bool:
        """Whether a flow with a floor is let in for a moment: it and all others on its ports were held for so long."""
        if now < sender.slice_until:
            return True
        if sender.go or sender.waiting or now < self._slice_at(sender):
            return False
        sender.slice_until = now + self.config.slice_s
        self._slice_ends |= dict.fromkeys(sender.ports, sender.slice_until)
        return True

    def _slice_at(self, sender: _Sender) -> float:
        """When a flow that is held gets its next slice."""
        last = max([sender.since, *(self._slice_ends.get(port, -math.inf) for port in sender.ports)])
        return last + self.config.slice_s * (1 - sender.turn.floor) / sender.turn.floor

    def _slice_change(self, now: float) -> float:
        """When a slice ends or begins; infinite if none does."""
        at = math.inf
        for _, _, sender in self._floored:
            if now < sender.slice_until:
                at = min(at, sender.slice_until)
            elif not sender.go and not sender.waiting:
                at = min(at, self._slice_at(sender))
        return at

    def _tell(self, now: float) -> list[Go]:
        """What is new for those that have changed. The scheduler hears of KV transfers that are held or no more."""
        told = []
        for number in sorted(self._changed):
            sender = self._changed[number]
            flow_id, was_held = sender.flow.id, sender.told is not None and not sender.told[0]
            if sender.told == (sender.go, sender.turn):
                continue
            sender.told = sender.go, sender.turn
            told.append(Go(flow_id, *sender.told))
            if sender.flow.stage is FlowStage.KV_TRANSFER and was_held == sender.go:
                self._events.append(FlowHeld(flow_id, not sender.go, now))
        self._changed = {}
        return told

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
