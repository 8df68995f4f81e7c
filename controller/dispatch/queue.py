"""The queue of one model: waiting requests in order, hopeless ones in a tier of their own.

Heaps tell what is due next (a rank that changes, a request that becomes hopeless or expires) without a scan.
"""

from __future__ import annotations

import heapq
import math
import sys
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice, takewhile
from typing import Any, cast

from controller.core.messages import QueueRow
from controller.core.policy import Admission, Barred, Cost, Frames, Ordering, Planning, Replica, Supply
from controller.core.types import Request

SortKey = tuple[tuple[float, ...], float, str]
MADE_UP = 0.5  # of the time that a workflow's later stages were given, which they can do without
AFTER_UNMOVED: SortKey = ((0.5,), 0.0, "")  # keys begin with the order that an operator gave, 0 of most


class Entry:
    """One waiting request.

    `context`: tokens of its prompt and longest answer. `excluded`: instances that failed it. `deferred`: others are
    served first, so that they are in time. `late_at`, `hopeless_at`: when it must have been sent for its own targets,
    and for those of its workflow. `hopeless`: it is in the tier that is served last. `pruned`: orders put it
    there, so that others are in time. `waited_for_tpot`: it could have gone, but a TPOT would have been missed for it.
    """

    __slots__ = (
        "context",
        "cost",
        "deferred",
        "drop_at",
        "excluded",
        "hopeless",
        "hopeless_at",
        "key",
        "late_at",
        "not_before",
        "paused",
        "pruned",
        "queued_at",
        "request",
        "retry_at",
        "turn_at",
        "valid_until",
        "waited_for_tpot",
    )

    def __init__(self, request: Request, cost: Cost, now: float, excluded: frozenset[str] = frozenset()) -> None:
        self.request = request
        self.cost = cost
        self.queued_at = now
        self.context = request.prompt_tokens + (request.max_tokens or 1)
        self.key: SortKey = ((), request.arrival, request.id)
        self.hopeless = False
        self.deferred = False
        self.paused = False
        self.pruned = False
        self.waited_for_tpot = False
        self.late_at = math.inf
        self.hopeless_at = math.inf
        self.valid_until = math.inf  # of its rank
        self.turn_at = math.inf  # when it is looked at again
        self.drop_at = request.arrival + request.targets.waiting_time_s
        self.excluded = excluded.union(request.failed_on)
        self.retry_at = -math.inf  # until then it does not go where it failed last
        self.not_before = -math.inf  # until then it goes nowhere

    @property
    def forced(self) -> bool:
        """Whether an operator wants it sent whatever its chances."""
        return self.request.order < 0

    def judge(self, admission: Admission) -> None:
        """A stage's share of its workflow's time is a guess, which later stages can make up for. A workflow that is
        late already was lost before the request came (decision 290)."""
        request, at = self.request, admission.hopeless_at(self.request, self.cost)
        left_s = request.workflow_left_s
        if left_s is not None and left_s <= 0 and math.isfinite(at):
            at = request.arrival
        self.late_at = self.hopeless_at = at
        if left_s is not None and request.targets.deadline_s is not None:
            self.hopeless_at += MADE_UP * max(0.0, left_s - request.targets.deadline_s)

    @property
    def made_up_s(self) -> float:
        """By which its answer may be later than its deadline, for later stages of its workflow to make up for."""
        return self.hopeless_at - self.late_at if math.isfinite(self.late_at) else 0.0

    def last(self, now: float) -> bool:
        """Whether it belongs to the tier that is served last: it cannot make it, or orders say so."""
        return (self.pruned or self.hopeless_at <= now) and not self.forced


class Journal:
    """Ids of requests that came, left or moved since the journal was last read, while it is followed.

    Its cost grows with what happens, not with what waits. While it is not followed it costs one test. `noted`: how many
    times anything came, left or moved, followed or not.
    """

    __slots__ = ("_touched", "following", "noted")

    def __init__(self) -> None:
        self.following = False
        self.noted = 0
        self._touched: set[str] = set()

    def note(self, request_id: str) -> None:
        self.noted += 1
        if self.following:
            self._touched.add(request_id)

    def follow(self, following: bool) -> None:
        self.following = following
        self._touched.clear()

    def take(self) -> set[str]:
        """The ids so far, which are then forgotten."""
        touched, self._touched = self._touched, set()
        return touched


