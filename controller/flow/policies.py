"""In which order flows send: MFS' reverse multi-level queue, and the baselines that it is compared with.

A policy gives each flow a turn on its ports. A smaller rank sends first, equal ranks share what is left evenly
(max-min). What the flows before it cannot use always goes to the next, so no bandwidth is idle while somebody waits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from controller.core.errors import ConfigError
from controller.core.registry import Registry
from controller.flow.flows import FlowStage, MsFlow
from controller.flow.urgency import (
    MOST_LOAD,
    crossing_at,
    level_of,
    minimal_link_utilisation,
    promotion_thresholds,
    relative_layer_index,
)

LATE_RANK = math.inf  # of a batch that nobody has ordered yet


class Turn(NamedTuple):
    """`rank`: sort key, smaller first; its first entry is the band, by which ports report their load.

    `cap`: most bytes/s it may use (None: whatever there is). `floor`: the share of a port that the flows of its band
    get in any case. `wire_class`: priority of its packets, 0 (first) to K - 1.
    """

    rank: tuple[float, ...]
    cap: float | None = None
    floor: float = 0.0
    wire_class: int = 0
    infeasible: bool = False  # its deadline cannot be kept any more, even alone


class TurnOutlook(NamedTuple):
    """What may change the turn of a flow at a boundary, apart from events of its own and of its requests.

    - `at`: when it changes if nothing happens until then (infinite: never).
    - `band`: it may also change when bands before this one (infinite: all) use more of its ports (None: it may not).
    - `drifts`: it may be another at each boundary.
    """

    at: float = math.inf
    band: float | None = None
    drifts: bool = False


STEADY = TurnOutlook()


class FlowState:
    """A submitted flow. `left`: bytes not sent yet, as reported at `at`; while it is `held` none are sent. `level`,
    `rli`: where MFS has it; both only ever fall. `band`: of its outlook."""

    __slots__ = ("at", "band", "flow", "held", "left", "level", "number", "rli", "turn")

    def __init__(self, flow: MsFlow, number: int, now: float) -> None:
        self.flow = flow
        self.number = number
        self.left = float(flow.size_bytes)
        self.at = now
        self.held = False
        self.level = 0  # 0: not assigned yet
        self.rli: int | None = None
        self.band: float | None = None
        self.turn: Turn | None = None


class FlowContext(Protocol):
    """What a policy may read of everything else."""

    def bandwidth(self, port: str) -> float:
        """Bytes/s."""
        ...

    def load_before(self, port: str, band: float) -> float:
        """Share of a port's bandwidth that bands before this one use now, 0..1."""
        ...

    def load(self, port: str) -> float:
        """Share of a port's bandwidth in use now, 0..1."""
        ...

    def request_left(self, flow: MsFlow) -> float:
        """Bytes of KV transfers that the flow's requests still have for its egress port, uncomputed layers too."""
        ...

    def current_layer(self, flow: MsFlow) -> int:
        """The layer that the flow's batch computes; negative by the layers ahead of it while it waits for its unit."""
        ...

    def batch_rank(self, flow: MsFlow) -> float:
        """Place of its batch in the order between batches; LATE_RANK if it has none."""
        ...


class FlowPolicy(Protocol):
    name: ClassVar[str]

    @property
    def most_load(self) -> float:
        """Share of a port up to which the load before a flow counts: more changes no turn."""
        ...

    def turn(self, state: FlowState, context: FlowContext, now: float, boundary: bool) -> Turn:
        """The flow's turn now. `boundary`: it may be promoted now, since a layer begins or the period is over."""
        ...

    def outlook(self, state: FlowState, context: FlowContext, now: float) -> TurnOutlook:
        """When its turn has to be looked at again. Turns that do so in between must come out the same."""
        ...

    def late_at(self, state: FlowState, context: FlowContext) -> float:
        """When the turn of a flow that is held changes without a boundary; infinite if it does not."""
        ...


FLOW_POLICIES: Registry[type[FlowPolicy]] = Registry("flow policy")


