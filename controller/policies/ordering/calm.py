"""Concord's CALM in the gateway: what is worth the most per second of generation first, on the instance where it is.

"Concord: SLO-Aware Optimization and Stateful Orchestration for LLM Systems", sec. 4.2 and 4.3 (several replicas). What
waits is weighed by the same columns, window and cutoff as inside the engine (`controller.policies.calm`), once a frame:
`frame_steps` decode steps, as long as a step takes at the instances then. Sec. 4.3 gives each request K copies, one for
each of K replicas, with the priority that it has there; once one is sent, the others leave. Here K covers all
instances, and those that would serve the mean waiting request at about the same cost share a copy (`ALIKE`), so that
there is one for each *unlike* replica. With more of these than `copies`, the nearest share one. A request that can only
be in time on some instances waits for these, unless it failed there or its context is too long. Where the first copies
of several instances are worth about the same, routing chooses.

Each frame picks, for each copy, the window of as many requests as the instances have free slots: of those within
`cutoff` of the last of them, the ones of similar prompt lengths with the most priority. They go first; then all others
by priority; then those that are late everywhere, cheapest first. What arrives within a frame is placed by its priority.
Nothing that runs is preempted: that is the engine's business.

Worth, bounds and deadlines are those that engines are told (`controller.core.told_hints`). Deviations: a prompt costs
the linear and the quadratic part of eq. 1, without the part of such prompts that prefix caches held of late (by tenant
and class, as telemetry shows it: which prefixes an instance has is not known) and without the constant of its batch;
only the first `DEEP` of a copy are ranked in a frame (they are ranked again once these are gone), and the first `SHOWN`
are moved in the queue. `adapt`: whether the cutoff is adapted among `CUTOFFS` (calm/cutoff.py), which rests while
nothing waits for a whole frame; otherwise it is `cutoff`. `fair_weight` 0: f of sec. 4.3, by the tokens that tenants
were sent lately, which count half after `SERVED_FRAMES`. `keep`: most sent requests whose goodput is awaited. `copies`
8, `frame_steps` 50, `cutoff` 0.95 and `starvation` 0.5: as inside the engine. Cost: O(copies x n) per frame, and
O(copies) numpy calls per pass with arrivals; with prefix caches also O(instances) look-ups for each tenant and class of
these, in a frame for at most `KINDS` + `SAMPLED` of them.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from heapq import nlargest
from typing import Any, ClassVar

import numpy as np

from controller.core import events as ev
from controller.core.errors import ConfigError
from controller.core.policy import ORDERINGS, Barred, Copy, Cost, Rank, Replica, nowhere_barred
from controller.core.steps import Seq
from controller.core.told_hints import ToldHints, estimate_of
from controller.core.types import Request
from controller.policies.calm.choice import earned, select, with_fairness
from controller.policies.calm.columns import LEAST_S, Column, Columns, Pace, Standings
from controller.policies.calm.cutoff import AdaptiveCutoff

CUTOFFS = (0.8, 0.9, 0.95, 1.0)
ALIKE = 1.05  # instances whose costs differ by less share a copy: each has learned its own from its traffic
DEEP = 64  # requests of a copy that are ranked in a frame, beyond its window
UNKNOWN_STEP_S = 0.02  # for the length of a frame, where other instances decode
SHOWN = 32  # of these, moved in the queue: people and the scaler look at its first ones
FEW = 64  # waiting requests of which all are weighed again with each arrival
WINDOW, REST, LATE = 0.0, 1.0, 2.0  # tiers of a copy
KINDS = 256  # tenants and classes of which each instance's prefix cache is asked one by one
SAMPLED = 64  # of the others, those that stand for all of them
MOST_SERVED = 1_000  # tenants whose share another process goes on with
SERVED_FRAMES = 100  # after which what a tenant was sent counts half: a minute or so

_Rows = tuple[frozenset[str], list[int]]  # instances, and rows of requests that may not go there
_Key = tuple[float, float, float, float, str]  # tier, -priority or cost, slack, arrival, id


@dataclass(frozen=True, slots=True)
class Config:
    frame_steps: int = 50
    cutoff: float = 0.95
    adapt: bool = True
    starvation: float = 0.5
    fair_weight: float = 0.0
    copies: int = 8
    keep: int = 100_000

    def __post_init__(self) -> None:
        for name in ("frame_steps", "copies", "keep"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1", field=name)
        if not 0 < self.cutoff <= 1:
            raise ConfigError("cutoff must lie in (0, 1]", field="cutoff")
        if not 0 <= self.fair_weight <= 1:
            raise ConfigError("fair_weight must lie in [0, 1]", field="fair_weight")
        if not (math.isfinite(self.starvation) and self.starvation >= 0):
            raise ConfigError("starvation must be a number of tokens, at least 0", field="starvation")


def named(request: Request) -> str:
    """Its workflow: two tenants may call theirs the same."""
    return f"{request.tenant}\0{request.workflow}"


def sequence_of(request: Request) -> Seq:
    """The request as an engine's scheduler would see it, told all that a gateway tells one."""
    targets, bounded = request.targets, request.least_tokens is not None and request.most_tokens is not None
    most = max(1, request.reserved_tokens)
    seq = Seq(
        request.id, request.arrival, request.prompt_tokens, most,
        due=request.ttft_due, ttft_s=targets.ttft_s, tpot_s=targets.tpot_s, value=request.value,
    )  # fmt: skip
    told = ToldHints(
        due_s=math.inf if targets.deadline_s is None else targets.deadline_s,
        bounds=(min(most, max(0, request.surest_tokens)), most) if bounded or targets.deadline_s else None,
        workflow_s=math.inf if request.workflow_left_s is None else request.workflow_left_s,
        workflow="" if not request.workflow or request.workflow_left_s is None else named(request),
    )
    seq.estimate = estimate_of(told, seq, request.arrival)
    if seq.estimate is not None and not seq.estimate.each_token:  # what is shared need not be computed, and is goodput
        goodput = seq.estimate.goodput + request.value * request.shared_tokens
        seq.estimate = replace(seq.estimate, goodput=goodput)
    return seq


