"""Requests of workflows: each gets its share of the time that the workflow has left, at whichever gateway it comes."""

from __future__ import annotations

import asyncio
import logging

from api.openai.protocol.errors import ApiError
from api.openai.protocol.schemas import Parsed
from controller.slo.workflow import WorkflowTime
from workers.live import LiveUnavailable, Talks
from workers.workflows import MOST_OPEN, JoinedWorkflow, TooManyWorkflows, join_workflow

log = logging.getLogger(__name__)

ASK_S = 0.1  # longest that a request waits for Redis; a second call of a workflow is rarely that urgent


class Workflows:
    """`board` None: a gateway that runs alone knows of no other request."""

    def __init__(self, board: Talks | None = None) -> None:
        self.board = board

    async def time_of(self, parsed: Parsed, tenant: str) -> WorkflowTime | None:
        """None for a request of no workflow, or of one without a deadline. Raises ApiError.

        While Redis is away, a request is served by what it says itself: a workflow must not stop with Redis.
        """
        if not parsed.workflow:
            return None
        deadline_s = parsed.asked.workflow_deadline
        steps_left = parsed.asked.workflow_steps_left or 1
        try:
            joined = await self._joined(tenant, parsed.workflow, deadline_s)
        except TooManyWorkflows:
            raise ApiError(
                "rate_limit_exceeded",
                f"workflow_deadline: this tenant has {MOST_OPEN} open workflows with a deadline, which is the most.",
                param="workflow_deadline",
                retry_after_s=60.0,
            ) from None
        except (LiveUnavailable, TimeoutError) as error:
            log.debug("the workflow of a request was not read: %s", error)
            joined = None
        if joined is not None:
            return WorkflowTime(joined.left_s, steps_left, "began" if joined.began else "inherited")
        return None if deadline_s is None else WorkflowTime(deadline_s, steps_left, "alone")

    async def _joined(self, tenant: str, workflow: str, deadline_s: float | None) -> JoinedWorkflow | None:
        if self.board is None:
            return None
        async with asyncio.timeout(ASK_S):
            return await self.board.run(join_workflow(tenant, workflow, deadline_s))
