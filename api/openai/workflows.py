"""Workflows at a gateway: what is asked of Redis about them, together, and what is told it of their requests."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple, TypeVar

from api.openai.protocol.errors import ApiError, workflow_cancelled
from api.openai.protocol.schemas import Parsed, wrong
from api.openai.protocol.tool_bodies import of_a_request, of_a_tool
from controller.core.types import WorkflowCancellation
from controller.predict.pattern_graphs import MOST_NODES, GraphsInForce, kind_of
from controller.slo.workflow import GRAPH, LAST, WorkflowTime, past_from, rule_of, shares_from
from workers.live import LiveUnavailable, Talks
from workers.workflows import (
    AT_ONCE,
    MOST_NAMED,
    MOST_OPEN,
    CancelWorkflow,
    CountRequests,
    EndedCall,
    JoinedWorkflow,
    MemoryLost,
    MissedStep,
    OpenWorkflow,
    Order,
    OtherWorkflow,
    ReadWorkflow,
    RedisMemory,
    ReportTool,
    RestoreWorkflow,
    Stage,
    StepExists,
    StepOfWorkflow,
    TooManyWorkflows,
    WorkflowCancelled,
    WorkflowState,
    WrongParent,
    cancellations,
    remembers_since,
    run_orders,
)

log = logging.getLogger(__name__)

T = TypeVar("T")
Name = tuple[str, str]  # tenant, workflow
Ask = tuple[Order, asyncio.Future[Any]]
End = Callable[[str, str, str], None]  # tenant, workflow, and who cancelled it

UNKNOWN = "This tenant has no workflow with this id and a deadline."
AWAY = "Redis did not answer in time"
ASK_S = 0.25  # longest that Redis may take to answer
AWAY_S = 1.0  # after it did not answer in time, requests do not ask for so long
COUNT_S = 0.25  # in which what requests did is told together
LOOK_S = 0.25  # between two looks for cancelled workflows
MOST_COUNTED = 20_000  # workflows whose counts wait for Redis; those of others are lost
MOST_MISSED = 2_000  # steps that Redis is told of late, in some 50 ms; of older ones it never hears
MOST_KNOWN = 2_000  # workflows that a Redis which forgot them is told of again
MOST_CANCELLED = 10_000  # of which a gateway knows by itself that they are


class _Counts:
    __slots__ = ("answered", "aside", "ended_at", "ends", "failed", "seen", "tokens")

    def __init__(self) -> None:
        self.seen = self.answered = self.failed = self.tokens = 0
        self.aside = 0  # calls that are no step of the workflow: not let in, failed, or answered with what was kept
        self.ended_at: float | None = None  # monotonic: of the last answer
        self.ends: list[tuple[int, int, float]] = []  # number of the call, its output tokens, monotonic


class _Known(NamedTuple):
    deadline_s: float
    began: float  # monotonic
    stages: tuple[Stage, ...]


class _Round(NamedTuple):
    """What Redis is asked at once. `asks`: whose answers are waited for, the last of `orders`. `missed`: the run that
    told first of the missed steps that these are. `restored`: how many workflows it is told of again."""

    orders: list[Order]
    asks: list[Ask]
    missed: int = 0
    restored: int = 0


class Workflows:
    """`board` None: a gateway that runs alone knows of no other request.

    What is asked while Redis answers is asked together, that of all tenants in turn: a flood of one tenant must take
    neither the connections to Redis nor the time of the others.
    """

    def __init__(self, board: Talks | None = None, count: Callable[[Parsed], int] = lambda parsed: 0) -> None:
        self.board = board
        self.count = count  # tokens of a prompt
        self.alone = 0  # requests whose workflow could not be read
        self.graphs: Mapping[str, GraphsInForce] = {}  # by tenant
        self.matched = self.unmatched = 0  # requests that were compared with them
        self._waiting: dict[str, deque[Ask]] = {}  # by tenant, whose turn is next first
        self._asking: asyncio.Task[None] | None = None
        self._away_until = -math.inf  # loop time
        self._counts: dict[Name, _Counts] = {}  # what Redis has not been told yet
        self._unsure: dict[Name, _Counts] = {}  # what it was told last, until it answers
        self._teller, self._telling_number = secrets.token_hex(4), 0
        self._runs = 0  # of the script
        self._missed: deque[tuple[StepOfWorkflow, int, float]] = deque(maxlen=MOST_MISSED)  # run that asked, monotonic
        self._late: list[tuple[StepOfWorkflow, int, float]] = []  # of those, what Redis was told last, until it answers
        self._late_run = 0  # that told of them first
        self._telling: asyncio.TimerHandle | None = None
        self.memory = RedisMemory()
        self._known: OrderedDict[Name, _Known] = OrderedDict()  # the newest that its requests were steps of
        self._restores: deque[tuple[Name, _Known]] = deque()  # of those, what Redis is to be told again
        self._asks_memory = False  # whether Redis still remembers what it did
        self._cancelled: OrderedDict[Name, str] = OrderedDict()  # the newest, by whom
        self._recorded: OrderedDict[Name, float | None] = OrderedDict()  # of those that were recorded here: when

    # ---- requests -------------------------------------------------------------------------------------------------

    async def time_of(self, parsed: Parsed, tenant: str, request: str = "") -> WorkflowTime | None:
        """None for a request of no workflow, or of one without a deadline. `request`: its id. Raises ApiError.

        While Redis is unavailable, a request is served by what it says itself: a workflow must not stop with Redis.
        """
        if not parsed.workflow:
            return None
        asked = parsed.asked
        deadline_s, graphs = asked.workflow_deadline, self.graphs.get(tenant)
        wanted = graphs is not None and asked.workflow_steps_left is None
        call = (kind_of(parsed.model.name, parsed.stage), self.count(parsed), wanted)
        try:
            name = request if parsed.step is None else parsed.step.key
            step = StepOfWorkflow(tenant, parsed.workflow, deadline_s, *call, name, parsed.parents)
            joined = await self._ask(step)
        except WrongParent as error:
            raise wrong_parent(error, "metadata.") from None
        except StepExists:
            raise of_a_tool(name) from None
        except TooManyWorkflows:
            raise too_many("workflow_deadline") from None
        except WorkflowCancelled as cancelled:
            raise workflow_cancelled(parsed.workflow, cancelled.by) from None
        except LiveUnavailable as error:
            if self.board is not None:
                log.debug("the workflow of a request was not read: %s", error)
                self.alone += 1
            joined = None
        if joined is not None:
            self._know(tenant, parsed.workflow, joined)
            told = (joined.stages, parsed.stage, asked.workflow_steps_left)
            source, rule = "began" if joined.began else "inherited", rule_of(*told)
            tools = tuple(each._asdict() for each in joined.tools)
            shares = shares_from(*told)
            left = WorkflowTime(
                joined.left_s, shares, source, rule=rule, number=joined.number, tool_steps=tools,
                past=past_from(*told, joined.before), whole_s=joined.deadline_s,
                first=joined.number > 0 and not joined.before,
            )  # fmt: skip
            return left if graphs is None or rule != LAST else self._matched(left, graphs, joined)
        if deadline_s is None:
            return None
        alone = ((), "", asked.workflow_steps_left)
        return WorkflowTime(deadline_s, shares_from(*alone), "alone", rule=rule_of(*alone))

    def take(self, graphs: Mapping[str, GraphsInForce]) -> None:
        """The pattern graphs in force, by tenant."""
        self.graphs = graphs

    def _matched(self, left: WorkflowTime, graphs: GraphsInForce, joined: JoinedWorkflow) -> WorkflowTime:
        """With the shares of the recorded workflow that this one is most like by now, if it is like any."""
        match = graphs.graphs.match(joined.calls, max(0, joined.number - MOST_NODES)) if joined.calls else None
        if match is None:
            self.unmatched += 1
            return left
        self.matched += 1
        return left._replace(
            shares=match.seconds,
            past=graphs.graphs.seconds_before(match),
            rule=GRAPH,
            graph_version=graphs.version,
            similarity=match.similarity,
        )

    def check(self, tenant: str, workflow: str) -> None:
        """Raises ApiError if the workflow was cancelled after its request had asked for it."""
        by = self._cancelled.get((tenant, workflow))
        if by is not None:
            raise workflow_cancelled(workflow, by)

    def seen(self, tenant: str, workflow: str) -> None:
        """A request of the workflow was let in."""
        if (counts := self._count(tenant, workflow)) is not None:
            counts.seen += 1

    def refused(self, tenant: str, workflow: str, number: int) -> None:
        """A request that has asked for its workflow was not let in: it is none of the calls that are matched."""
        if number > 0 and (counts := self._count(tenant, workflow)) is not None:
            counts.aside += 1
            if number <= MOST_NODES:
                counts.ends.append((number, -1, time.monotonic()))

    def ended(
        self,
        tenant: str,
        workflow: str,
        *,
        answered: bool,
        output_tokens: int,
        number: int = 0,
        computed: bool = True,
        given_up: bool = False,
    ) -> None:
        """A request that was seen has ended. `output_tokens`: of its answer, which an engine `computed` for it, or
        which was kept. `number`: of `WorkflowTime`. `given_up`: as `controller.core.types` has it."""
        if (counts := self._count(tenant, workflow)) is None:
            return
        if number and not (answered and computed):
            counts.aside += 1
        if number and number <= MOST_NODES:
            counts.ends.append((number, output_tokens if answered and computed else -1, time.monotonic()))
        if answered:
            counts.answered += 1
            counts.tokens += output_tokens
            counts.ended_at = time.monotonic()
        elif given_up:
            counts.seen -= 1  # as if it had not been sent: the step counts when it is asked for again
        else:
            counts.failed += 1

    def _count(self, tenant: str, workflow: str) -> _Counts | None:
        if self.board is None:
            return None
        counts = self._counts.get((tenant, workflow))
        if counts is None and len(self._counts) < MOST_COUNTED:
            counts = self._counts[tenant, workflow] = _Counts()
        if self._telling is None:
            self._telling = asyncio.get_running_loop().call_later(COUNT_S, self._tell)
        return counts

    def _tell(self) -> None:
        self._telling = None
        self._begin_asking()

    # ---- the client's own calls -----------------------------------------------------------------------------------

    async def open(self, order: OpenWorkflow) -> WorkflowState:
        """Raises ApiError."""
        try:
            found: WorkflowState = await self._answer(order)
        except TooManyWorkflows:
            raise too_many("deadline") from None
        except OtherWorkflow:
            told = "id: this tenant already has a workflow with this id, with another deadline or stages, or cancelled."
            raise ApiError("workflow_exists", told, param="id", final=True) from None
        self._know(order.tenant, order.workflow, found)
        return found

    async def read(self, tenant: str, workflow: str) -> WorkflowState:
        """Raises ApiError."""
        return _known(await self._answer(ReadWorkflow(tenant, workflow)))

    async def cancel(self, tenant: str, workflow: str, by: str) -> WorkflowState:
        """Raises ApiError. Other gateways hear of it when they look next."""
        found = _known(await self._answer(CancelWorkflow(tenant, workflow, by)))
        self._remember(tenant, workflow, found.cancelled_by)
        return found

    def to_record(self, tenant: str, workflow: str, found: WorkflowState) -> WorkflowCancellation | None:
        """What this gateway records of one that was cancelled, once. Also if it was cancelled before: the first answer
        of Redis may have been lost, and the client asks again."""
        cancellation = found.cancellation(tenant, workflow, time.time())
        if cancellation is None or self._recorded.get((tenant, workflow)) == found.cancelled_at:
            return None
        self._recorded[tenant, workflow] = found.cancelled_at
        self._recorded.move_to_end((tenant, workflow))
        if len(self._recorded) > MOST_CANCELLED:
            self._recorded.popitem(last=False)
        return cancellation

    async def report(self, order: ReportTool) -> None:
        """Raises ApiError."""
        try:
            number = await self._answer(order)
        except WrongParent as error:
            raise wrong_parent(error, "") from None
        except StepExists:
            raise of_a_request(order.key) from None
        except WorkflowCancelled as cancelled:
            raise workflow_cancelled(order.workflow, cancelled.by) from None
        if number is None:
            raise ApiError("not_found", UNKNOWN)

    async def _answer(self, order: Order) -> Any:
        try:
            return await self._ask(order)
        except LiveUnavailable:
            if self.board is None:
                raise ApiError("workflows_unavailable", "This gateway runs alone and keeps no workflows.") from None
            told = "Workflows cannot be read or changed now. Try again shortly."
            raise ApiError("workflows_unavailable", told, retry_after_s=1.0) from None

    # ---- cancelled workflows --------------------------------------------------------------------------------------

    async def watch(self, end: End) -> None:
        """Until cancelled: `end` is called for each workflow that is cancelled, at whichever gateway or page. The first
        look reads all that are kept: a request may have been let in before it whose workflow was cancelled since."""
        board, after = self.board, "0-0"
        if board is None:
            return
        while True:
            try:
                await self._look_at_memory(board)
                for each in await board.run(cancellations(after)):
                    after = each.id
                    self._remember(each.tenant, each.workflow, each.by)
                    end(each.tenant, each.workflow, each.by)
            except LiveUnavailable as error:
                log.debug("cancelled workflows were not read: %s", error)
            await asyncio.sleep(LOOK_S)

    def _remember(self, tenant: str, workflow: str, by: str) -> None:
        self._cancelled[tenant, workflow] = by
        self._cancelled.move_to_end((tenant, workflow))
        if len(self._cancelled) > MOST_CANCELLED:
            self._cancelled.popitem(last=False)

    # ---- a Redis that has forgotten -------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Since when Redis remembers: with that, the next process of this gateway sees a loss before it began."""
        return {"since": self.memory.since}

    def restore(self, state: Mapping[str, Any]) -> None:
        """What `state` said. Raises what a state of another form raises."""
        self.memory.since = f"{float(state['since']):.6f}" if state["since"] else ""

    async def _look_at_memory(self, board: Talks) -> None:
        """A gateway without requests notices too, and tells what it knows before others ask for it."""
        since = await board.run(remembers_since())
        if not self.memory.since:
            self.memory.since = since
        elif since != self.memory.since:
            self._asks_memory = True
            self._begin_asking()

    def _know(self, tenant: str, workflow: str, found: JoinedWorkflow | WorkflowState) -> None:
        if found.deadline_s is not None:
            began = time.monotonic() + found.left_s - found.deadline_s
            self._known[tenant, workflow] = _Known(found.deadline_s, began, found.stages)
            self._known.move_to_end((tenant, workflow))
            if len(self._known) > MOST_KNOWN:
                self._known.popitem(last=False)

    def _next_restored(self) -> list[Order]:
        now = time.monotonic()
        return [
            RestoreWorkflow(*name, each.deadline_s, each.stages, now - each.began)
            for name, each in islice(self._restores, AT_ONCE)
        ]

    def _tell_again(self, asks: Sequence[Ask]) -> None:
        """Redis was asked `asks` and did nothing: they are next, once it knows again what they are about."""
        self._restores = deque(each for each in self._known.items() if each[0] not in self._cancelled)
        for order, answer in reversed(asks):
            self._waiting.setdefault(order.tenant, deque()).appendleft((order, answer))

    # ---- Redis ----------------------------------------------------------------------------------------------------

    async def _ask(self, order: Order) -> Any:
        """Raises LiveUnavailable, and what the order's `found` raises."""
        loop = asyncio.get_running_loop()
        if self.board is None:
            raise LiveUnavailable(AWAY)
        if loop.time() < self._away_until:
            self._miss(order)
            raise LiveUnavailable(AWAY)
        answer: asyncio.Future[Any] = loop.create_future()
        self._waiting.setdefault(order.tenant, deque()).append((order, answer))
        self._begin_asking()
        return order.found(await answer)

    def _begin_asking(self) -> None:
        if self._asking is None and self.board is not None:
            self._asking = asyncio.create_task(self._run(self.board))

    async def _run(self, board: Talks) -> None:
        """Until nothing waits. What requests did goes first, so that who asks next sees it."""
        asks: list[Ask] = []
        try:
            while self.untold or self._waiting:
                self._runs += 1
                orders, asks, missed, restored = self._next_round()
                self._asks_memory = False
                dialogue = run_orders(orders, self._teller, self._runs, missed=missed, memory=self.memory)
                try:
                    async with asyncio.timeout(ASK_S):
                        found = await board.run(dialogue)
                except MemoryLost:
                    self._tell_again(asks)
                    continue
                if restored:
                    self._restores = deque(islice(self._restores, restored, None))
                elif missed:
                    self._late = []
                else:
                    self._unsure = {}
                for (_, answer), raw in zip(asks, found[len(orders) - len(asks) :], strict=True):
                    if not answer.done():
                        answer.set_result(raw)
        except (LiveUnavailable, TimeoutError):
            self._away_until = asyncio.get_running_loop().time() + AWAY_S
        finally:
            self._asking = None
            sent = len(asks)
            for place, (order, answer) in enumerate((*asks, *chain.from_iterable(self._waiting.values()))):
                if not answer.done():
                    self._miss(order, self._runs if place < sent else 0)
                    answer.set_exception(LiveUnavailable(AWAY))
            self._waiting.clear()
            if self.untold and self._telling is None:
                self._telling = asyncio.get_running_loop().call_later(AWAY_S, self._tell)

    def _next_round(self) -> _Round:
        if orders := self._next_restored():
            return _Round(orders, [], restored=len(orders))
        if orders := self._next_missed():
            return _Round(orders, [], missed=self._late_run)
        told = self._next_untold()
        asks = self._next(AT_ONCE - len(told))
        return _Round([*self._told(told), *(order for order, _ in asks)], asks)

    @property
    def untold(self) -> bool:
        """Something is left to tell Redis, or it has not answered yet."""
        told = self._counts or self._unsure or self._missed or self._late or self._restores
        return bool(told or self._asks_memory)

    def _miss(self, order: Order, run: int = 0) -> None:
        """A step went on without an answer. Redis is told when it is back, or later steps could not name it as their
        parent, and one that it counted all the same would run forever. `run`: that asked for it, 0 for none."""
        if isinstance(order, StepOfWorkflow):
            self._missed.append((order, run, time.monotonic()))
            if self._telling is None:
                self._telling = asyncio.get_running_loop().call_later(AWAY_S, self._tell)

    def _next_missed(self) -> list[Order]:
        """Before all else, and alone: what is told of a workflow that one of them began must find it. As with counts,
        what Redis did not answer comes again, unchanged."""
        if not self._late and self._missed:
            self._late = [self._missed.popleft() for _ in range(min(AT_ONCE, len(self._missed)))]
            self._late_run = self._runs
        now = time.monotonic()
        return [MissedStep(step, asked, now - at) for step, asked, at in self._late]

    def _next_untold(self) -> dict[Name, _Counts]:
        """What Redis did not answer comes again, unchanged: it may have counted it, or may yet, and tells it by its
        number. Only then comes what is new."""
        if not self._unsure and self._counts:
            names = list(islice(self._counts, AT_ONCE // 2))
            self._unsure = {name: self._counts.pop(name) for name in names}
            self._telling_number += 1
        return self._unsure

    def _told(self, told: Mapping[Name, _Counts]) -> Iterator[Order]:
        now = time.monotonic()
        for (tenant, workflow), each in told.items():
            ago_s = None if each.ended_at is None else now - each.ended_at
            ends = tuple(EndedCall(number, output, now - at) for number, output, at in each.ends)
            counts = (each.seen, each.answered, each.failed, each.tokens)
            by = (self._teller, self._telling_number)
            yield CountRequests(tenant, workflow, *counts, ago_s, ends, each.aside, *by)

    def _next(self, most: int) -> list[Ask]:
        """One of each tenant, then a second one of each, without those whose clients have gone."""
        asks: list[Ask] = []
        while self._waiting and len(asks) < most:
            tenant = next(iter(self._waiting))
            waiting = self._waiting.pop(tenant)
            ask = waiting.popleft()
            if waiting:
                self._waiting[tenant] = waiting
            if not ask[1].done():
                asks.append(ask)
        return asks


def _known(found: WorkflowState | None) -> WorkflowState:
    if found is None:
        raise ApiError("not_found", UNKNOWN)
    return found


def wrong_parent(error: WrongParent, where: str) -> ApiError:
    what = (
        f"{error.parent!r} began after this step first did, so the two would depend on each other"
        if error.cycle
        else f"{error.parent!r} is no step of this workflow, or not one of its last {MOST_NAMED}"
    )
    return wrong(f"{where}parents", what)


def too_many(field: str) -> ApiError:
    told = f"{field}: this tenant has {MOST_OPEN} open workflows with a deadline, which is the most."
    return ApiError("rate_limit_exceeded", told, param=field, retry_after_s=60.0)
