"""The coordinator: which waiting requests are served last, so that the others are in time (MFS sec. 4.4.2, App. B).

A batch is what an instance prefills next, and the same algorithm (`batches.order_batches`) is used for two things that
hold it up. One is computing: its ports are the instance's prefill time and its sequence slots. The other are links: the
port through which KV leaves the host of an instance that does not decode, and the one through which it comes to the
host of one that does. Requests whose KV is still to leave load them too. Each port is looked at by itself, the one with
the most seconds first.

It sees the queues of all gateways and keeps nothing between two decisions, so a request that was pruned comes back as
soon as there is room for it. For computing, where requests wait at one gateway alone, it prunes nothing: that gateway's
dispatcher sees the whole queue and more of its instances, and defers better by itself. No dispatcher counts links.
"""

from __future__ import annotations

import heapq
import itertools
import math
import operator
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import NamedTuple

from controller.core.errors import ConfigError
from controller.core.pruning import (
    KvPort,
    ModelQueue,
    OpenKv,
    PrefillUnit,
    PruneReason,
    QueueReport,
    WaitingPrefill,
)
from controller.flow.batches import Batch, BatchRequest, loose_deadlines, order_batches
from controller.flow.feasibility import RankedBatches, prune

LINK = "link"
PERIODS = 3  # how old a report may be
MOST_ORDERED = 1_000  # requests whose order is sent
LEAST_GATEWAYS = 2  # at which requests for a model wait, to prune for computing


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """`drop_budget`: largest share of an instance's waiting requests that is pruned at a time; 0 prunes nothing.
    `period_s`: how often gateways report at least; older reports than three of them do not count. `trust`: share of the
    predicted rates that is counted on; an instance that only prefills is counted on whole. `batch_tokens`: prompt
    tokens that an instance computes in one step."""

    drop_budget: float = 0.0
    period_s: float = 1.0
    trust: float = 0.65
    batch_tokens: int = 2048

    def __post_init__(self) -> None:
        if not 0 <= self.drop_budget <= 1:
            raise ConfigError("drop_budget must lie in [0, 1]", field="drop_budget")
        if not (math.isfinite(self.period_s) and self.period_s > 0):
            raise ConfigError("period_s must be a number of seconds above 0", field="period_s")
        if not 0 < self.trust <= 1:
            raise ConfigError("trust must lie in (0, 1]", field="trust")
        if self.batch_tokens < 1:
            raise ConfigError("batch_tokens must be at least 1", field="batch_tokens")


class Coordinated(NamedTuple):
    """`scavengers`: requests to serve last. `waiting`, `batches`: how many were ordered. `gateways`: whose. `order`: of
    other requests that are at a prefill instance, the first to send first; at most `MOST_ORDERED`."""

    scavengers: Mapping[str, PruneReason]
    waiting: int
    batches: int
    gateways: Sequence[str]
    order: Sequence[str] = ()


