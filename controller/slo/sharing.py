"""Equal requests that share one call at an engine: which targets the call gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from controller.core.types import Request, Targets


def call_for(requests: Sequence[Request], call: Request, request_id: str) -> Request:
    """The call as it is to go on, as `request_id`: due when the first of the requests that share it is, and waiting as
    long as the last of them does. The call's own arrival stays.

    It is served late and not refused: what one of them asks for must not cost the others their answer.
    """
    return replace(
        call,
        id=request_id,
        targets=earliest([(request.arrival - call.arrival, request.targets) for request in requests]),
        value=max(request.value for request in requests),
        may_defer=True,
        workflow_left_s=first_workflow_s(requests, call),
        whole_s=None,
    )


def first_workflow_s(requests: Sequence[Request], call: Request) -> float | None:
    """From the call's arrival until the first workflow of them is due, of those that were not late when they asked:
    one that was must not cost the others their place. None if one of them is of no workflow with a deadline: its own
    targets are not a share of one, so nothing makes up for them."""
    left = [(request.workflow_left_s, request.arrival - call.arrival) for request in requests]
    due = [(left_s > 0, left_s + after) for left_s, after in left if left_s is not None]
    if len(due) < len(requests):
        return None
    return min((at for able, at in due if able), default=max(at for _, at in due))


def earliest(shared: Sequence[tuple[float, Targets]]) -> Targets:
    """Targets that meet all of these; each comes with the seconds by which its request arrived after the call."""
    deadlines = [after + each.deadline_s for after, each in shared if each.deadline_s is not None]
    thinking = [after + each.thinking_s for after, each in shared if each.thinking_s is not None]
    return Targets(
        ttft_s=min(after + each.ttft_s for after, each in shared),
        tpot_s=min(each.tpot_s for _, each in shared),
        deadline_s=min(deadlines, default=None),
        waiting_time_s=max(after + each.waiting_time_s for after, each in shared),
        thinking_s=min(thinking, default=None),
    )