class RequestQueue:
    """Insert, remove and expire in O(log n) comparisons; iteration in order. Ties: arrival, then id."""

    def __init__(self, ordering: Ordering, admission: Admission, journal: Journal | None = None) -> None:
        self._use(ordering)
        self._admission = admission
        self._journal = journal or Journal()
        self._entries: dict[str, Entry] = {}
        self._failed: dict[str, Entry] = {}  # of these, those that an instance failed, where the ordering has frames
        self._by_context: list[tuple[int, str]] = []  # tokens of prompt and longest answer, likewise
        self._ready: list[tuple[SortKey, Entry]] = []
        self._hopeless: list[tuple[SortKey, Entry]] = []
        self._turns: list[tuple[float, str]] = []  # when to look at each again
        self._outdated: deque[str] = deque()  # requests whose costs are predicted again, the first to be served first
        self._untold: deque[str] = deque()  # requests of which the frames of another ordering do not know yet
        self._drops: list[tuple[float, str]] = []
        self._due: dict[tuple[str, str], list[tuple[float, str]]] = {}
        self._counts: Counter[tuple[str, str]] = Counter()
        self._levels: Counter[int] = Counter()
        self.tokens = 0

    def _use(self, ordering: Ordering) -> None:
        self._ordering = ordering
        self.planning: Planning | None = cast(Any, ordering) if hasattr(ordering, "defer") else None
        self.frames: Frames | None = cast(Any, ordering).frames() if hasattr(ordering, "frames") else None

    def order_by(self, ordering: Ordering, now: float) -> None:
        """Rank everything anew. What an operator moved or paused, what orders prune and what is hopeless stays so; what
        the ordering before deferred does not. Frames hear of it by `tell`, of the first in the new order first."""
        self._use(ordering)
        waiting = [] if self.frames is None else list(self._entries.values())
        self._failed = {entry.request.id: entry for entry in waiting if entry.excluded}
        self._by_context = sorted((entry.context, entry.request.id) for entry in waiting)
        self._ready, self._hopeless = [], []
        for entry in self._entries.values():
            entry.deferred = False
            self._journal.note(entry.request.id)
            if not entry.paused:
                self._rank(entry, now).append((entry.key, entry))
            self._look_again(entry, now)
        for tier in (self._ready, self._hopeless):
            tier.sort(key=_first)  # at once: one by one costs more than twice the time
        self._untold = deque(entry.request.id for _, entry in (self._ready if self.frames is not None else ()))

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def get(self, request_id: str) -> Entry | None:
        return self._entries.get(request_id)

    @property
    def ready(self) -> list[tuple[SortKey, Entry]]:
        """Requests that can still make it, most urgent first. Read only."""
        return self._ready

    @property
    def hopeless(self) -> list[tuple[SortKey, Entry]]:
        """Requests that cannot: by level of the priority mapping, then cheapest first. Read only."""
        return self._hopeless

    def selective(self, tokens: int) -> Iterator[Entry]:
        """Those that may not go everywhere: an instance failed them, or prompt and longest answer exceed `tokens`.
        Only where the ordering ranks by instance. Some come twice."""
        yield from self._failed.values()
        for _, name in self._by_context[bisect_left(self._by_context, (tokens + 1, "")) :]:
            yield self._entries[name]

    def ready_for(self, instance_id: str) -> Iterator[Entry]:
        """As `ready`, in the order of this instance where the ordering ranks by instance. What an operator moved comes
        before or behind the others everywhere."""
        ready = (entry for _, entry in self._ready)
        if self.frames is None:
            return ready
        ranked = (self._entries[name] for name in self.frames.order(instance_id))
        forced = takewhile(lambda entry: entry.request.order < 0, ready)
        behind = bisect_left(self._ready, AFTER_UNMOVED, key=_first)
        return chain(forced, ranked, (entry for _, entry in self._ready[behind:]))

    def weigh(self, replicas: Sequence[Replica], now: float, barred: Barred) -> None:
        """Let the ordering rank what waits on each of these instances. `barred`: where requests may not go."""
        for name in self.frames.weigh(replicas, now, barred) if self.frames is not None else ():
            entry = self._entries[name]
            self._unplace(entry)
            self._place(entry, now)

    def pending_above(self, level: int) -> bool:
        """Whether a request of a higher level of the priority mapping (a lower number) waits."""
        return any(other < level for other in self._levels)

    def add(self, entry: Entry, now: float) -> None:
        request = entry.request
        self._entries[request.id] = entry
        entry.judge(self._admission)
        entry.hopeless = entry.last(now)
        self._place(entry, now)
        heapq.heappush(self._drops, (entry.drop_at, request.id))
        kind = (request.tenant, request.slo_class)
        heapq.heappush(self._due.setdefault(kind, []), (request.ttft_due, request.id))
        self._counts[kind] += 1
        if request.level is not None:
            self._levels[request.level] += 1
        self.tokens += request.prompt_tokens
        if self.frames is not None:
            insort(self._by_context, (entry.context, request.id))
            if entry.excluded:
                self._failed[request.id] = entry

    def remove(self, request_id: str) -> Entry | None:
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return None
        self._unplace(entry)
        if self.frames is not None:
            self.frames.leave(request_id)
            self._failed.pop(request_id, None)
            del self._by_context[bisect_left(self._by_context, (entry.context, request_id))]
        self._journal.note(request_id)
        request = entry.request
        kind = (request.tenant, request.slo_class)
        self._counts[kind] -= 1
        if not self._counts[kind]:
            del self._counts[kind]
            self._due.pop(kind, None)
        if request.level is not None:
            self._levels[request.level] -= 1
            if not self._levels[request.level]:
                del self._levels[request.level]
        self.tokens -= request.prompt_tokens
        self._compact()
        return entry

    def _compact(self) -> None:
        """Heaps keep requests that left; they are rebuilt when most of their content is such."""
        bound = 2 * len(self._entries) + 64
        for heap in (self._turns, self._drops, *self._due.values()):
            if len(heap) > bound:
                heap[:] = [item for item in heap if item[1] in self._entries]
                heapq.heapify(heap)

    def reprioritise(self, request_id: str, priority: int, now: float) -> bool:
        """An operator's command: 0 sends it first and whatever its chances, more puts it behind the others.

        It stays with the request when that comes back from an instance that failed it or whose KV got nowhere.
        """
        entry = self._entries.get(request_id)
        if entry is None:
            return False
        self._unplace(entry)
        entry.request.order = priority if priority > 0 else -1
        entry.hopeless = entry.last(now)
        self._place(entry, now)
        return True

    def pause(self, request_id: str, paused: bool, now: float) -> bool:
        """Pause or resume a request. Its waiting time runs on."""
        entry = self._entries.get(request_id)
        if entry is None:
            return False
        if entry.paused != paused:
            self._unplace(entry)
            entry.paused = paused
            self._place(entry, now)
        return True

    def give_up(self, request_id: str, now: float) -> None:
        """Move it to the tier that is served last: an admission that sees the whole queue found it hopeless."""
        entry = self._entries.get(request_id)
        if entry is not None and not entry.hopeless and not entry.forced:
            self._unplace(entry)
            entry.hopeless = True
            self._place(entry, now)

    def prune(self, request_id: str, pruned: bool, now: float) -> Entry | None:
        """Move it to the tier that is served last, or back from there. Returns the entry if that changes anything.

        One that an operator forced stays where it is, and one that cannot make it by now stays in that tier.
        """
        entry = self._entries.get(request_id)
        if entry is None or entry.pruned == pruned or (pruned and entry.forced):
            return None
        self._unplace(entry)
        entry.pruned = pruned
        entry.hopeless = entry.last(now)
        self._place(entry, now)
        return entry

    def plan(self, supply: Supply, now: float) -> None:
        """Let the ordering defer requests. Those that an operator moved stay where they are."""
        if self.planning is None:
            return
        waiting = [entry for _, entry in self._ready if not entry.request.order]
        if waiting and any(entry.deferred for entry in waiting):
            # Those in time come first, each tier in its own order: merge them by what `rank` says.
            waiting.sort(key=lambda e: (self._ordering.rank(e.request, e.cost, now).key, e.request.id))
        deferred = self.planning.defer([(entry.request, entry.cost) for entry in waiting], supply, now)
        for entry in waiting:
            if entry.deferred != (entry.request.id in deferred):
                self._unplace(entry)
                entry.deferred = not entry.deferred
                self._place(entry, now)

    @property
    def outdated(self) -> bool:
        """Whether costs remain to be predicted again."""
        return bool(self._outdated)

    def outdate(self) -> None:
        """All costs are to be predicted again: the instances are others now, or faster or slower."""
        self._outdated = deque(entry.request.id for entry in self.entries())

    def recost(self, cost: Callable[[Request], Cost], now: float, most: int) -> None:
        """Predict the costs of up to `most` outdated requests: a long queue at once would hold up the pass."""
        for _ in range(min(most, len(self._outdated))):
            entry = self._entries.get(self._outdated.popleft())
            if entry is None:
                continue
            self._unplace(entry)
            entry.cost = cost(entry.request)
            entry.judge(self._admission)
            entry.hopeless = entry.last(now)
            self._place(entry, now)

    @property
    def untold(self) -> bool:
        """Whether the frames of another ordering do not know all that waits yet."""
        return bool(self._untold)

    def tell(self, most: int) -> None:
        """Let frames know up to `most` requests more that waited before their ordering was chosen."""
        for _ in range(min(most, len(self._untold))):
            entry = self._entries.get(self._untold.popleft())
            if entry is not None and self.frames is not None:
                self._tell(self.frames, entry)

    def advance(self, now: float) -> None:
        """Move requests that became hopeless to their tier, and compute expired ranks again."""
        while self._turns and self._turns[0][0] <= now:
            at, request_id = heapq.heappop(self._turns)
            entry = self._entries.get(request_id)
            if entry is None or at != entry.turn_at:
                continue  # it left, or has been looked at earlier
            entry.turn_at = math.inf
            self._unplace(entry)
            entry.hopeless = entry.hopeless or entry.last(now)
            self._place(entry, now)

    def expire(self, now: float, *, late: bool) -> list[Entry]:
        """Take out requests whose waiting time is over. `late`: only those for which it ended before `now`."""
        expired = []
        while self._drops and (self._drops[0][0] < now or (self._drops[0][0] <= now and not late)):
            at, request_id = heapq.heappop(self._drops)
            entry = self._entries.get(request_id)
            if entry is not None and entry.drop_at <= at:
                self.remove(request_id)
                expired.append(entry)
        return expired

    def next_turn(self) -> float:
        """The earliest time at which `advance` or `expire` has something to do; infinite if never."""
        for heap in (self._turns, self._drops):
            while heap and heap[0][1] not in self._entries:
                heapq.heappop(heap)
        turn = self._turns[0][0] if self._turns else math.inf
        return min(turn, self._drops[0][0] if self._drops else math.inf)

    def by_class(self, now: float) -> dict[tuple[str, str], tuple[int, float | None]]:
        """Waiting requests and the smallest slack to a TTFT deadline (seconds) by (tenant, class)."""
        return {kind: (count, self._least_slack(kind, now)) for kind, count in self._counts.items()}

    def _least_slack(self, kind: tuple[str, str], now: float) -> float | None:
        heap = self._due.get(kind)
        while heap and heap[0][1] not in self._entries:
            heapq.heappop(heap)
        return heap[0][0] - now if heap else None

    def entries(self) -> Iterator[Entry]:
        """All requests: ready ones in order, then hopeless, then paused."""
        for _, entry in self._ready:
            yield entry
        for _, entry in self._hopeless:
            yield entry
        for entry in self._entries.values():
            if entry.paused:
                yield entry

    def _place(self, entry: Entry, now: float) -> None:
        self._journal.note(entry.request.id)
        if self.frames is not None:
            self._tell(self.frames, entry)
        if not entry.paused:
            insort(self._rank(entry, now), (entry.key, entry), key=_first)
        self._look_again(entry, now)

    def _rank(self, entry: Entry, now: float) -> list[tuple[SortKey, Entry]]:
        """Compute its key anew. Returns the tier where it belongs by that."""
        request = entry.request
        entry.valid_until = math.inf
        if entry.hopeless:
            # Those of the priority mapping by level first: without one, a request counts as of the highest.
            worth = (request.order, request.level or 0, entry.cost.service_s / max(request.value, 1e-6))
            entry.key = (worth, request.arrival, request.id)
            return self._hopeless
        ranked = self.planning.rank_deferred if entry.deferred and self.planning else self._ordering.rank
        rank = ranked(request, entry.cost, now)
        key = None if self.frames is None else self.frames.key(request.id)
        entry.key = ((request.order, *(key or rank.key)), request.arrival, request.id)
        if rank.valid_until is not None:
            entry.valid_until = rank.valid_until
        return self._ready

    @staticmethod
    def _tell(frames: Frames, entry: Entry) -> None:
        """Frames rank what can go by worth alone: not what is paused or served last, nor what an operator moved."""
        if entry.paused or entry.hopeless or entry.request.order:
            frames.leave(entry.request.id)
        else:
            frames.join(entry.request)

    def _look_again(self, entry: Entry, now: float) -> None:
        """Once it becomes hopeless, its rank ends or it may be tried again. Costs may move that; where it is later than
        before it stays in the heap as it was, since an early look does no harm and the heap would fill up."""
        hopeless_at = math.inf if entry.hopeless else entry.hopeless_at
        at = math.inf
        for each in (hopeless_at, entry.valid_until, entry.retry_at, entry.not_before):
            if now < each < at:
                at = each
        if at < entry.turn_at:
            entry.turn_at = at
            heapq.heappush(self._turns, (at, entry.request.id))

    def _unplace(self, entry: Entry) -> None:
        if entry.paused:
            return
        tier = self._hopeless if entry.hopeless else self._ready
        index = bisect_left(tier, entry.key, key=_first)
        if index >= len(tier) or tier[index][1] is not entry:
            raise AssertionError(f"queue lost track of {entry.request.id}")
        del tier[index]