class Coordinator:
    """Decides from the newest reports alone."""

    def __init__(self, config: CoordinatorConfig | None = None) -> None:
        self.config = config or CoordinatorConfig()

    def decide(
        self, reports: Iterable[QueueReport], now: float, sent: Mapping[str, OpenKv] | None = None
    ) -> Coordinated:
        """`now`: epoch seconds. Reports older than three periods are left out. `sent`: by request, what transfer
        daemons say of its KV; None if no daemon orders transfers, and links are then not counted. O(n log n) for n
        waiting requests."""
        fresh = [each for each in reports if now - each.at <= PERIODS * self.config.period_s]
        by_model: dict[str, list[ModelQueue]] = defaultdict(list)
        waits_at: dict[str, set[str]] = defaultdict(set)
        for report in fresh:
            for queue in report.queues:
                by_model[queue.model].append(queue)
                if queue.waiting:
                    waits_at[queue.model].add(report.gateway)
        shares: list[_Share] = []
        waiting = 0
        for model, queues in by_model.items():
            units = _merged(queues, sent is not None)
            computing = len(waits_at[model]) >= LEAST_GATEWAYS
            if not units or not (computing or any(unit.port for unit in units)):
                continue
            rows = _by_due(row for queue in queues for row in queue.waiting)
            waiting += len(rows)
            shared = _shared_out(rows, units, self.config.trust)
            shares += [_Share(model, unit, share, self._ends(share), computing) for unit, share in shared]
        scavengers: dict[str, PruneReason] = {}
        if sent:
            inbound = {model: _inbound(queues) for model, queues in by_model.items()}
            for link in _links(shares, sent, inbound):
                waiting += link.outgoing
                scavengers |= self._prune_for_link(link, scavengers.keys(), now)
        for each in shares:
            if each.computing:
                scavengers |= self._prune_for_computing(each, scavengers.keys(), now)
        batches = sum(len(each.ends) for each in shares)
        gateways = sorted(each.gateway for each in fresh)
        order = _order(shares, scavengers.keys()) if sent is not None else ()
        return Coordinated(scavengers, waiting, batches, gateways, order)

    def _ends(self, rows: Sequence[WaitingPrefill]) -> list[int]:
        """Successive prompts that fit into one step are a batch: how many rows there are up to the end of each. A
        prompt that is longer than a step is a batch of its own."""
        until = [0, *itertools.accumulate(map(itemgetter(3), rows))]  # prompt_tokens
        ends: list[int] = []
        start = 0
        while start < len(rows):
            fit = bisect_right(until, until[start] + self.config.batch_tokens, start) - 1
            start = max(start + 1, fit)
            ends.append(start)
        return ends

    def _prune_for_computing(self, share: _Share, pruned: Collection[str], now: float) -> dict[str, PruneReason]:
        """Of what waits, without those that are `pruned` for the link and count in the budget."""
        _, unit, rows, ends, _ = share.without(pruned)
        budget = math.floor(self.config.drop_budget * len(share.rows)) - (len(share.rows) - len(rows))
        if budget <= 0:
            return {}
        trust = _trust(unit, self.config.trust)
        names, dues, prefill_s, _, slot_tokens, exempt, value = zip(*rows, strict=True)
        rate = trust * unit.prefill_rate
        columns = [[unit.backlog_s / rate, *[each / rate for each in prefill_s]]]
        if unit.token_rate > 0:
            rate = trust * unit.token_rate
            # Free slots take as many average requests at once.
            free = -unit.free_slots * sum(slot_tokens) / len(rows)
            columns.append([free / rate, *[each / rate for each in slot_tokens]])
        # What the instance has been sent goes before everything that waits, as a batch that is never too late.
        bounds = [0, 1, *[end + 1 for end in ends]]
        due = [math.inf, *loose_deadlines(dues, ends)]
        ranked = RankedBatches(
            bounds[1:],
            [now] * len(due),
            due,
            [[sum(column[start:end]) for column in columns] for start, end in itertools.pairwise(bounds)],
            [range(len(columns))] * len(columns[0]),
            [1.0, *value],
            [dict(enumerate(column)) for column in columns],
            [0, *(number for number, held in enumerate(exempt, 1) if held)],
        )
        cuts = prune(ranked, budget, within_batch=False, in_vain=False).cuts
        return {names[request - 1]: PruneReason(unit.id, finish, due[batch]) for request, _, batch, finish in cuts}

    def _prune_for_link(self, link: _Link, pruned: Collection[str], now: float) -> dict[str, PruneReason]:
        """Without those that are `pruned` for another port and count in the budget."""
        kept = link.without(pruned)
        budget = math.floor(self.config.drop_budget * link.requests) - (link.requests - kept.requests)
        if budget <= 0:
            return {}
        unit_of = {batch.id: batch.unit for batch in kept.batches}
        order = order_batches(kept.batches, {LINK: 1.0}, budget, now, in_vain=False)
        return {each.request: PruneReason(unit_of[each.batch], each.finish_s, each.due_s) for each in order.pruned}