@FLOW_POLICIES.register("mfs")
class DeferAndPromote:
    """MFS (sec. 4.3 to 4.5): flows start low in a reverse multi-level queue and rise as their slack shrinks.

    Bands, first to last: KV transfers of level 1; reuse and collectives by relative layer index, then by the order
    between batches; KV transfers of levels 2 to K; weight loads, which always have `weights_floor` of a port, so that a
    scale-out under overload ends.

    - `levels`, `scale`, `ratio`: K, U, E of the thresholds Q_i = U x E^-i. `level_one`: the MLU above which a KV
      transfer goes before everything else (None: Q_1 as printed, 0.125; Table 1 of the paper needs 1).
    - `bytes_of`: what counts as left: `request`, all that the request still has to send over the port, layers that are
      not computed yet too; or `flow`, as printed, which is up to L times too small with a flow for each layer.
    - `load_of`: rho: `before`, what goes before the flow; or `all`, as printed, where flows promote one another.
    - `most_load`: up to which rho counts, since on a full port every flow would be infinitely urgent; 1, as printed: it
      counts whole.
    - `late`: a KV transfer that cannot be in time any more, even alone: `last`, after all that can; or `first`, as
      printed, since its MLU is above 1: under overload transfers that are late then make all others late.
    - `within`: what goes first of one relative layer index: `batch`, as printed, the first in the order between
      batches; or `least`, reuse before collectives and of it the flow with the fewest bytes left, so that of several
      instances that wait for one sender more are in time.
    - `queued`: a batch that waits for its unit has the layers ahead of it added to its relative layer index.
    - `wire`: class of relative layer index r: `shifted`, min(r + 1, K - 1), so that class 0 is level 1 alone; or
      `printed`, min(r, K - 1).

    Cost: O(1) for each flow and change.
    """

    name: ClassVar[str] = "mfs"

    @dataclass(frozen=True, slots=True)
    class Config:
        levels: int = 8
        scale: float = 0.5
        ratio: float = 4.0
        level_one: float | None = None
        bytes_of: str = "request"
        load_of: str = "before"
        most_load: float = MOST_LOAD
        late: str = "last"
        within: str = "batch"
        queued: bool = True
        wire: str = "shifted"
        weights_floor: float = 0.05

        def __post_init__(self) -> None:
            if self.levels < 2:
                raise ConfigError("levels must be at least 2", field="levels")
            if not self.scale > 0:
                raise ConfigError("scale must be positive", field="scale")
            if not self.ratio > 1:
                raise ConfigError("ratio must be above 1", field="ratio")
            if self.level_one is not None and not self.level_one >= self.scale / self.ratio**2:
                raise ConfigError("level_one must not be below the threshold of level 2", field="level_one")
            if not 0 < self.most_load <= 1:
                raise ConfigError("most_load must lie in (0, 1]", field="most_load")
            for field, value, valid in (
                ("bytes_of", self.bytes_of, ("request", "flow")),
                ("load_of", self.load_of, ("before", "all")),
                ("late", self.late, ("last", "first")),
                ("within", self.within, ("batch", "least")),
                ("wire", self.wire, ("shifted", "printed")),
            ):
                if value not in valid:
                    raise ConfigError(f"{field}: {value!r} is not one of {', '.join(valid)}", field=field)
            if not 0 <= self.weights_floor < 1:
                raise ConfigError("weights_floor must lie in [0, 1)", field="weights_floor")

        @property
        def thresholds(self) -> tuple[float, ...]:
            printed = promotion_thresholds(self.levels, self.scale, self.ratio)
            return printed if self.level_one is None else (self.level_one, *printed[1:])

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()
        self._thresholds = self.config.thresholds

    @property
    def most_load(self) -> float:
        return self.config.most_load

    def turn(self, state: FlowState, context: FlowContext, now: float, boundary: bool) -> Turn:
        flow, last = state.flow, self.config.levels - 1
        if flow.stage is FlowStage.WEIGHTS:
            return Turn((self.config.levels + 1.0,), floor=self.config.weights_floor, wire_class=last)
        if flow.stage is FlowStage.KV_TRANSFER:
            left = self._left(state, context)
            if not state.level or boundary:
                self._promote(state, context, now, left)
            infeasible = self._alone(state, context, now, left) > 1.0
            if infeasible and self.config.late == "last":
                return Turn((float(self.config.levels), 1.0, flow.deadline or 0.0), wire_class=last, infeasible=True)
            band = 0.0 if state.level == 1 else float(state.level)
            return Turn((band, 0.0, flow.deadline or 0.0), wire_class=state.level - 1, infeasible=infeasible)
        if state.rli is None or boundary:
            index = self._layer_index(flow, context)
            state.rli = index if state.rli is None else min(state.rli, index)
        wire = min(state.rli + (self.config.wire == "shifted"), last)
        if self.config.within == "batch":
            return Turn((1.0, float(state.rli), context.batch_rank(flow)), wire_class=wire)
        among = (1.0, context.batch_rank(flow)) if flow.stage is FlowStage.COLLECTIVE else (0.0, state.left)
        return Turn((1.0, float(state.rli), *among), wire_class=wire)

    def outlook(self, state: FlowState, context: FlowContext, now: float) -> TurnOutlook:
        flow = state.flow
        if flow.stage is not FlowStage.KV_TRANSFER:
            return STEADY
        # A late flow that may send counts as in time again once it could have sent the rest since it was reported.
        drifts = state.turn is not None and state.turn.infeasible and not state.held
        if state.level <= 1:
            return TurnOutlook(drifts=drifts)
        left = self._left(state, context)
        at = min(
            crossing_at(
                left, flow.deadline or 0.0, context.bandwidth(port), self._load_at(state.level, context, port),
                self._thresholds, state.level, self.config.most_load,
            )
            for port in (flow.egress, flow.ingress)
        )  # fmt: skip
        return TurnOutlook(at, math.inf if self.config.load_of == "all" else float(state.level), drifts)

    def late_at(self, state: FlowState, context: FlowContext) -> float:
        flow = state.flow
        if flow.stage is not FlowStage.KV_TRANSFER or (state.turn is not None and state.turn.infeasible):
            return math.inf
        return (flow.deadline or 0.0) - self._left(state, context) / self._slowest(flow, context)

    def _layer_index(self, flow: MsFlow, context: FlowContext) -> int:
        if flow.stage is FlowStage.COLLECTIVE:
            return 0  # the layer that runs now waits for it
        current = context.current_layer(flow)
        return relative_layer_index(flow.layer, current if self.config.queued else max(0, current))

    def _left(self, state: FlowState, context: FlowContext) -> float:
        return context.request_left(state.flow) if self.config.bytes_of == "request" else state.left

    def _load_at(self, level: int, context: FlowContext, port: str) -> float:
        """What counts as load of the port for a flow of this level."""
        if self.config.load_of == "all":
            return context.load(port)
        return context.load_before(port, float(level) if level > 1 else 0.0)

    def _promote(self, state: FlowState, context: FlowContext, now: float, left: float) -> None:
        """Raise the flow from its level (at first the lowest) as long as what goes before it leaves it too little."""
        level, flow = state.level or self.config.levels, state.flow
        time_left = (flow.deadline or 0.0) - now
        ports = [(port, context.bandwidth(port)) for port in (flow.egress, flow.ingress)]
        while level > 1:
            loads = [self._load_at(level, context, port) for port, _ in ports]
            found = level_of(
                max(
                    minimal_link_utilisation(left, time_left, bandwidth, load, self.config.most_load)
                    for (_, bandwidth), load in zip(ports, loads, strict=True)
                ),
                self._thresholds,
            )
            if found >= level:
                break
            # Without a load before it there is none before a higher level either, so that its MLU is the same there.
            level = level - 1 if any(loads) else found
        state.level = level

    def _alone(self, state: FlowState, context: FlowContext, now: float, left: float) -> float:
        """Its MLU if nothing else was on its ports now, nor has been since its bytes were reported."""
        slowest = self._slowest(state.flow, context)
        if not state.held:
            left -= slowest * max(0.0, now - state.at)
        return minimal_link_utilisation(left, (state.flow.deadline or 0.0) - now, slowest, 0.0)

    def _slowest(self, flow: MsFlow, context: FlowContext) -> float:
        """Bandwidth of the slower one of its ports."""
        return min(context.bandwidth(flow.egress), context.bandwidth(flow.ingress))


