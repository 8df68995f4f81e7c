"""Prefill instances on a network: batches computed layer by layer, reuse, collectives and KV transfers as flows.

Virtual time, exact events. A batch's layer group starts when its reuse has come and the group before is done, computes,
exchanges activations, and then sends the KV of its requests on to their decode instances. A request's first token is
there when all of its KV has arrived. Groups of a request's reuse are fetched in order, under every policy.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

from controller.core.errors import ConfigError
from controller.core.noise import standard_normal
from controller.flow.batches import Batch, BatchOrder, BatchRequest, order_batches
from controller.flow.flows import FlowStage, MsFlow
from controller.flow.policies import FlowPolicy
from controller.flow.scheduler import (
    BatchComputed,
    BatchQueued,
    FlowEvent,
    FlowSchedulerConfig,
    LayerStarted,
    OrderSent,
)
from controller.simulator.flows.cluster import PrefillShape
from controller.simulator.flows.experts import ExpertSettings, SimulatedExperts
from controller.simulator.flows.fabric import FatTree
from controller.simulator.flows.run import FlowRun


class PrefillRequest(NamedTuple):
    """`reuse_tokens` of the prompt belong to the prefix `prefix`, whose KV lies where it was computed or fetched."""

    id: str
    at: float
    prompt_tokens: int
    reuse_tokens: int
    prefix: str
    due_s: float = math.inf  # after arrival


class ServedPrefill(NamedTuple):
    """`computed`: when its last layer was computed. Seconds after the start of the run, `ttft_s` after its arrival."""

    ttft_s: float
    computed: float
    pruned: bool


@dataclass(frozen=True, slots=True)
class PrefillSettings:
    """- `instances`: of prefill, and as many of decode. `target`: TTFT target over the request's own at low load.
    - `order_s`: how long the coordinator's order is on its way; `orders_per_s`: how often it makes one at most.
    - `budget`: share of the requests in the system that may be pruned; 0 prunes nothing. `ordered`: batches are
      ordered at all. `in_vain`: as printed, also for batches that stay too late (`order_batches`).
    - `copies`: KV that was fetched is from then on offered by the fetching instance too; else a prefix stays where it
      was computed first, and all who reuse it fetch it from there.
    - `leaf_servers`: servers on one leaf switch of a 1:1 fat tree, over which reuse and KV transfers take one path each
      (`fabric.FatTree`); 0: traffic is spread so evenly that only hosts' ports can be full. Collectives, which go to
      many hosts at once, are always spread. A rank's port and a link between switches are equally wide.
    - `by_class`: what is not a sender's own port orders flows by the class of their packets alone; else each port by
      their ranks, as no switch can.
    - `load_error`: standard deviation of the factor, lognormal with mean 1, by which the order's load of a port by a
      request is wrong, whatever the reason. One draw for each port and request, by `seed`; what is sent is not
      changed.
    - `experts`: how unequally tokens go to the ranks that hold experts, by draws of `seed`, and whether orders learn it
      (MFS app. B). Targets are those of even shares.
    """

    shape: PrefillShape
    instances: int
    target: float = 3.0
    order_s: float = 0.005
    orders_per_s: float = 20.0
    budget: float = 0.05
    ordered: bool = True
    in_vain: bool = True
    period_s: float = 0.005
    report_s: float = 0.005
    copies: bool = True
    leaf_servers: int = 0
    by_class: bool = False
    load_error: float = 0.0
    experts: ExpertSettings = field(default_factory=ExpertSettings)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.instances < 1:
            raise ConfigError("instances must be at least 1", field="instances")
        if not self.target > 0:
            raise ConfigError("target must be positive", field="target")
        if not 0 <= self.budget <= 1:
            raise ConfigError("budget must lie in [0, 1]", field="budget")
        if not self.orders_per_s > 0:
            raise ConfigError("orders_per_s must be positive", field="orders_per_s")
        if self.leaf_servers < 0:
            raise ConfigError("leaf_servers must not be negative", field="leaf_servers")
        if not 0 <= self.load_error < math.inf:
            raise ConfigError("load_error must be finite and not negative", field="load_error")
        if self.experts.uneven and not self.shape.model.experts_per_token:
            raise ConfigError(f"{self.shape.model.name} has no experts", field="experts")


def alone_s(shape: PrefillShape, request: PrefillRequest, remote: bool = True) -> float:
    """The request's TTFT on an idle cluster, its reuse fetched over the network if `remote`."""
    new = request.prompt_tokens - request.reuse_tokens
    port = shape.port_bytes_per_s
    fetch = shape.kv_bytes(request.reuse_tokens) / port if remote else 0.0
    compute = shape.dense_s(new, request.prompt_tokens) + shape.experts_s(new)
    collective = shape.collective_bytes(new, new / shape.ranks) / port
    send = shape.kv_bytes(request.prompt_tokens) / port
    fetched = computed = sent = 0.0
    for _ in range(shape.groups):
        fetched += fetch
        computed = max(computed, fetched) + compute + collective
        sent = max(sent, computed) + send
    return sent