@ORDERINGS.register("calm")
class CalmOrdering:
    name: ClassVar[str] = "calm"

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or Config()
        self._sent: OrderedDict[str, tuple[AdaptiveCutoff, Seq]] = OrderedDict()

    def rank(self, request: Request, cost: Cost, now: float) -> Rank:
        """Behind all that a frame ranked, by eq. 4.1 on the instance that would serve it first."""
        prompt = request.prompt_tokens + request.shared_tokens if request.targets.deadline_s else 0
        worth = request.value * (request.output_tokens + prompt)
        return Rank((1.0, -worth / max(cost.service_s, LEAST_S), request.arrival))

    def frames(self) -> CalmFrames:
        return CalmFrames(self.config, self._sent)

    def observe(self, event: ev.Event, now: float) -> None:
        if isinstance(event, ev.Finished):
            if (known := self._sent.pop(event.request_id, None)) is not None:
                cutoff, seq = known
                seq.output_tokens = event.output_tokens
                cutoff.earned(earned(seq, now))
        elif isinstance(event, (ev.Cancelled, ev.Failed)):
            self._sent.pop(event.request_id, None)


class _Kinds:
    """Tenants and classes of rows, for what the prefix caches hold of theirs: the `KINDS` of which most waits one by
    one, the others by the mean of `SAMPLED` of them. Each instance is asked once."""

    def __init__(self, names: Sequence[tuple[str, str]], rows: Column, numbers: Column) -> None:
        counts = np.bincount(numbers[rows], minlength=len(names))[: len(names)]
        order = np.argsort(-counts, kind="stable")
        places = np.empty_like(order)
        places[order] = np.minimum(np.arange(len(order)), KINDS)
        self._names = [names[at] for at in order[:KINDS].tolist()]
        others = order[KINDS:].tolist()
        self._others = [names[at] for at in others[:: math.ceil(len(others) / SAMPLED) or 1]]
        self._numbers = places[numbers] if names else numbers
        self._shares = np.bincount(places, counts) / max(1, len(rows))  # of the rows
        self._asked: dict[str, Column] = {}

    def each(self, replicas: Sequence[Replica]) -> Column | float:
        """By row, the part of its prompt that is cached, mean of these. Rows that are not in use have any."""
        if not self._names:
            return 0.0
        mean: Column = np.mean([self._of(each) for each in replicas], axis=0)
        parts: Column = mean[self._numbers]
        return parts

    def mean(self, replica: Replica) -> float:
        return float(self._of(replica) @ self._shares) if self._names else 0.0

    def _of(self, replica: Replica) -> Column:
        """Of what waits: the replica may have served thousands of tenants."""
        found = self._asked.get(replica.id)
        if found is None:
            parts, some = ([replica.cached.get(name, 0.0) for name in names] for names in (self._names, self._others))
            found = self._asked[replica.id] = np.array(parts + ([sum(some) / len(some)] if some else []))
        return found


