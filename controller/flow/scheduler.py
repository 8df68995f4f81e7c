"""The one object over all flows of some ports: events in, permits out. Simulator and transfer daemon drive it.

It keeps which flows there are, how far their units have computed, and the order between batches that the coordinator
sent. A driver reports what happened and gives every flow that has a permit its turn (`policies.Turn`). Nothing here
blocks: without an order, or with one that has expired, flows go by stage alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from controller.core.errors import ConfigError
from controller.flow.flows import FlowStage, MsFlow
from controller.flow.policies import LATE_RANK, STEADY, DeferAndPromote, FlowPolicy, FlowState, Turn
from controller.flow.sorted_items import SortedItems

SCAVENGER = Turn((math.inf,), wire_class=7)
PRESSED = Turn((-1.0,), wire_class=0)


# ---- events ---------------------------------------------------------------------------------------------------------


class PortSeen(NamedTuple):
    """A port with its bandwidth (bytes/s) and what it sends now, bytes/s by band (`Turn.rank[0]`)."""

    port: str
    bandwidth: float
    rates: Mapping[float, float] = {}


class Submitted(NamedTuple):
    flow: MsFlow


class FlowProgress(NamedTuple):
    """`left`: bytes of the flow that are not sent yet."""

    flow_id: str
    left: float


class LayerNeeded(NamedTuple):
    """This layer waits for the flow's next bytes, in place of the one before: a copy of several layers has come so
    far."""

    flow_id: str
    layer: int


class FlowHeld(NamedTuple):
    """The flow is held from now on and does not move, or was until `at`.

    Without it a policy takes what was reported some time ago to have moved since: a late transfer would seem to be in
    time, and go first.
    """

    flow_id: str
    held: bool
    at: float


class Ended(NamedTuple):
    """The flow was sent completely, or it was given up."""

    flow_id: str


class BatchQueued(NamedTuple):
    """A batch of `layers` layers waits for its unit, behind those that were queued before. Queued again, it goes behind
    all others, as one that was set aside does when another comes."""

    unit: str
    batch: str
    layers: int


class LayerStarted(NamedTuple):
    """A batch computes this layer now, from 0, or waits for what the layer needs (L_curr of MFS' app. A.1).

    It is told when the layer before ends. If it came only with the computing, flows that a stalled batch waits for
    would rank behind those of batches that begin, and stay there.
    """

    unit: str
    batch: str
    layer: int


class BatchComputed(NamedTuple):
    """The unit has computed all layers of the batch."""

    unit: str
    batch: str


class OrderSent(NamedTuple):
    """The coordinator's order between batches. One with a `sequence` that is not larger than that in force is ignored.

    `order`: of batches, or of requests each of which is a batch to the coordinator. `scavengers`: requests that were
    pruned. `expires_at`: from then on the order counts no more.
    """

    sequence: int
    order: Sequence[str]
    scavengers: frozenset[str]
    expires_at: float


class Pressed(NamedTuple):
    """An end of the flow is short of memory that the flow holds: it goes before all others, under any policy."""

    flow_id: str


FlowEvent = (
    PortSeen
    | Submitted
    | FlowProgress
    | LayerNeeded
    | FlowHeld
    | Ended
    | BatchQueued
    | LayerStarted
    | BatchComputed
    | OrderSent
    | Pressed
)


# ---- actions --------------------------------------------------------------------------------------------------------


class Permit(NamedTuple):
    """The flow may send, with this turn, until another permit replaces it."""

    flow_id: str
    turn: Turn


class NotTaken(NamedTuple):
    """A submitted flow that is not scheduled; `field` says what is wrong with it."""

    flow_id: str
    field: str
    message: str


FlowAction = Permit | NotTaken


@dataclass(frozen=True, slots=True)
class FlowSchedulerConfig:
    """`period_s`: how often KV transfers may be promoted once their batch is computed (0: at once). `lazy`: between two
    periods ask to be called at the next one if anything happened, and look for the exact time only then. It costs one
    call more after an event, and far less for many events in a period."""

    period_s: float = 0.005
    lazy: bool = False

    def __post_init__(self) -> None:
        if self.period_s < 0:
            raise ConfigError("period_s must not be negative", field="period_s")


@dataclass(slots=True)
class _Unit:
    """Batches of a unit in order, with their layers, and how far the first one is."""

    batches: dict[str, int] = field(default_factory=dict)
    layer: int = 0  # that the first batch computes; 0 also if it has not started

    def queue(self, batch: str, layers: int) -> None:
        """Behind all others."""
        first = next(iter(self.batches), batch)
        self.batches.pop(batch, None)
        self.batches[batch] = layers
        if next(iter(self.batches)) != first:
            self.layer = 0

    def current_layer(self, batch: str) -> int | None:
        """Negative by the layers ahead; None if the batch is not known (it is computed, or was never queued)."""
        ahead = -self.layer  # of the first batch these are computed
        for place, (each, layers) in enumerate(self.batches.items()):
            if each == batch:
                return -ahead if place else self.layer
            ahead += layers
        return None


class FlowScheduler:
    """Flows of any number of ports under one policy.

    `handle` costs one turn for each flow that an event concerns, or that is due to change: an order concerns all flows,
    and more load on a port those that may be promoted for it. Flows that nothing happens to cost nothing.
    """

    def __init__(self, policy: FlowPolicy | None = None, config: FlowSchedulerConfig | None = None) -> None:
        self.policy = policy or DeferAndPromote()
        self.config = config or FlowSchedulerConfig()
        self._flows: dict[str, FlowState] = {}
        self._of_unit: dict[str, set[str]] = {}
        self._of_request: dict[tuple[tuple[str, ...], str], set[str]] = {}
        self._later: dict[tuple[tuple[str, ...], str], float] = {}
        self._ports: dict[str, PortSeen] = {}
        self._units: dict[str, _Unit] = {}
        self._order: OrderSent | None = None
        self._ranks: dict[str, float] = {}
        self._pressed: set[str] = set()
        self._number = 0
        self._period_at = -math.inf
        self._wakes_at = math.inf
        # Flows that something happened to since the last period, and whether their outlook was asked for since then.
        self._stale: dict[str, bool] = {}
        self._looks: SortedItems[str] = SortedItems()  # by the time of their outlook
        self._lates: SortedItems[str] = SortedItems()  # that are held, by when they become late
        self._drifting: dict[str, None] = {}
        self._watchers: dict[str, dict[float, dict[str, None]]] = {}  # by port and band of their outlook

    def __len__(self) -> int:
        return len(self._flows)

    def handle(self, events: Iterable[FlowEvent], now: float) -> tuple[list[FlowAction], float]:
        """Permits that are new or changed, and when to call again if nothing happens until then (infinite: never)."""
        actions: list[FlowAction] = []
        touched: dict[str, bool] = {}  # whether it may be promoted
        for event in events:
            self._apply(event, now, touched, actions)
        self._expire(now, touched)
        if not self._flows:
            return actions, self._rest(now)
        for flow_id in self._lates.take(now):
            touched.setdefault(flow_id, False)
        self._stale |= dict.fromkeys(touched, False)
        periodic = now >= self._period_at + self.config.period_s - 1e-12
        if periodic:
            self._period_at = now
            touched |= dict.fromkeys(self._periodic(now), True)
        for flow_id, boundary in touched.items():
            state = self._flows.get(flow_id)
            if state is None:
                continue
            turn = self._turn(state, now, boundary)
            if turn != state.turn:
                state.turn = turn
                actions.append(Permit(flow_id, turn))
            if state.held:
                _time(self._lates, self.policy.late_at(state, self), state)
        if periodic or not self.config.lazy:
            self._look_ahead(now)
            self._stale = {} if periodic else dict.fromkeys(self._stale, True)
            self._wakes_at = self._wake_at(now)
        elif self._stale:
            self._wakes_at = min(self._wakes_at, self._period_at + self.config.period_s)
        late_at = self._lates.first_key()
        return actions, self._wakes_at if late_at is None else min(self._wakes_at, late_at)

    def _rest(self, now: float) -> float:
        """Without flows: nothing changes before one comes, but that the order expires."""
        self._stale.clear()
        if now >= self._period_at + self.config.period_s - 1e-12:
            self._period_at = now
        self._wakes_at = self._wake_at(now)
        return self._wakes_at

    # ---- events -----------------------------------------------------------------------------------------------------

    def _apply(self, event: FlowEvent, now: float, touched: dict[str, bool], actions: list[FlowAction]) -> None:
        match event:
            case Submitted(flow):
                self._submit(flow, now, touched, actions)
            case FlowProgress(flow_id, left):
                self._progress(flow_id, left, now, touched)
            case LayerNeeded(flow_id, layer):
                self._layer_needed(flow_id, layer, touched)
            case FlowHeld(flow_id, held, at):
                self._hold(flow_id, held, at, touched)
            case Ended(flow_id):
                self._end(flow_id, touched)
            case Pressed(flow_id):
                if flow_id in self._flows:
                    self._pressed.add(flow_id)
                    touched.setdefault(flow_id, False)
            case PortSeen():
                self._see(event, touched)
            case BatchQueued(unit, batch, layers):
                self._units.setdefault(unit, _Unit()).queue(batch, layers)
                self._left_changed(self._of_unit.get(unit, ()), touched)  # layers to come count from now on
            case LayerStarted(unit, batch, layer):
                self._layer_started(unit, batch, layer, touched)
            case BatchComputed(unit, batch):
                self._batch_computed(unit, batch, touched)
            case OrderSent():
                self._take_order(event, now, touched)

    def _see(self, seen: PortSeen, touched: dict[str, bool]) -> None:
        if not seen.bandwidth > 0:
            raise ConfigError(f"port {seen.port!r}: bandwidth must be positive bytes/s", field="bandwidth")
        before = self._ports.get(seen.port, seen)
        self._ports[seen.port] = seen
        if before.bandwidth != seen.bandwidth:
            self._left_changed(self._flows, touched)
        watched = self._watchers.get(seen.port)
        if watched is None:
            return
        for band, watchers in watched.items():
            was, is_now = (min(_load_before(each, band), self.policy.most_load) for each in (before, seen))
            # With less load they change later than expected, so to look for nothing then costs less than this.
            if is_now > was or (is_now < was and not self.config.lazy):
                self._stale |= dict.fromkeys(watchers, False)

    def _progress(self, flow_id: str, left: float, now: float, touched: dict[str, bool]) -> None:
        state = self._flows.get(flow_id)
        if state is not None:
            state.left, state.at = max(0.0, left), now
            touched.setdefault(flow_id, False)
            if state.flow.stage is FlowStage.KV_TRANSFER:
                self._left_changed(self._of_request[_request_of(state.flow)], touched)

    def _layer_needed(self, flow_id: str, layer: int, touched: dict[str, bool]) -> None:
        """Its urgency is that of a flow of this layer alone, which may be less than before."""
        state = self._flows.get(flow_id)
        if state is not None and layer != state.flow.layer:
            state.flow, state.rli = replace(state.flow, layer=layer), None
            touched[flow_id] = True

    def _hold(self, flow_id: str, held: bool, at: float, touched: dict[str, bool]) -> None:
        state = self._flows.get(flow_id)
        if state is None:
            return
        state.held, state.at = held, at
        self._stale[flow_id] = False
        if held:
            touched.setdefault(flow_id, False)
        else:
            self._lates.drop(state.number)

    def _left_changed(self, flow_ids: Iterable[str], touched: dict[str, bool]) -> None:
        """What these have left may have changed by an event of another one. It counts from the next boundary on, and
        at once for those that are held."""
        for flow_id in flow_ids:
            self._stale[flow_id] = False
            if self._flows[flow_id].held:
                touched.setdefault(flow_id, False)

    def _submit(self, flow: MsFlow, now: float, touched: dict[str, bool], actions: list[FlowAction]) -> None:
        if flow.id in self._flows:
            actions.append(NotTaken(flow.id, "id", f"flow {flow.id!r} was submitted before"))
            return
        for field_name, port in (("egress", flow.egress), ("ingress", flow.ingress)):
            if port not in self._ports:
                actions.append(NotTaken(flow.id, field_name, f"port {port!r} is not known"))
                return
        self._number += 1
        self._flows[flow.id] = FlowState(flow, self._number, now)
        self._of_unit.setdefault(flow.unit, set()).add(flow.id)
        if flow.stage is FlowStage.KV_TRANSFER:
            key = _request_of(flow)
            self._of_request.setdefault(key, set()).add(flow.id)
            self._later[key] = flow.later_bytes
            self._left_changed(self._of_request[key], touched)
        touched[flow.id] = True

    def _end(self, flow_id: str, touched: dict[str, bool]) -> None:
        state = self._flows.pop(flow_id, None)
        if state is None:
            return
        self._pressed.discard(flow_id)
        self._looks.drop(state.number)
        self._lates.drop(state.number)
        self._drifting.pop(flow_id, None)
        self._stale.pop(flow_id, None)
        self._watch(state, None)
        flow = state.flow
        _discard(self._of_unit, flow.unit, flow_id)
        if flow.stage is not FlowStage.KV_TRANSFER:
            return
        key = _request_of(flow)
        if _discard(self._of_request, key, flow_id):
            self._later.pop(key, None)
        else:
            self._left_changed(self._of_request.get(key, ()), touched)

    def _layer_started(self, unit: str, batch: str, layer: int, touched: dict[str, bool]) -> None:
        known = self._units.setdefault(unit, _Unit())
        known.batches.setdefault(batch, layer + 1)
        if next(iter(known.batches)) != batch:  # it overtook those queued before it
            known.batches = {batch: known.batches.pop(batch), **known.batches}
        known.layer = layer
        touched |= dict.fromkeys(self._of_unit.get(unit, ()), True)

    def _batch_computed(self, unit: str, batch: str, touched: dict[str, bool]) -> None:
        known = self._units.get(unit)
        if known is None or batch not in known.batches:
            return
        if next(iter(known.batches)) == batch:
            known.layer = 0
        del known.batches[batch]
        if not known.batches:
            del self._units[unit]
        touched |= dict.fromkeys(self._of_unit.get(unit, ()), True)

    def _take_order(self, order: OrderSent, now: float, touched: dict[str, bool]) -> None:
        self._expire(now, touched)  # its sequence counts no more either: a new coordinator may have begun at 1
        if (self._order is not None and order.sequence <= self._order.sequence) or order.expires_at <= now:
            return
        self._order = order
        self._ranks = {batch: float(place) for place, batch in enumerate(order.order)}
        for flow_id in self._flows:
            touched.setdefault(flow_id, False)

    def _expire(self, now: float, touched: dict[str, bool]) -> None:
        if self._order is not None and self._order.expires_at <= now:
            self._order, self._ranks = None, {}
            for flow_id in self._flows:
                touched.setdefault(flow_id, False)

    # ---- turns ------------------------------------------------------------------------------------------------------

    def _turn(self, state: FlowState, now: float, boundary: bool) -> Turn:
        if state.flow.id in self._pressed:
            return PRESSED
        if self._pruned(state.flow):
            return SCAVENGER  # and no promotion, which it would keep when it comes back
        return self.policy.turn(state, self, now, boundary)

    def _pruned(self, flow: MsFlow) -> bool:
        if self._order is None or not flow.requests:
            return False
        return self._order.scavengers.issuperset(flow.requests)

    def _periodic(self, now: float) -> list[str]:
        """KV transfers that may have another turn than at the last boundary, of batches that are not computed any more:
        no layer of theirs begins."""
        self._stale |= dict.fromkeys([*self._looks.take(now + 1e-9), *self._drifting, *self._stale], False)
        found = []
        for flow_id in self._stale:
            state = self._flows.get(flow_id)
            if state is not None and self._has_periods(state.flow):
                found.append(flow_id)
        return found

    def _has_periods(self, flow: MsFlow) -> bool:
        return flow.stage is FlowStage.KV_TRANSFER and not self._computing(flow)

    def _computing(self, flow: MsFlow) -> bool:
        unit = self._units.get(flow.unit)
        return unit is not None and flow.batch in unit.batches

    def _look_ahead(self, now: float) -> None:
        """Ask for the outlook of all flows that something happened to, or whose time has come."""
        self._stale |= dict.fromkeys(self._looks.take(now), False)
        for flow_id, known in self._stale.items():
            state = self._flows.get(flow_id)
            if known or state is None:
                continue
            layers_begin = state.flow.stage is FlowStage.KV_TRANSFER and self._computing(state.flow)
            outlook = STEADY if layers_begin else self.policy.outlook(state, self, now)
            _time(self._looks, outlook.at, state)
            self._watch(state, outlook.band)
            if outlook.drifts:
                self._drifting[flow_id] = None
            else:
                self._drifting.pop(flow_id, None)

    def _watch(self, state: FlowState, band: float | None) -> None:
        if state.band == band:
            return
        for port in {state.flow.egress, state.flow.ingress}:
            of_port = self._watchers.setdefault(port, {})
            if state.band is not None:
                del of_port[state.band][state.flow.id]
                if not of_port[state.band]:
                    del of_port[state.band]
            if band is not None:
                of_port.setdefault(band, {})[state.flow.id] = None
            if not of_port:
                del self._watchers[port]
        state.band = band

    def _wake_at(self, now: float) -> float:
        at: float = math.inf if self._order is None else self._order.expires_at
        change = self._looks.first_key()
        if change is None:
            return at
        period_s, due = self.config.period_s, max(change, now)
        if period_s:  # only at the periods
            due = self._period_at + period_s * max(1, math.ceil((due - self._period_at) / period_s - 1e-9))
        return min(at, due)

    # ---- what policies read -----------------------------------------------------------------------------------------

    def bandwidth(self, port: str) -> float:
        return self._ports[port].bandwidth

    def load_before(self, port: str, band: float) -> float:
        return _load_before(self._ports[port], band)

    def load(self, port: str) -> float:
        return _load_before(self._ports[port], math.inf)

    def request_left(self, flow: MsFlow) -> float:
        key = _request_of(flow)
        submitted = 0.0
        for each in self._of_request.get(key, ()):
            submitted += self._flows[each].left
        return submitted + (self._later.get(key, 0.0) if self._computing(flow) else 0.0)

    def current_layer(self, flow: MsFlow) -> int:
        unit = self._units.get(flow.unit)
        layer = unit.current_layer(flow.batch) if unit is not None else None
        return 0 if layer is None else layer  # of an unknown batch: as if it began now

    def batch_rank(self, flow: MsFlow) -> float:
        if not self._ranks or flow.batch in self._ranks:
            return self._ranks.get(flow.batch, LATE_RANK)
        return min((self._ranks.get(request, LATE_RANK) for request in flow.requests), default=LATE_RANK)


def _load_before(seen: PortSeen, band: float) -> float:
    """Of all bands if `band` is infinite."""
    if not seen.rates:
        return 0.0
    before = (rate for other, rate in seen.rates.items() if other < band)
    return sum(seen.rates.values() if band == math.inf else before) / seen.bandwidth


def _time(timers: SortedItems[str], at: float, state: FlowState) -> None:
    """`at`: infinite if there is no time."""
    if at == math.inf:
        timers.drop(state.number)
    else:
        timers.put(at, state.number, state.flow.id)


def _request_of(flow: MsFlow) -> tuple[tuple[str, ...], str]:
    """What shares its bytes left: flows of the same requests over one port. A flow of no request is alone."""
    return (flow.requests or (f"flow {flow.id}",), flow.egress)


def _discard(groups: dict[Any, set[str]], key: Any, member: str) -> bool:
    """Remove `member` from its group, and the group with its last member; whether it is gone."""
    group = groups.get(key)
    if group is None:
        return False
    group.discard(member)
    if not group:
        del groups[key]
    return not group