def _first(item: tuple[SortKey, Entry]) -> SortKey:
    return item[0]


def _row(entry: Entry, clock_s: float) -> QueueRow:
    request = entry.request
    tier = 2.0 if entry.paused else 1.0 if entry.hopeless else 0.0
    key = () if entry.paused else entry.key[0]
    return QueueRow(
        id=request.id,
        tenant=request.tenant,
        slo_class=request.slo_class,
        model=request.model,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        ttft_s=request.targets.ttft_s,
        arrived_at=round(request.arrival + clock_s, 3),
        due_at=round(request.ttft_due - entry.cost.prefill_s - entry.cost.first_byte_s + clock_s, 3),
        gives_up_at=round(entry.drop_at + clock_s, 3),
        order=[tier, *(max(-sys.float_info.max, min(each, sys.float_info.max)) for each in key)],
        hopeless=entry.hopeless,
        paused=entry.paused,
        priority=max(0, request.order) if request.order else request.priority,
    )


class QueueView:
    """Read-only view over the queues of all models, for console, metrics and tests."""

    def __init__(self, queues: dict[str, RequestQueue], now: float) -> None:
        self._queues = queues
        self._now = now

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    @property
    def tokens(self) -> int:
        return sum(queue.tokens for queue in self._queues.values())

    def by_class(self) -> dict[tuple[str, str], tuple[int, float | None]]:
        merged: dict[tuple[str, str], tuple[int, float | None]] = {}
        for queue in self._queues.values():
            for kind, (count, slack) in queue.by_class(self._now).items():
                known_count, known_slack = merged.get(kind, (0, None))
                slacks = [s for s in (slack, known_slack) if s is not None]
                merged[kind] = (known_count + count, min(slacks) if slacks else None)
        return merged

    def pressure(self, limit: int, now: float) -> dict[str, tuple[int, float]]:
        """For each model with a queue: its length, and the largest wait / TTFT target of its `limit` most urgent.

        Paused requests do not count: they wait for an operator, not for an instance.
        """
        found: dict[str, tuple[int, float]] = {}
        for model, queue in self._queues.items():
            if waiting := len(queue.ready) + len(queue.hopeless):
                first = [entry.request for _, entry in islice(chain(queue.ready, queue.hopeless), limit)]
                shares = [(now - r.arrival) / r.targets.ttft_s for r in first if r.targets.ttft_s > 0]
                found[model] = (waiting, max(shares, default=0.0))
        return found

    def ids(self) -> list[str]:
        """All waiting requests, model by model, in order."""
        return [entry.request.id for queue in self._queues.values() for entry in queue.entries()]

    def row(self, request_id: str, clock_s: float = 0.0) -> QueueRow | None:
        """One request; None if it does not wait. `clock_s` is added to its times, for another clock."""
        for queue in self._queues.values():
            if (entry := queue.get(request_id)) is not None:
                return _row(entry, clock_s)
        return None