class _Share(NamedTuple):
    """What waits for one instance, and how many of these there are up to the end of each batch. `computing`: they may
    be pruned for computing."""

    model: str
    unit: PrefillUnit
    rows: Sequence[WaitingPrefill]
    ends: Sequence[int]
    computing: bool

    def groups(self) -> Iterator[Sequence[WaitingPrefill]]:
        """What is in each batch."""
        return (self.rows[start:end] for start, end in itertools.pairwise((0, *self.ends)))

    def without(self, pruned: Collection[str]) -> _Share:
        """The same batches without these requests."""
        if not pruned:
            return self
        groups = [rows for group in self.groups() if (rows := [row for row in group if row.id not in pruned])]
        return self._replace(rows=list(itertools.chain(*groups)), ends=list(itertools.accumulate(map(len, groups))))


class _Link(NamedTuple):
    """What goes through a port of a host, in batches whose load is seconds of it. `outgoing`: how many of the requests
    leave through it and are at an instance already."""

    batches: Sequence[Batch]
    outgoing: int = 0

    @property
    def requests(self) -> int:
        return sum(len(batch.requests) for batch in self.batches)

    @property
    def seconds(self) -> float:
        return sum(request.load[LINK] for batch in self.batches for request in batch.requests)

    def without(self, pruned: Collection[str]) -> _Link:
        """The same without these requests."""
        if not pruned:
            return self
        kept = ((batch, [each for each in batch.requests if each.id not in pruned]) for batch in self.batches)
        return self._replace(batches=[replace(batch, requests=requests) for batch, requests in kept if requests])


def _order(shares: Iterable[_Share], pruned: Collection[str]) -> list[str]:
    """By RED, which is the deadline itself of a request whose KV is a batch of its own."""
    rows = itertools.chain.from_iterable(share.unit.port.outgoing for share in shares if share.unit.port)
    due = sorted((row.due, row.id) for row in rows if row.id not in pruned)
    return [name for _, name in due[:MOST_ORDERED]]


def _links(
    shares: Iterable[_Share], sent: Mapping[str, OpenKv], inbound: Mapping[str, Mapping[str, float]]
) -> list[_Link]:
    """The ports through which KV leaves and comes, the one with the most seconds first.

    Instances whose KV one daemon sends share its port. What each gets while the others send adds up to the port's
    rate. One of whose KV no daemon speaks is left out: its host may have none, and then nobody can send KV last.
    """
    by_host: defaultdict[str, list[_Share]] = defaultdict(list)
    for share in shares:
        if share.unit.port is not None:
            host = next((sent[row.id].host for row in share.unit.port.outgoing if row.id in sent), None)
            if host is not None:
                by_host[host].append(share)
    links = []
    for there in by_host.values():
        ports = [share.unit.port for share in there if share.unit.port is not None]
        link = _through(there, sent, partial(_any, _in_turn(port.s_a_token for port in ports)))
        links.append(link._replace(outgoing=sum(len(port.outgoing) for port in ports)))
    together = [share for there in by_host.values() for share in there]
    links += [_through(together, sent, port) for port in _receivers(together, sent, inbound)]
    return sorted(links, key=lambda link: link.seconds, reverse=True)


Cost = Callable[[str, str], float]  # of a model's KV to an instance, in seconds of a port for a token


def _any(s_a_token: float, model: str, target: str) -> float:
    """All KV that leaves costs the same."""
    return s_a_token