def _prefill_s(new: Column | float, prompt: Column | float, b: float, c: float) -> Column | float:
    """Seconds of eq. 1 for each token of a prompt of which the part `new` is computed, and attends to all before it."""
    return new * (b + c * prompt * (2.0 - new))


class _Line:
    """The copies on replicas that are alike: in order, with the priority of each."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.ids = frozenset(each.id for each in replicas)
        count = len(replicas)
        self.free_slots = max(1, sum(max(0, each.free_slots) for each in replicas))
        self.crowd = sum(each.crowd for each in replicas) / count
        self.token_s = sum(each.token_s for each in replicas) / count
        self.alone_s = min(each.alone_s for each in replicas)
        self.prefill_b = sum(each.prefill_b for each in replicas) / count
        self.prefill_c = sum(each.prefill_c for each in replicas) / count
        self.replicas = replicas
        self.keys: list[_Key] = []
        self.worth: dict[str, float] = {}  # goodput per second of those that can be in time here
        self.least = -math.inf  # of the window, the least priority, negative as in the keys
        self.cut = False  # there were more than it ranks

    def weigh(self, columns: Columns, kinds: _Kinds, now: float, frame: int, starvation: float) -> Standings:
        """By row, with the priorities of eq. 4.1."""
        new = 1.0 - kinds.each(self.replicas)
        prefill_s = _prefill_s(new, columns.prefill, self.prefill_b, self.prefill_c)
        pace = Pace(max(LEAST_S, self.token_s), prefill_s, self.crowd, max(LEAST_S, min(self.alone_s, self.token_s)))
        return columns.weigh(now, frame, pace, starvation)

    def barred(self, rows: Sequence[_Rows]) -> Iterator[list[int]]:
        """Those of requests that may go to none of the instances."""
        return (some for where, some in rows if self.ids <= where)

    def put(self, seq: Seq, tier: float, by: float, slack: float, worth: float = 0.0) -> None:
        """Place it among those that are ranked. Behind the last of them are others that are not: it waits with them."""
        key = (tier, by, slack, seq.arrival, seq.id)
        if not self.cut or (tier != LATE and self.keys and key < self.keys[-1]):
            insort(self.keys, key)
        if tier != LATE:
            self.worth[seq.id] = worth

    def first(self, waiting: Collection[str]) -> _Key | None:
        gone = next((at for at, key in enumerate(self.keys) if key[-1] in waiting), len(self.keys))
        del self.keys[:gone]
        return self.keys[0] if self.keys else None


class CalmFrames:
    """What waits in one queue, ranked on each unlike replica."""

    def __init__(self, config: Config, sent: OrderedDict[str, tuple[AdaptiveCutoff, Seq]]) -> None:
        self.config = config
        self._sent = sent
        self._cutoff = AdaptiveCutoff(CUTOFFS if config.adapt else (config.cutoff,))
        self._columns = Columns()
        self._newcomers = Columns()
        self._seqs: dict[str, Seq] = {}
        self._new: dict[str, Seq] = {}  # of these, not weighed yet
        self._kinds: dict[str, tuple[str, str]] = {}  # tenant and class
        self._served: dict[str, float] = {}  # by tenant: tokens that were sent, fewer with each frame
        self._largest = 0.0  # priority of the frame
        self._lines: list[_Line] = []
        self._by_instance: dict[str, _Line] = {}
        self._shown: dict[str, _Key] = {}
        self._began = self._ends = -math.inf
        self.frame = 0

    @property
    def cutoff(self) -> float:
        return self._cutoff.value

    @property
    def ends(self) -> float:
        """When what waits is to be ranked again; infinite while nothing waits."""
        return self._ends if self._seqs else math.inf

    # ---- for another process --------------------------------------------------------------------------------------

    def state(self, now: float) -> dict[str, Any] | None:
        if not math.isfinite(self._ends):
            return None
        return {
            "settings": asdict(self.config),
            "frame": [self.frame, self._ends - self._began, now - self._began],  # number, its length, begun so long ago
            "cutoff": self._cutoff.state(),
            "served": nlargest(MOST_SERVED, self._served.items(), key=lambda item: item[1]),
        }

    def restore(self, state: Mapping[str, Any], age_s: float, now: float) -> bool:
        """The frames of the time between pass as those in which nothing waited."""
        cutoff = AdaptiveCutoff.of(state["cutoff"])
        number, length_s, since_s = state["frame"]
        served = {str(tenant): float(tokens) for tenant, tokens in state["served"]}
        if not all(math.isfinite(each) and each >= 0 for each in (number, length_s, since_s, *served.values())):
            raise ValueError("no frame, or no tokens of tenants")
        if state["settings"] != asdict(self.config) or cutoff.values != self._cutoff.values:
            return False
        self.frame, self._cutoff, self._served = int(number), cutoff, served
        self._began = now - since_s - age_s
        self._ends = self._began + length_s
        return True

    # ---- what waits -----------------------------------------------------------------------------------------------

    def join(self, request: Request) -> None:
        if request.id not in self._seqs:
            self._seqs[request.id] = self._new[request.id] = sequence_of(request)
            self._kinds[request.id] = request.tenant, request.slo_class

    def leave(self, request_id: str) -> None:
        seq = self._seqs.pop(request_id, None)
        self._shown.pop(request_id, None)
        self._kinds.pop(request_id, None)
        if seq is not None and self._new.pop(request_id, None) is None:
            self._columns.drop(seq)

    def sent(self, request_id: str, instance_id: str) -> Copy | None:
        line, seq = self._by_instance.get(instance_id), self._seqs.get(request_id)
        if line is None or seq is None:
            return None
        self._sent[request_id] = self._cutoff, seq
        tenant, _ = self._kinds[request_id]
        self._served[tenant] = self._served.get(tenant, 0.0) + seq.prompt_tokens + seq.max_tokens
        while len(self._sent) > self.config.keep:  # what an engine lost never ends
            self._sent.popitem(last=False)
        here = line.worth.get(request_id)
        if here is None:
            return Copy("late", 0.0, self.frame, self.cutoff, {})
        others = {
            name: each.worth[request_id]
            for each in self._lines if each is not line and request_id in each.worth
            for name in each.ids
        }  # fmt: skip
        chosen = any(key[-1] == request_id and key[0] == WINDOW for key in line.keys)
        return Copy("window" if chosen else "rest", here, self.frame, self.cutoff, others)

    # ---- frames ---------------------------------------------------------------------------------------------------

    def due(self, instances: Collection[str], now: float) -> bool:
        if not self._seqs:
            return False
        over = now >= self._ends or bool(self._new) or self._by_instance.keys() != set(instances)
        return over or self._ran_out()

    def _ran_out(self) -> bool:
        """Whether an order is used up, though more waits than it ranked."""
        return any(line.cut and line.first(self._seqs) is None for line in self._lines)

    def weigh(self, replicas: Sequence[Replica], now: float, barred: Barred = nowhere_barred) -> Collection[str]:
        over = now >= self._ends
        if over:
            self._next_frame(replicas, now)
        elif (
            self._new
            and len(self._seqs) > FEW
            and 2 * len(self._new) < len(self._seqs)
            and self._by_instance.keys() == {each.id for each in replicas}
            and not self._ran_out()
        ):
            self._place_newcomers(now, barred)
            return ()
        self._admit()
        self._rank(replicas, now, barred)
        return self._show()

    def _next_frame(self, replicas: Sequence[Replica], now: float) -> None:
        passed = 1
        length = self._ends - self._began
        if math.isfinite(length) and length > 0:
            passed = max(1, int((now - self._began) / length))
        since = self._columns.since[list(self._columns.rows.values())]
        self.frame += passed
        kept = 0.5 ** (passed / SERVED_FRAMES)
        self._served = {tenant: kept * tokens for tenant, tokens in self._served.items() if kept * tokens >= 1.0}
        self._cutoff.tick(self.frame, contested=bool(len(since)) and float(since.min()) < self.frame - passed)
        known = [each for each in replicas if each.token_s > 0]
        steps = [each.token_s for each in known if each.crowd] or [each.token_s for each in known] or [UNKNOWN_STEP_S]
        self._began = now
        self._ends = now + self.config.frame_steps * sum(steps) / len(steps)
        for columns in (self._columns, self._newcomers):
            columns.shrink()

    def _admit(self) -> None:
        for seq in self._new.values():
            self._columns.add(seq, self.frame)
        self._new.clear()

    def _rank(self, replicas: Sequence[Replica], now: float, barred: Barred) -> None:
        columns, cached = self._columns, any(each.cached for each in replicas)
        rows_barred = self._rows_barred(barred(None), columns)
        kinds = self._kinds_of(columns, cached)
        self._lines = [_Line(each) for each in self._unlike(replicas, kinds)]
        self._by_instance = {name: line for line in self._lines for name in line.ids}
        late = columns.alive.copy()  # on all of them
        generation_s = []
        self._largest = 0.0
        for line in self._lines if self.config.fair_weight else ():
            found = line.weigh(columns, kinds, now, self.frame, self.config.starvation)
            self._largest = max(self._largest, float(found.priority.max(initial=0.0)))
        for line in self._lines:
            found = line.weigh(columns, kinds, now, self.frame, self.config.starvation)
            able = columns.alive & (found.slack >= 0)
            for rows in line.barred(rows_barred):
                able[rows] = False
            late &= ~able
            generation_s.append(found.generation_s)
            self._fill(line, found, np.flatnonzero(able))
        late_rows = np.flatnonzero(late)
        for line, costs in zip(self._lines, generation_s, strict=True):
            self._fill_late(line, late_rows, costs)

    def _rows_barred(self, barred: Mapping[frozenset[str], Collection[str]], columns: Columns) -> list[_Rows]:
        """Rows by the instances where their requests may not go."""
        found = []
        for where, names in barred.items():
            seqs = (self._seqs.get(name) for name in names)
            found.append((where, [columns.rows[seq] for seq in seqs if seq is not None and seq in columns.rows]))
        return found

    def _fill(self, line: _Line, found: Standings, rows: Column) -> None:
        worths, slack = found.priority[rows], found.slack[rows]
        priority = self._fair(worths, self._columns, rows)
        chosen = select(priority, self._columns.prompt[rows], slack, line.free_slots, self.cutoff)
        line.least = -float(priority[chosen].min()) if len(chosen) else -math.inf
        rest = np.setdiff1d(np.arange(len(rows)), chosen, assume_unique=True)
        line.cut = len(rest) > DEEP
        if line.cut:
            rest = rest[np.argpartition(-priority[rest], DEEP)[:DEEP]]
        for tier, some in ((WINDOW, chosen), (REST, rest)):
            columns = (rows[some], priority[some], worths[some], slack[some])
            for row, by, worth, spare in zip(*(each.tolist() for each in columns), strict=True):
                if (seq := self._columns.seqs[row]) is not None:
                    line.keys.append((tier, -by, spare, seq.arrival, seq.id))
                    line.worth[seq.id] = worth
        line.keys.sort()

    def _fair(self, priority: Column, columns: Columns, rows: Column) -> Column:
        """Sec. 4.3, fair to tenants: 1 for one that was sent nothing lately, 0 for the one that was sent most."""
        most = max(self._served.values(), default=0.0)
        if not self.config.fair_weight or not most:
            return priority
        seqs = (columns.seqs[row] for row in rows.tolist())
        served = [most if seq is None else self._served.get(self._kinds[seq.id][0], 0.0) for seq in seqs]
        return with_fairness(priority, 1.0 - np.array(served) / most, self.config.fair_weight, self._largest)

    def _fill_late(self, line: _Line, rows: Column, generation_s: Column) -> None:
        room = DEEP if not line.cut else 0
        if len(rows) > room:
            line.cut = True
            rows = rows[np.argpartition(generation_s[rows], room)[:room]]
        late = zip(rows.tolist(), generation_s[rows].tolist(), strict=True)
        seqs = [(cost, seq) for row, cost in late if (seq := self._columns.seqs[row]) is not None]
        line.keys += sorted((LATE, cost, 0.0, seq.arrival, seq.id) for cost, seq in seqs)

    def _kinds_of(self, columns: Columns, cached: bool) -> _Kinds:
        """Of the rows; none, unless something is `cached`."""
        numbers = np.zeros(len(columns.alive), np.intp)
        names: dict[tuple[str, str], int] = {}
        rows = np.fromiter(columns.rows.values(), np.intp, len(columns.rows))
        if cached:
            numbers[rows] = [names.setdefault(self._kinds[seq.id], len(names)) for seq in columns.rows]
        return _Kinds(list(names), rows, numbers)

    def _unlike(self, replicas: Sequence[Replica], kinds: _Kinds) -> list[list[Replica]]:
        """Replicas on which the mean waiting request costs about the same, together; at most `copies` groups."""
        columns, alive = self._columns, self._columns.alive
        left, prompt = float(columns.left[alive].mean()), float(columns.prefill[alive].mean())
        costs = []
        for each in replicas:
            token_s = _prefill_s(1.0 - kinds.mean(each), prompt, each.prefill_b, each.prefill_c)
            prefill_s = prompt * float(token_s)
            beside, alone = left * each.token_s + prefill_s * max(1, each.crowd), left * each.alone_s + prefill_s
            costs.append((max(LEAST_S, beside), max(LEAST_S, alone), each))
        costs.sort(key=lambda item: (item[0], item[1], item[2].id))
        alike = ALIKE
        while True:
            groups: list[list[tuple[float, float, Replica]]] = []
            for item in costs:
                group = next((some for some in groups if _near(some[0][:2], item[:2], alike)), None)
                if group is None:
                    groups.append([item])
                else:
                    group.append(item)
            if len(groups) <= self.config.copies:
                return [[each for _, _, each in group] for group in groups]
            if math.isinf(alike):  # costs that are no numbers are near to none
                return [list(replicas)]
            alike *= ALIKE

    def _place_newcomers(self, now: float, barred: Barred) -> None:
        """Within a frame, what arrives is placed by its priority."""
        seqs, columns = list(self._new.values()), self._newcomers
        for seq in seqs:
            columns.add(seq, self.frame)
        rows = [columns.rows[seq] for seq in seqs]
        kinds = self._kinds_of(columns, any(each.cached for line in self._lines for each in line.replicas))
        found = [line.weigh(columns, kinds, now, self.frame, self.config.starvation) for line in self._lines]
        rows_barred = self._rows_barred(barred(list(self._new)), columns)
        for line, standings in zip(self._lines, found, strict=True):
            for some in line.barred(rows_barred):
                standings.slack[some] = -math.inf
        anywhere = np.logical_or.reduce([each.slack[rows] >= 0 for each in found]).tolist()
        for line, standings in zip(self._lines, found, strict=True):
            fair = self._fair(standings.priority[rows], columns, np.array(rows, np.intp))
            for seq, row, priority, able in zip(seqs, rows, fair.tolist(), anywhere, strict=True):
                slack = float(standings.slack[row])
                if slack >= 0:
                    tier = WINDOW if -priority <= line.least else REST
                    line.put(seq, tier, -priority, slack, float(standings.priority[row]))
                elif not able:
                    line.put(seq, LATE, float(standings.generation_s[row]), slack)
        for seq in seqs:
            columns.drop(seq)
        self._admit()

    def _show(self) -> Collection[str]:
        before, self._shown = self._shown, {}
        for line in self._lines:
            for key in line.keys[:SHOWN]:
                known = self._shown.get(key[-1])
                if known is None or key < known:
                    self._shown[key[-1]] = key
        return [
            name for name in (before.keys() | self._shown.keys())
            if name in self._seqs and _place(before.get(name)) != _place(self._shown.get(name))
        ]  # fmt: skip

    # ---- what the dispatcher reads --------------------------------------------------------------------------------

    def key(self, request_id: str) -> tuple[float, ...] | None:
        place = _place(self._shown.get(request_id))
        return None if place is None else (0.0, *place)

    def best(self, instances: Collection[str]) -> Collection[str]:
        firsts = [
            (key[0] == LATE, key[1], line) for line in self._lines
            if not line.ids.isdisjoint(instances) and (key := line.first(self._seqs)) is not None
        ]  # fmt: skip
        if not firsts:
            return ()
        late = all(each[0] for each in firsts)
        worth = [(by, line) for is_late, by, line in firsts if is_late == late]
        top = min(by for by, _ in worth)
        near = top * ALIKE if late else top / ALIKE  # priorities are negative here
        return [name for by, line in worth if by <= near for name in line.ids if name in instances]

    def order(self, instance_id: str) -> Iterator[str]:
        line = self._by_instance.get(instance_id)
        keys = () if line is None else tuple(line.keys)
        seen: set[str] = set()  # one that left and joined again within the frame has two keys
        for *_, name in keys:
            if name in self._seqs and name not in seen:
                seen.add(name)
                yield name


def _place(shown: _Key | None) -> tuple[float, float] | None:
    """Without the slack, which passes with time: a request that keeps its place is not moved in the queue."""
    return None if shown is None else shown[:2]


def _near(one: tuple[float, float], other: tuple[float, float], ratio: float) -> bool:
    return all(max(a, b) <= ratio * min(a, b) for a, b in zip(one, other, strict=True))