class Unchanging:
    """A baseline's turn changes only with events."""

    most_load: ClassVar[float] = 1.0

    @dataclass(frozen=True, slots=True)
    class Config:
        """Nothing to set."""

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()

    def outlook(self, state: FlowState, context: FlowContext, now: float) -> TurnOutlook:
        return STEADY

    def late_at(self, state: FlowState, context: FlowContext) -> float:
        return math.inf


@FLOW_POLICIES.register("fair_sharing")
class FairSharing(Unchanging):
    """Max-min fair sharing of every port among all flows."""

    name: ClassVar[str] = "fair_sharing"

    def turn(self, state: FlowState, context: FlowContext, now: float, boundary: bool) -> Turn:
        return Turn((0.0,))


@FLOW_POLICIES.register("shortest_first")
class ShortestFirst(Unchanging):
    """SJF: strictly the flow with the fewest bytes first."""

    name: ClassVar[str] = "shortest_first"

    def turn(self, state: FlowState, context: FlowContext, now: float, boundary: bool) -> Turn:
        return Turn((0.0, state.flow.size_bytes))


@FLOW_POLICIES.register("earliest_deadline")
class EarliestDeadline(Unchanging):
    """EDF: flows with an explicit deadline by it, then all others with equal shares."""

    name: ClassVar[str] = "earliest_deadline"

    def turn(self, state: FlowState, context: FlowContext, now: float, boundary: bool) -> Turn:
        deadline = state.flow.deadline
        return Turn((1.0,)) if deadline is None else Turn((0.0, deadline))


@FLOW_POLICIES.register("karuna")
class Karuna(Unchanging):
    """Karuna (SIGCOMM 2016) as the paper describes it: an explicit deadline gets the least rate that keeps it and no
    more, and the rest of the link goes to all others, the fewest bytes first. A flow that is late is one of those."""

    name: ClassVar[str] = "karuna"

    def turn(self, state: FlowState, context: FlowContext, now: float, boundary: bool) -> Turn:
        flow = state.flow
        if flow.deadline is None or flow.deadline <= now:
            return Turn((1.0, flow.size_bytes))
        needed = state.left / (flow.deadline - now)
        if state.turn is not None and state.turn.cap is not None and math.isclose(needed, state.turn.cap, rel_tol=1e-9):
            return state.turn  # what it had was enough
        return Turn((0.0,), cap=needed)

    def outlook(self, state: FlowState, context: FlowContext, now: float) -> TurnOutlook:
        """The least rate of a flow that is slower, or faster, than that is another at each boundary."""
        deadline = state.flow.deadline
        return TurnOutlook(deadline, drifts=True) if deadline is not None and deadline > now else STEADY