@dataclass(slots=True)
class _Request:
    request: PrefillRequest
    rank: int
    due: float
    fetched: int = 0  # groups whose reuse has come
    source: str = ""  # the port its reuse comes from; empty: it is here
    holder: tuple[int, int] = (0, 0)  # the instance and rank behind that port
    target: str = ""  # the decode instance's port
    unsent: int = 0  # KV flows that have not ended
    computed_at: float = math.inf

    @property
    def new_tokens(self) -> int:
        return self.request.prompt_tokens - self.request.reuse_tokens


@dataclass(slots=True)
class _Batch:
    id: str
    instance: int
    requests: list[_Request] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)  # new ones by rank
    group: int = -1  # computed now; -1: it waits for its instance
    busy: bool = False  # a group computes or exchanges
    collectives: int = 0  # flows of the running exchange
    hosts: set[str] = field(default_factory=set)  # of other instances, that were told of it
    aside: bool = False  # of a request that was pruned: computed when no other batch waits and its reuse has come

    @property
    def begun(self) -> bool:
        return self.busy or self.group > 0


class PrefillNetwork(Protocol):
    """What a run sends its flows over: `FlowRun`, or a network that is not simulated."""

    @property
    def now(self) -> float:
        """Seconds since the run began."""
        ...

    def submit(self, flow: MsFlow, path: Sequence[str] | None = None) -> None: ...

    def submit_all(self, flows: Sequence[tuple[MsFlow, Sequence[str] | None]]) -> None:
        """Flows of one host, with their paths."""
        ...

    def tell(self, host: str, events: Sequence[FlowEvent]) -> None: ...

    def hosts(self) -> Sequence[str]:
        """Those that schedule flows, by their egress ports."""
        ...

    def next_event(self) -> float: ...

    def advance(self, to: float) -> Sequence[MsFlow]: ...