def _receivers(
    shares: Iterable[_Share], sent: Mapping[str, OpenKv], inbound: Mapping[str, Mapping[str, float]]
) -> list[Cost]:
    """What a token of KV takes of receiving ports whose rate is known, each that of a host, whose instances get it in
    parts. Which host an instance is on, daemons say of the KV that goes to it; while a request that was placed again
    has KV on two ways, most of it counts.

    A rate is the one that transfers showed. Until they did, it is the bandwidth that the daemon of the receiving host
    was told, and a token has as many bytes as the largest KV of its model that is being sent.

    What waits may go to any instance of its model, so it loads all ports of the same models alike. Of these only the
    busiest is looked at: with each of them a decision would take time for waiting requests times hosts.
    """
    named: defaultdict[str, Counter[str]] = defaultdict(Counter)
    placed: Counter[tuple[str, str]] = Counter()  # tokens by model and instance
    waiting: Counter[str] = Counter()
    told: dict[str, float] = {}  # bytes/s by host
    sizes: dict[str, float] = {}  # bytes of a token by model; less where a receiver has cached a part
    for share in shares:
        if share.unit.port is None:
            continue
        for row in share.unit.port.outgoing:
            open_kv = sent.get(row.id)
            placed[share.model, row.target] += math.ceil(row.tokens * (open_kv.left if open_kv else 1.0))
            if row.target and open_kv and open_kv.to:
                named[row.target][open_kv.to] += 1
                told[open_kv.to] = open_kv.receives
                sizes[share.model] = max(sizes.get(share.model, 0.0), open_kv.size_bytes / max(1, row.tokens))
        waiting[share.model] += sum(row.prompt_tokens for row in share.rows)
    host_of = {target: hosts.most_common(1)[0][0] for target, hosts in named.items()}
    there: defaultdict[str, list[float]] = defaultdict(list)
    for target, host in host_of.items():
        there[host] += [ports[target] for ports in inbound.values() if target in ports] or [0.0]

    def cost(host: str, s_a_token: Mapping[str, float], model: str, target: str) -> float:
        """What is not placed yet may go to each instance of its model."""
        targets = [target] if target else list(inbound.get(model, ()))
        there = sum(host_of.get(each) == host for each in targets)
        return s_a_token.get(model, 0.0) * there / max(1, len(targets))

    hosts = {model: {host_of.get(target) for target in inbound.get(model, ())} for model in waiting}
    busiest: dict[frozenset[str], tuple[float, Cost]] = {}
    for host, known in there.items():
        models = frozenset(model for model in waiting if host in hosts[model])
        if all(known):
            s_a_token = dict.fromkeys(waiting, _in_turn(known))
        elif told[host] > 0 and all(sizes.get(model) for model in models):
            s_a_token = {model: size / told[host] for model, size in sizes.items()}
        else:
            continue
        of_port = partial(cost, host, s_a_token)
        seconds = sum(of_port(model, "") * tokens for model, tokens in waiting.items())
        seconds += sum(of_port(*pair) * tokens for pair, tokens in placed.items())
        if models not in busiest or seconds > busiest[models][0]:
            busiest[models] = seconds, of_port
    return [of_port for _, of_port in busiest.values()]


def _through(shares: Iterable[_Share], sent: Mapping[str, OpenKv], cost: Cost) -> _Link:
    """What is computed already goes by itself, and the rest with its batch.

    KV counts with what is still to be sent: counted whole, KV of which most has gone makes those behind it look late.
    """
    batches = []
    for share in shares:
        unit, port = share.unit.id, share.unit.port
        if port is None:
            continue
        for row in port.outgoing:
            left = math.ceil(row.tokens * (sent[row.id].left if row.id in sent else 1.0))
            if (seconds := cost(share.model, row.target) * left) > 0:
                request = BatchRequest(row.id, row.due, {LINK: seconds}, row.exempt, row.value)
                batches.append(Batch(row.id, unit, 0.0, [request]))
        if (s_a_token := cost(share.model, "")) > 0:
            for number, group in enumerate(share.groups()):
                requests = [
                    BatchRequest(
                        row.id, row.due + port.move_s, {LINK: s_a_token * row.prompt_tokens}, row.exempt, row.value
                    )
                    for row in group
                ]
                batches.append(Batch(f"{unit}:{number}", unit, 0.0, requests))
    return _Link(batches)


