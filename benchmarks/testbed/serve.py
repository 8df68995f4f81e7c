"""Prefills on the testbed: the simulator's own run (`PrefillRun`), over real links in place of its network.

Batches, routing, order of layers and sizes of flows are the same objects as in the simulator, so that both are compared
with nothing but the network exchanged. Computing is a timer. A layer's exchange goes from each rank to each other one.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from benchmarks.testbed.transport import Transport
from controller.core.errors import SlacklineError
from controller.flow.flows import FlowStage, MsFlow
from controller.flow.policies import FlowPolicy
from controller.flow.scheduler import BatchComputed, BatchQueued, FlowEvent, LayerStarted
from controller.simulator.flows.prefill import PrefillRequest, PrefillRun, PrefillSettings, ServedPrefill, _Batch
from workers.flowd.client import Flow, FlowClient

WAKE_S = 1.0  # at least so often it is looked whether something is due


class LinkedRunError(SlacklineError):
    """A run cannot be completed."""


class PairwiseRun(PrefillRun):
    """Each rank sends every other one its tokens for the experts there (dispatch) and answers theirs (combine). What a
    daemon is not told, hosts do not hear: the batches that wait for their unit."""

    def _exchange(self, batch: _Batch) -> None:
        shape, unit, layer = self.shape, f"p{batch.instance}", batch.group
        ids = tuple(each.request.id for each in batch.requests)
        self._exchange_began[batch.id] = self.now
        # Of a pair that shares no server; `collective_bytes` has the remote share of what goes to all ranks.
        apart = shape.ranks - 1
        flows = []
        for source in range(shape.ranks):
            for target in range(shape.ranks):
                own, others = batch.tokens[source], batch.tokens[target]
                size = round(shape.collective_bytes(own, others) / apart) if source != target else 0
                if size > 0:
                    out, into = f"{unit}.{source}.out", f"{unit}.{target}.in"
                    name = f"{batch.id}.c{layer}.{source}.{target}"
                    flows.append(MsFlow(name, FlowStage.COLLECTIVE, size, out, into, unit, batch.id, ids, layer))
        batch.collectives = len(flows)
        for flow in flows:
            self.network.submit(flow)
        if not flows:
            self._group_done(batch)

    def _tell(self, instance: int, events: Sequence[FlowEvent]) -> None:
        super()._tell(instance, [event for event in events if not isinstance(event, BatchQueued)])

    def _tell_queue(self, instance: int, host: str) -> None:
        for batch in self._queues[instance]:
            batch.hosts.add(host)
        first = self._queues[instance][0]
        if first.group >= 0:
            self.network.tell(host, [LayerStarted(f"p{instance}", first.id, first.group)])


class LinkNetwork:
    """Flows over a transport, scheduled by the daemons of their senders. `clients`: by host and unit; without any,
    nothing is scheduled. `apart`: the fabric of collectives."""

    def __init__(self, transport: Transport, clients: Mapping[tuple[str, str], FlowClient], apart: int = 0) -> None:
        self._transport = transport
        self._clients = clients
        self._apart = apart
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._ended: list[MsFlow] = []
        self._failed: BaseException | None = None
        self._changed = asyncio.Event()
        self._going: set[asyncio.Task[None]] = set()
        self._deadlines: dict[str, float] = {}
        self.late_s: list[float] = []  # how long after its time each timer ran
        self.unscheduled: dict[str, int] = {}  # flows by why they were not scheduled to their end
        self.promotions = 0
        self.held_s = 0.0

    @property
    def now(self) -> float:
        return self._loop.time() - self._began

    def hosts(self) -> Sequence[str]:
        return sorted({host for host, _ in self._clients})

    def next_event(self) -> float:
        return math.inf

    def advance(self, to: float) -> Sequence[MsFlow]:
        """The flows that have ended since the last call. Raises LinkedRunError if one failed."""
        if self._failed is not None:
            raise LinkedRunError(f"a transfer failed: {self._failed!r}") from self._failed
        ended, self._ended = self._ended, []
        return ended

    def submit(self, flow: MsFlow, path: Sequence[str] | None = None) -> None:
        task = self._loop.create_task(self._carry(flow, self._schedule(flow)))
        self._going.add(task)
        task.add_done_callback(self._over)

    def submit_all(self, flows: Sequence[tuple[MsFlow, Sequence[str] | None]]) -> None:
        for flow, path in flows:
            self.submit(flow, path)

    def tell(self, host: str, events: Sequence[FlowEvent]) -> None:
        for event in events:
            if isinstance(event, LayerStarted | BatchComputed):
                client = self._clients.get((_host(host), event.unit))
                if client is None:
                    continue
                if isinstance(event, LayerStarted):
                    client.layer(event.batch, event.layer)
                else:
                    client.computed(event.batch)

    async def until(self, at: float) -> None:
        """Return when a flow has ended, or at this time."""
        self._changed.clear()
        if self._ended or self._failed is not None or self.now >= at:
            return
        timer = self._loop.call_at(self._began + min(at, self.now + WAKE_S), self._changed.set)
        try:
            await self._changed.wait()
        finally:
            timer.cancel()

    async def close(self) -> None:
        for task in self._going:
            task.cancel()
        await asyncio.gather(*self._going, return_exceptions=True)

    def _schedule(self, flow: MsFlow) -> Flow | None:
        client = self._clients.get((_host(flow.egress), flow.unit))
        if client is None:
            return None
        due_in_s = None if flow.deadline is None else flow.deadline - self.now
        request = flow.requests[0] if flow.stage is not FlowStage.COLLECTIVE else ""
        return client.submit(
            flow.stage, round(flow.size_bytes), _host(flow.ingress), due_in_s, request, flow.batch,
            unit=flow.unit, layer=flow.layer, later=flow.later_bytes,
        )  # fmt: skip

    async def _carry(self, flow: MsFlow, schedule: Flow | None) -> None:
        fabric = self._apart if flow.stage is FlowStage.COLLECTIVE else 0
        source, target = _host(flow.egress), _host(flow.ingress)
        await self._transport.send(source, target, max(1, round(flow.size_bytes)), schedule, fabric)
        if schedule is not None:
            self.promotions += schedule.promotions
            self.held_s += schedule.held_s
            if not schedule.scheduled:
                self.unscheduled[schedule.reason] = self.unscheduled.get(schedule.reason, 0) + 1
        self._ended.append(flow)
        self._changed.set()

    def _over(self, task: asyncio.Task[None]) -> None:
        self._going.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed = self._failed or error
            self._changed.set()


class LinkedRun(PairwiseRun):
    """A run in real time."""

    def __init__(self, settings: PrefillSettings, network: LinkNetwork, policy: Callable[[], FlowPolicy]) -> None:
        super().__init__(settings, policy)
        self.network: LinkNetwork = network

    async def serve_real(self, requests: Sequence[PrefillRequest], within_s: float) -> dict[str, ServedPrefill]:
        """Raises LinkedRunError if a flow fails or it takes longer than `within_s`."""
        for request in requests:
            self._at(request.at, partial(self._arrive, request))
        while len(self._served) < len(requests):
            if self.now > within_s:
                left = len(requests) - len(self._served)
                raise LinkedRunError(f"{left} of {len(requests)} requests did not end within {within_s:.0f} s")
            for flow in self.network.advance(self.now):
                self._flow_ended(flow)
            while self._timers and self._timers[0][0] <= self.now:
                at, _, action = heapq.heappop(self._timers)
                self.network.late_s.append(self.now - at)
                action()
            if len(self._served) < len(requests):
                await self.network.until(self._timers[0][0] if self._timers else math.inf)
        return self._served


def _host(port: str) -> str:
    """The host of a port such as `p0.1.out`."""
    return port.rsplit(".", 1)[0]


def host_names(settings: PrefillSettings) -> list[str]:
    """Of prefill and decode, one for each rank."""
    return [
        f"{kind}{number}.{rank}"
        for kind in "pd"
        for number in range(settings.instances)
        for rank in range(settings.shape.ranks)
    ]