class PrefillRun:
    """One run. `serve` returns what became of every request."""

    def __init__(self, settings: PrefillSettings, policy: Callable[[], FlowPolicy]) -> None:
        self.settings = settings
        self.shape = settings.shape
        hosts = [
            f"{kind}{number}.{rank}"
            for kind in ("p", "d")
            for number in range(settings.instances)
            for rank in range(self.shape.ranks)
        ]
        ports = {f"{host}.{side}": self.shape.port_bytes_per_s for host in hosts for side in ("out", "in")}
        self._experts: SimulatedExperts | None = None
        if settings.experts.uneven:
            self._experts = SimulatedExperts(self.shape, settings.experts, settings.seed)
        self._tree: FatTree | None = None
        if settings.leaf_servers:
            per_leaf = max(1, settings.leaf_servers * self.shape.gpus_per_server // self.shape.rank_gpus)
            self._tree = FatTree(hosts, per_leaf, self.shape.port_bytes_per_s)
            ports |= self._tree.links
        config = FlowSchedulerConfig(settings.period_s)
        self.network: PrefillNetwork = FlowRun(ports, policy, config, settings.report_s, settings.by_class)
        self.collective_s: list[float] = []  # duration of each exchange
        self.on_order: Callable[[Sequence[Batch], BatchOrder], None] = lambda batches, order: None
        self._served: dict[str, ServedPrefill] = {}
        self._queues: list[list[_Batch]] = [[] for _ in range(settings.instances)]
        self._batches: dict[str, _Batch] = {}
        self._requests: dict[str, _Request] = {}
        self._batch_of: dict[str, _Batch] = {}  # by request
        # By prefix: the instances and ranks that have its KV, and how many fetch it from each.
        self._holders: dict[str, dict[tuple[int, int], int]] = {}
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._decode = itertools.count()
        self._exchange_began: dict[str, float] = {}
        self._pruned: set[str] = set()
        self._load_factors: dict[tuple[str, str], float] = {}  # by request and port
        self._sequence = 0
        self._ordered_at = -math.inf
        self._order_waits = False

    @property
    def now(self) -> float:
        return self.network.now

    def serve(self, requests: Sequence[PrefillRequest]) -> dict[str, ServedPrefill]:
        """Raises RuntimeError if something never ends."""
        for request in requests:
            self._at(request.at, partial(self._arrive, request))
        while len(self._served) < len(requests):
            at = min(self.network.next_event(), self._timers[0][0] if self._timers else math.inf)
            if at == math.inf:
                raise RuntimeError(f"{len(requests) - len(self._served)} requests do not end")
            for flow in self.network.advance(at):
                self._flow_ended(flow)
            while self._timers and self._timers[0][0] <= at:
                heapq.heappop(self._timers)[2]()
        return self._served

    def _at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (when, next(self._count), action))

    # ---- arrivals ---------------------------------------------------------------------------------------------------

    def _arrive(self, request: PrefillRequest) -> None:
        instance = self._route(request)
        batch = self._open_batch(instance, request)
        rank = self._rank(batch, request)
        due = request.at + min(request.due_s, self.settings.target * alone_s(self.shape, request))
        each = _Request(request, rank, due, fetched=self.shape.groups)
        each.target = f"d{next(self._decode) % self.settings.instances}.{rank}.in"
        holders = self._holders.setdefault(request.prefix, {})
        if request.reuse_tokens and holders and (instance, rank) not in holders:
            source = min(holders, key=lambda holder: (holders[holder], holder))
            holders[source] += 1
            each.source, each.fetched, each.holder = f"p{source[0]}.{source[1]}.out", 0, source
        if self.settings.copies or not holders:
            holders.setdefault((instance, rank), 0)
        self._requests[request.id] = each
        self._join(batch, each)
        if each.source:
            self._tell_queue(instance, each.source)
        self._fetch(batch, each)
        self._start_next(instance)
        self._order_soon()

    def _join(self, batch: _Batch, each: _Request) -> None:
        batch.requests.append(each)
        batch.tokens[each.rank] += each.new_tokens
        self._batch_of[each.request.id] = batch

    def _rank(self, batch: _Batch, request: PrefillRequest) -> int:
        """The rank with the fewest tokens in the batch, one that has the prefix before others."""
        holders = self._holders.get(request.prefix, {})
        return min(
            range(self.shape.ranks), key=lambda rank: (batch.tokens[rank], (batch.instance, rank) not in holders)
        )

    def _route(self, request: PrefillRequest) -> int:
        """The instance with the least to do, tokens that it need not compute or fetch taken off (KV-aware routing)."""
        having = {instance for instance, _ in self._holders.get(request.prefix, {})}

        def cost(instance: int) -> tuple[float, int]:
            waiting = sum(max(batch.tokens) for batch in self._queues[instance] if not batch.aside)  # its slowest rank
            here = request.reuse_tokens if instance in having else 0
            return waiting - here, (instance + len(self._requests)) % self.settings.instances

        return min(range(self.settings.instances), key=cost)

    def _open_batch(self, instance: int, request: PrefillRequest) -> _Batch:
        """The last batch that waits there and has room, or a new one."""
        regular = [batch for batch in self._queues[instance] if not batch.aside]
        new = request.prompt_tokens - request.reuse_tokens
        if regular and regular[-1].group < 0:
            last = regular[-1]
            room = self.shape.batch_tokens - min(last.tokens)
            if new <= room or not last.requests:
                return last
        batch = self._new_batch(instance)
        self._enqueue(batch)
        return batch

    def _new_batch(self, instance: int) -> _Batch:
        batch = _Batch(f"b{next(self._count)}", instance, tokens=[0.0] * self.shape.ranks)
        batch.hosts.update(*(each.hosts for each in self._queues[instance]))
        self._batches[batch.id] = batch
        return batch

    def _enqueue(self, batch: _Batch) -> None:
        """Behind what runs and waits, before what was set aside. Hosts hear of that again, behind this one, else they
        would take it for so many layers ahead."""
        queue = self._queues[batch.instance]
        place = sum(each.begun or not each.aside for each in queue)
        queue.insert(place, batch)
        self._tell(batch.instance, [self._queued(each) for each in queue[place:]])

    def _queued(self, batch: _Batch) -> BatchQueued:
        return BatchQueued(f"p{batch.instance}", batch.id, self.shape.groups)

    def _tell(self, instance: int, events: Sequence[FlowEvent]) -> None:
        """Events of a unit go to its own hosts, and to every other that heard of a batch that is not computed yet."""
        hosts = {f"p{instance}.{rank}.out" for rank in range(self.shape.ranks)}
        for host in sorted(hosts.union(*(batch.hosts for batch in self._queues[instance]))):
            self.network.tell(host, events)

    def _tell_queue(self, instance: int, host: str) -> None:
        """A host that begins to send for a unit hears of its batches in order: how many layers are computed before the
        one that it sends for depends on all of them."""
        queue, unit = self._queues[instance], f"p{instance}"
        events: list[FlowEvent] = [self._queued(batch) for batch in queue]
        for batch in queue:
            batch.hosts.add(host)
        if queue[0].group >= 0:
            events.append(LayerStarted(unit, queue[0].id, queue[0].group))
        self.network.tell(host, events)

    # ---- computing --------------------------------------------------------------------------------------------------

    def _start_next(self, instance: int) -> None:
        queue = self._queues[instance]
        if not queue or queue[0].group >= 0:
            return
        ready = (each for each in queue if not each.aside or self._fetched(each))
        batch = next(ready, None)
        if batch is not None and batch.requests:
            queue.remove(batch)
            queue.insert(0, batch)
            if self._experts is not None:
                self._experts.begin(batch.id, self.now)
            self._reach(batch, 0)

    def _fetched(self, batch: _Batch) -> bool:
        """Whether all reuse of all of its layers has come."""
        return all(each.fetched >= self.shape.groups for each in batch.requests)

    def _reach(self, batch: _Batch, group: int) -> None:
        """The batch's next group is this one. Hosts hear of it now, also if its reuse has not come: what the batch
        waits for has to go before what other batches need later (L_curr of MFS' app. A.1)."""
        batch.group = group
        self._tell(batch.instance, [LayerStarted(f"p{batch.instance}", batch.id, group)])
        self._advance_batch(batch)

    def _advance_batch(self, batch: _Batch) -> None:
        """Compute the batch's group if it is not busy and all reuse of the group has come."""
        if batch.busy or batch.group < 0 or any(each.fetched <= batch.group for each in batch.requests):
            return
        batch.busy = True
        work = [0.0] * self.shape.ranks
        for each in batch.requests:
            work[each.rank] += self.shape.dense_s(each.new_tokens, each.request.prompt_tokens)
        slowest = self._experts.slowest(batch.id, batch.group) if self._experts is not None else 1.0
        seconds = max(work) + slowest * self.shape.experts_s(sum(batch.tokens))  # an exchange waits for that rank
        self._at(self.now + seconds, lambda: self._exchange(batch))

    def _exchanged(self, batch: _Batch) -> list[float]:
        """What each rank sends, and receives, in the exchange of the batch's group."""
        if self._experts is None:
            mean = sum(batch.tokens) / self.shape.ranks
            return [self.shape.collective_bytes(own, mean) for own in batch.tokens]
        routed = self._experts.sent(batch.id, batch.group, batch.tokens)
        return [self.shape.gathered_bytes(own) + size for own, size in zip(batch.tokens, routed, strict=True)]

    def _exchange(self, batch: _Batch) -> None:
        unit, layer = f"p{batch.instance}", batch.group
        ids, singles = tuple(each.request.id for each in batch.requests), self.shape.collective_flows
        for rank, size in enumerate(self._exchanged(batch)):
            if size <= 0:
                continue
            out, into = f"{unit}.{rank}.out", f"{unit}.{rank}.in"
            flows: list[tuple[MsFlow, Sequence[str]]] = []
            for side, port in (("out", out), ("in", into)):
                name = f"{batch.id}.c{layer}.{rank}.{side}"
                flow = MsFlow(
                    name, FlowStage.COLLECTIVE, size, out, into, unit, batch.id, ids, layer, singles=singles
                )  # fmt: skip
                flows.append((flow, (port,)))
            batch.collectives += len(flows)
            self.network.submit_all(flows)
        self._exchange_began[batch.id] = self.now
        if not batch.collectives:
            self._group_done(batch)

    def _group_done(self, batch: _Batch) -> None:
        self.collective_s.append(self.now - self._exchange_began.pop(batch.id))
        for each in batch.requests:
            self._send_kv(batch, each)
        batch.busy = False
        if batch.group + 1 < self.shape.groups:
            self._reach(batch, batch.group + 1)
            return
        batch.group += 1
        if self._experts is not None:
            self._experts.end(batch.id, sum(batch.tokens))
        for each in batch.requests:
            each.computed_at = self.now
            self._maybe_served(each)
        self._tell(batch.instance, [BatchComputed(f"p{batch.instance}", batch.id)])
        self._queues[batch.instance].remove(batch)
        del self._batches[batch.id]
        self._start_next(batch.instance)
        self._order_soon()

    # ---- flows ------------------------------------------------------------------------------------------------------

    def _fetch(self, batch: _Batch, each: _Request) -> None:
        """Ask for the next group of the request's reuse."""
        if each.fetched >= self.shape.groups:
            return
        request, unit = each.request, f"p{batch.instance}"
        size = self.shape.kv_bytes(request.reuse_tokens)
        into = f"{unit}.{each.rank}.in"
        name = f"{request.id}.r{each.fetched}"
        self._send(MsFlow(name, FlowStage.REUSE, size, each.source, into, unit, batch.id, (request.id,), each.fetched))

    def _send_kv(self, batch: _Batch, each: _Request) -> None:
        request = each.request
        size = self.shape.kv_bytes(request.prompt_tokens)
        later = size * (self.shape.groups - 1 - batch.group)
        each.unsent += 1
        self._send(
            MsFlow(
                f"{request.id}.k{batch.group}", FlowStage.KV_TRANSFER, size, f"p{batch.instance}.{each.rank}.out",
                each.target, f"p{batch.instance}", batch.id, (request.id,), batch.group, each.due, later,
            )
        )  # fmt: skip

    def _send(self, flow: MsFlow) -> None:
        self.network.submit(flow, self._tree.path(flow) if self._tree is not None else None)

    def _flow_ended(self, flow: MsFlow) -> None:
        if flow.stage is FlowStage.COLLECTIVE:
            batch = self._batches[flow.batch]
            batch.collectives -= 1
            if not batch.collectives:
                self._group_done(batch)
            return
        each = self._requests[flow.requests[0]]
        if flow.stage is FlowStage.REUSE:
            each.fetched += 1
            if each.fetched == self.shape.groups:
                self._holders[each.request.prefix][each.holder] -= 1
            batch = self._batch_of[each.request.id]
            self._fetch(batch, each)
            self._advance_batch(batch)
            if batch.aside:
                self._start_next(batch.instance)
        else:
            each.unsent -= 1
            self._maybe_served(each)

    def _maybe_served(self, each: _Request) -> None:
        if each.unsent == 0 and each.computed_at <= self.now:
            request = each.request
            pruned = request.id in self._pruned
            self._served[request.id] = ServedPrefill(self.now - request.at, each.computed_at, pruned)

    # ---- the order between batches ----------------------------------------------------------------------------------

    def _order_soon(self) -> None:
        if not self.settings.ordered or self._order_waits:
            return
        self._order_waits = True
        self._at(max(self.now, self._ordered_at + 1.0 / self.settings.orders_per_s), self._order)

    def _order(self) -> None:
        """Order on what is known now; it reaches the hosts `order_s` later."""
        self._order_waits, self._ordered_at = False, self.now
        batches = [self._as_batch(batch) for batch in self._batches.values() if batch.requests]
        if not batches:
            return
        bandwidth = {name: self.shape.port_bytes_per_s for batch in batches for r in batch.requests for name in r.load}
        budget = int(self.settings.budget * sum(len(batch.requests) for batch in batches))
        found = order_batches(batches, bandwidth, budget, self.now, in_vain=self.settings.in_vain)
        self.on_order(batches, found)
        self._pruned |= found.scavengers
        self._sequence += 1
        order = OrderSent(self._sequence, found.order, found.scavengers, self.now + 1.0)
        self._at(self.now + self.settings.order_s, lambda: self._publish(order))

    def _publish(self, order: OrderSent) -> None:
        for batch in list(self._batches.values()):
            if batch.begun:
                continue
            if not batch.aside:
                self._set_aside(batch, [each for each in batch.requests if each.request.id in order.scavengers])
            elif not any(each.request.id in order.scavengers for each in batch.requests):
                batch.aside = False
                self._queues[batch.instance].remove(batch)
                self._enqueue(batch)
                self._start_next(batch.instance)
        for host in self.network.hosts():
            self.network.tell(host, [order])

    def _set_aside(self, batch: _Batch, pruned: Sequence[_Request]) -> None:
        """Pruned requests leave a batch that has not begun. The others go on without them, else all would wait for
        what is sent last."""
        if not pruned:
            return
        queue = self._queues[batch.instance]
        for each in pruned:
            batch.requests.remove(each)
            batch.tokens[each.rank] -= each.new_tokens
            alone = self._new_batch(batch.instance)
            alone.aside = True
            self._join(alone, each)
            queue.append(alone)
            self._tell(batch.instance, [self._queued(alone)])
        if batch.requests:
            self._advance_batch(batch)
            return
        self._tell(batch.instance, [BatchComputed(f"p{batch.instance}", batch.id)])
        queue.remove(batch)
        del self._batches[batch.id]
        self._start_next(batch.instance)

    def _as_batch(self, batch: _Batch) -> Batch:
        """What is left of a batch: computing of the groups to come, and bytes by port and request, as far as they are
        known (`load_error`, `experts`)."""
        groups = range(max(0, batch.group), self.shape.groups)
        left = len(groups)
        busiest = max(batch.tokens)
        context = max(each.request.prompt_tokens for each in batch.requests)
        requests = []
        for each in batch.requests:
            out, into = f"p{batch.instance}.{each.rank}.out", f"p{batch.instance}.{each.rank}.in"
            load = self._expected_exchanges(batch, each, groups)
            load[out] += self.shape.kv_bytes(each.request.prompt_tokens) * left
            if each.source and each.fetched < self.shape.groups:
                fetch = self.shape.kv_bytes(each.request.reuse_tokens) * (self.shape.groups - each.fetched)
                load[into] += fetch
                load[each.source] = load.get(each.source, 0.0) + fetch
            load = {port: size * self._load_factor(each.request.id, port) for port, size in load.items()}
            held = batch.begun and each.fetched < self.shape.groups  # pruned, its reuse would hold up the others
            requests.append(BatchRequest(each.request.id, each.due, load, exempt=held))
        slowest = self._experts.expected_slowest(groups) if self._experts is not None else 1.0
        compute = (self.shape.dense_s(busiest, context) + slowest * self.shape.experts_s(sum(batch.tokens))) * left
        return Batch(batch.id, f"p{batch.instance}", compute, requests)

    def _expected_exchanges(self, batch: _Batch, each: _Request, groups: range) -> dict[str, float]:
        """Bytes by port that a request adds to the exchanges of these groups. With even shares a rank's answers to
        others count as those of its own requests, else they are of the requests whose tokens come to it."""
        own = each.new_tokens
        if self._experts is None:
            mean = sum(batch.tokens) / self.shape.ranks
            size = self.shape.collective_bytes(own, own * mean / max(1.0, batch.tokens[each.rank]))
            by_rank = {each.rank: size * len(groups)}
        else:
            by_rank = {each.rank: 0.0, **self._experts.expected_loads(each.rank, own, groups)}
            by_rank[each.rank] += self.shape.gathered_bytes(own) * len(groups)
        return {f"p{batch.instance}.{rank}.{side}": size for rank, size in by_rank.items() for side in ("out", "in")}

    def _load_factor(self, request: str, port: str) -> float:
        """Drawn by names and not in turn, so that it is the same under every policy."""
        if not self.settings.load_error:
            return 1.0
        key = request, port
        if key not in self._load_factors:
            variance = math.log1p(self.settings.load_error**2)  # of the factor's logarithm
            normal = standard_normal(f"{request} {port}", self.settings.seed)
            self._load_factors[key] = math.exp(math.sqrt(variance) * normal - variance / 2)
        return self._load_factors[key]
