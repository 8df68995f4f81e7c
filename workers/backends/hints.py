"""What a gateway knows of a request beyond its targets, for engines whose own scheduler reads it.

An engine has a clock of its own, so times are sent as seconds left at the moment of the call. The same numbers go to
every kind of engine (`fields`); how they travel is the adapter's business. A client cannot send them: the gateway
builds the body of a call from the fields that it knows (`api.openai.protocol.schemas`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from hashlib import sha256
from typing import NamedTuple

from controller.core.types import Request

LONGEST_S = 86_400.0  # a day: engines refuse longer times
NAME_HEX = 16  # of the names of workflows and tenants at engines


class Hints(NamedTuple):
    """Seconds are left as of the call, negative once they have passed; infinite: not limited. `due_s`: until the whole
    answer is due, which for a workflow's request is the end of its stage. `workflow_s`: until its workflow is due.
    `lower`, `upper`: bounds of the answer in tokens; None: not known. `workflow`: the same for the requests of one
    workflow of one tenant; "": none with a deadline. `waiting_s`: until it must have begun. `tenant`: the same for all
    of its requests; "": not known."""

    due_s: float = math.inf
    workflow_s: float = math.inf
    lower: int | None = None
    upper: int | None = None
    workflow: str = ""
    waiting_s: float = math.inf
    tenant: str = ""

    def fields(self, queued: bool = False) -> Mapping[str, float | int | str]:
        """What there is to tell, by field of a request. `queued`: it waits in the engine's queue in place of a
        gateway's, so that the engine ends it when it has waited too long."""
        found: dict[str, float | int | str] = {}
        waiting_s = self.waiting_s if queued else math.inf
        times = (("due_in", self.due_s), ("workflow_due_in", self.workflow_s), ("waiting_in", waiting_s))
        for name, value in times:
            if math.isfinite(value):
                found[name] = round(max(-LONGEST_S, min(value, LONGEST_S)), 6)
        if self.lower is not None and self.upper is not None:
            found["length_lower"], found["length_upper"] = self.lower, self.upper
        if self.workflow:
            found["workflow"] = self.workflow
        if self.tenant:
            found["tenant"] = self.tenant
        return found


def hints_of(request: Request, now: float, workflow_due: float = math.inf, waits_until: float = math.inf) -> Hints:
    """Of a call that is made `now`. `workflow_due`: on the same clock; infinite: its workflow has no deadline. A call
    that requests of several workflows share has the first of theirs, and is of none. `waits_until`: on the same clock;
    it waits no longer than that either."""
    deadline_s = request.targets.deadline_s
    bounded = request.least_tokens is not None and request.most_tokens is not None
    return Hints(
        due_s=math.inf if deadline_s is None else request.arrival + deadline_s - now,
        workflow_s=workflow_due - now,
        lower=request.least_tokens if bounded else None,
        upper=request.most_tokens if bounded else None,
        workflow=_name(request) if math.isfinite(workflow_due) and request.workflow else "",
        waiting_s=min(request.arrival + request.targets.waiting_time_s, waits_until) - now,
        tenant=_tenant(request.tenant) if request.tenant else "",
    )


def _name(request: Request) -> str:
    """Two tenants may call their workflows the same, and engines need not know what they are called."""
    return sha256(request.tenant.encode() + b"\0" + request.workflow.encode()).hexdigest()[:NAME_HEX]


@lru_cache(maxsize=10_000)
def _tenant(name: str) -> str:
    return sha256(name.encode()).hexdigest()[:NAME_HEX]
