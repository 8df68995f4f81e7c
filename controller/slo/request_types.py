"""The types of requests by what they ask for (Concord ch. 3): latency, deadline, compound, best effort."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any


class RequestType(Enum):
    """`LATENCY`: targets for its first token and the pace after it. `DEADLINE`: a time for its whole answer.
    `COMPOUND`: a workflow, which counts once, however many requests it has. `BEST_EFFORT`: it named no target, no class
    and no priority, and its tenant has no default class."""

    LATENCY = "latency"
    DEADLINE = "deadline"
    COMPOUND = "compound"
    BEST_EFFORT = "best_effort"


def request_type(workflow: str, deadline_s: float | None, decisions: Iterable[Mapping[str, Any]]) -> RequestType:
    """Of a record: its workflow, its deadline in seconds, and what was decided for it, which tells where its targets
    came from. A share of a workflow's deadline makes no deadline request."""
    if workflow:
        return RequestType.COMPOUND
    if deadline_s is not None:
        return RequestType.DEADLINE
    by_default = any(step.get("kind") == "slo" and step.get("reason") == "defaults" for step in decisions)
    return RequestType.BEST_EFFORT if by_default else RequestType.LATENCY
