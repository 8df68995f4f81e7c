"""Requests of workflows: each gets its share of the time that the workflow has left, at whichever gateway it comes."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from itertools import chain

from api.openai.protocol.errors import ApiError
from api.openai.protocol.schemas import Parsed
from controller.slo.workflow import WorkflowTime
from workers.live import LiveUnavailable, Talks
from workers.workflows import AT_ONCE, MOST_OPEN, JoinedWorkflow, StepOfWorkflow, TooManyWorkflows, join_workflows

log = logging.getLogger(__name__)

AWAY = "Redis did not answer in time"
Joined = JoinedWorkflow | TooManyWorkflows | None
Ask = tuple[StepOfWorkflow, asyncio.Future[Joined]]

ASK_S = 0.25  # longest that Redis may take to answer
AWAY_S = 1.0  # after it did not answer in time, requests do not ask for so long


class Workflows:
    """`board` None: a gateway that runs alone knows of no other request.

    Requests that come while Redis answers are asked about together, those of all tenants in turn: a flood of one tenant
    must take neither the connections to Redis nor the time of the others.
    """

    def __init__(self, board: Talks | None = None) -> None:
        self.board = board
        self.alone = 0  # requests whose workflow could not be read
        self._waiting: dict[str, deque[Ask]] = {}  # by tenant, whose turn is next first
        self._asking: asyncio.Task[None] | None = None
        self._away_until = -math.inf  # loop time

    async def time_of(self, parsed: Parsed, tenant: str) -> WorkflowTime | None:
        """None for a request of no workflow, or of one without a deadline. Raises ApiError.

        While Redis is unavailable, a request is served by what it says itself: a workflow must not stop with Redis.
        """
        if not parsed.workflow:
            return None
        deadline_s = parsed.asked.workflow_deadline
        steps_left = parsed.asked.workflow_steps_left or 1
        try:
            joined = await self._join(StepOfWorkflow(tenant, parsed.workflow, deadline_s))
        except TooManyWorkflows:
            raise ApiError(
                "rate_limit_exceeded",
                f"workflow_deadline: this tenant has {MOST_OPEN} open workflows with a deadline, which is the most.",
                param="workflow_deadline",
                retry_after_s=60.0,
            ) from None
        except LiveUnavailable as error:
            log.debug("the workflow of a request was not read: %s", error)
            self.alone += 1
            joined = None
        if joined is not None:
            return WorkflowTime(joined.left_s, steps_left, "began" if joined.began else "inherited")
        return None if deadline_s is None else WorkflowTime(deadline_s, steps_left, "alone")

    async def _join(self, step: StepOfWorkflow) -> JoinedWorkflow | None:
        loop = asyncio.get_running_loop()
        if self.board is None:
            return None
        if loop.time() < self._away_until:
            raise LiveUnavailable(AWAY)
        answer: asyncio.Future[Joined] = loop.create_future()
        self._waiting.setdefault(step.tenant, deque()).append((step, answer))
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask(self.board))
        joined = await answer
        if isinstance(joined, TooManyWorkflows):
            raise joined
        return joined

    async def _ask(self, board: Talks) -> None:
        """Until no request waits."""
        asks: list[Ask] = []
        try:
            while asks := self._next():
                async with asyncio.timeout(ASK_S):
                    found = await board.run(join_workflows([step for step, _ in asks]))
                for (_, answer), joined in zip(asks, found, strict=True):
                    if not answer.done():
                        answer.set_result(joined)
        except (LiveUnavailable, TimeoutError):
            self._away_until = asyncio.get_running_loop().time() + AWAY_S
        finally:
            self._asking = None
            for _, answer in (*asks, *chain.from_iterable(self._waiting.values())):
                if not answer.done():
                    answer.set_exception(LiveUnavailable(AWAY))
            self._waiting.clear()

    def _next(self) -> list[Ask]:
        """One request of each tenant, then a second one of each, without those whose clients have gone."""
        asks: list[Ask] = []
        while self._waiting and len(asks) < AT_ONCE:
            tenant = next(iter(self._waiting))
            waiting = self._waiting.pop(tenant)
            ask = waiting.popleft()
            if waiting:
                self._waiting[tenant] = waiting
            if not ask[1].done():
                asks.append(ask)
        return asks