def _in_turn(s_a_token: Iterable[float]) -> float:
    """What a token takes of a port of which each of these has a part, while the others have theirs."""
    return 1.0 / sum(1.0 / each if each > 0 else math.inf for each in s_a_token)


def _inbound(queues: Iterable[ModelQueue]) -> dict[str, float]:
    """What a token takes of the ports that receive KV, by instance. What each gateway gets adds up, as above."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for queue in queues:
        for target, s_a_token in queue.inbound.items():
            found[target] += [s_a_token] if s_a_token > 0 else []
    return {target: _in_turn(known) if known else 0.0 for target, known in found.items()}


def _trust(unit: PrefillUnit, trust: float) -> float:
    """Decodes may take more than predicted; where there are none, prefills have all of the time."""
    return trust if unit.token_rate > 0 else 1.0


def _merged(queues: Iterable[ModelQueue], with_ports: bool) -> list[PrefillUnit]:
    """Each instance once. Gateways see the same decodes there, each its own share of the slots, and only its own
    prompts and KV."""
    found: dict[str, PrefillUnit] = {}
    for queue in queues:
        for unit in queue.units:
            known = found.get(unit.id)
            found[unit.id] = unit if known is None else _together(known, unit)
    able = (unit for unit in found.values() if unit.prefill_rate > 0)
    return [unit if with_ports else unit._replace(port=None) for unit in able]


def _together(one: PrefillUnit, other: PrefillUnit) -> PrefillUnit:
    return PrefillUnit(
        one.id,
        min(one.prefill_rate, other.prefill_rate),
        one.backlog_s + other.backlog_s,
        one.token_rate + other.token_rate,
        one.free_slots + other.free_slots,
        _one_port(one.port, other.port),
    )


def _one_port(one: KvPort | None, other: KvPort | None) -> KvPort | None:
    """What each gateway gets of the port while the others send adds up to its rate."""
    if one is None or other is None:
        return one or other
    return KvPort(
        _in_turn((one.s_a_token, other.s_a_token)), min(one.move_s, other.move_s), [*one.outgoing, *other.outgoing]
    )


def _by_due(rows: Iterable[WaitingPrefill]) -> list[WaitingPrefill]:
    """The most urgent first, of equally urgent ones by name."""
    found = sorted(rows, key=itemgetter(1))  # due
    if any(map(operator.eq, dues := [row.due for row in found], dues[1:])):
        found.sort(key=itemgetter(1, 0))
    return found


def _shared_out(
    rows: Sequence[WaitingPrefill], units: Sequence[PrefillUnit], trust: float
) -> list[tuple[PrefillUnit, list[WaitingPrefill]]]:
    """Each request, the earliest deadline first, to the instance that is free first: as the dispatcher fills them."""
    shares: list[list[WaitingPrefill]] = [[] for _ in units]
    pace = [  # prefill, slots, port
        (_trust(unit, trust) * unit.prefill_rate, trust * unit.token_rate, unit.port.s_a_token if unit.port else 0.0)
        for unit in units
    ]
    free = [(unit.backlog_s / rate, unit.id, n) for n, (unit, (rate, *_)) in enumerate(zip(units, pace, strict=True))]
    heapq.heapify(free)
    for row in rows:
        _, _, prefill_s, prompt_tokens, slot_tokens, _, _ = row
        at, name, place = free[0]
        shares[place].append(row)
        rate, slot_rate, s_a_token = pace[place]
        took = prefill_s / rate
        if slot_rate > 0 and (held := slot_tokens / slot_rate) > took:
            took = held
        if (moves := prompt_tokens * s_a_token) > took:
            took = moves
        heapq.heapreplace(free, (at + took, name, place))
    return list(zip(units, shares, strict=True))
