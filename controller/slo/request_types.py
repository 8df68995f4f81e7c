"""The types of requests by what they ask for (Concord ch. 3): latency, deadline, compound, best effort."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from controller.core.types import Outcome, RequestRecord

# Reason of a step of a record for refusals of several workflows that names none of them.
NOT_NAMED = "workflow_not_named"


class RequestType(Enum):
    """`LATENCY`: targets for its first token and the pace after it. `DEADLINE`: a time for its whole answer.
    `COMPOUND`: a workflow, which counts once, however many requests it has. `BEST_EFFORT`: it named no target, no class
    and no priority, and its tenant has no default class."""

    LATENCY = "latency"
    DEADLINE = "deadline"
    COMPOUND = "compound"
    BEST_EFFORT = "best_effort"


def request_type(workflow: str, deadline_s: float | None, decisions: Sequence[Mapping[str, Any]]) -> RequestType:
    """Of a record: its workflow, its deadline in seconds, and what was decided for it, which tells where its targets
    came from. A share of a workflow's deadline makes no deadline request."""
    if workflow or any(step.get("reason") == NOT_NAMED for step in decisions):
        return RequestType.COMPOUND
    if deadline_s is not None:
        return RequestType.DEADLINE
    by_default = any(step.get("kind") == "slo" and step.get("reason") == "defaults" for step in decisions)
    return RequestType.BEST_EFFORT if by_default else RequestType.LATENCY


def type_of(record: RequestRecord) -> RequestType:
    """As `request_type`."""
    needed = record.decisions if not record.slo_class or record.stands_for > 1 else ()
    return request_type(record.workflow, record.target_deadline_s, needed)


class GoodputCounts(NamedTuple):
    """What one record adds to the goodput of its type. `finished`: requests, misses included, cancelled ones not.
    `tokens`: of the answer, of a deadline request those of the prompt too. `goodput_tokens`: those of them in time."""

    finished: int
    in_time: int
    cancelled: int
    tokens: int
    goodput_tokens: int


def goodput_counts(record: RequestRecord, kind: RequestType) -> GoodputCounts:
    """Of a request without a workflow."""
    if record.counted_as == Outcome.CANCELLED:
        return GoodputCounts(0, 0, record.stands_for, 0, 0)
    prompt = record.prompt_tokens if kind is RequestType.DEADLINE else 0
    tokens = prompt + record.output_tokens if record.outcome == Outcome.OK else 0
    return GoodputCounts(record.stands_for, int(record.attained), 0, tokens, record.goodput_tokens)
