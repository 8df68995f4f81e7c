"""Refusals that come faster than a rate are recorded as one: a tenant that hammers must not fill PostgreSQL.

The first `SINGLE` refusals of a second are recorded one by one. What else is refused in that second for the same
tenant, class, model, type and reason becomes one record: the first of them, with how many requests it stands for.
Requests of a workflow count for that workflow, so each of the first MOST_WORKFLOWS has a record of its own; those of
more of them have one that names none of them and says of how many they were. All figures count every request. A group
never spans two minutes, since the roll-up is by minute. Decisions 175, 253.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import NamedTuple, Protocol

from controller.core.types import RequestRecord, WorkflowCancellation
from controller.slo.request_types import RequestType, type_of

MOST_WORKFLOWS = 20  # clients choose their names
SINGLE = 10  # refusals of one kind in one second that are recorded one by one
OPEN_S = 1.0  # how long a group waits for more, after its first refusal


class RecordSink(Protocol):
    def add(self, record: RequestRecord) -> None: ...

    def cancelled(self, cancellation: WorkflowCancellation) -> None: ...


class Kind(NamedTuple):
    """What refusals of one group have in common. `second`: of their arrival, epoch."""

    tenant: str
    slo_class: str
    model: str
    type: RequestType
    error_code: str
    reason: str
    second: int


class _Sum:
    """Of refusals that become one record."""

    __slots__ = ("first_at", "last_at", "prompt_tokens", "requests", "sample")

    def __init__(self, sample: RequestRecord) -> None:
        self.sample = sample
        self.requests = 0
        self.prompt_tokens = 0
        self.first_at = math.inf
        self.last_at = -math.inf

    def add(self, record: RequestRecord) -> None:
        self.requests += 1
        self.prompt_tokens += record.prompt_tokens
        self.first_at = min(self.first_at, record.arrived_at)
        self.last_at = max(self.last_at, record.arrived_at)

    def record(self, workflows: int = 1) -> RequestRecord:
        """`workflows`: of how many they are; the record of more than one names none."""
        if workflows > 1:
            figures = {"workflows": workflows}
            reason = "workflow_not_named"  # by which `type_of` knows it
            step = {"kind": "workflow", "reason": reason, "subject": "", "at": 0.0, "figures": figures}
            self.sample = replace(self.sample, workflow="", stage="", decisions=[*self.sample.decisions, step])
        if self.requests == 1:
            return self.sample
        return replace(
            self.sample,
            arrived_at=self.first_at,
            stands_for=self.requests,
            last_arrived_at=self.last_at,
            all_prompt_tokens=self.prompt_tokens,
        )


class _Group:
    """`sums` by workflow, "" for requests of none; `rest` of those workflows, by name, that are not in it."""

    __slots__ = ("rest", "single", "sums", "unnamed")

    def __init__(self) -> None:
        self.single = 0
        self.sums: dict[str, _Sum] = {}
        self.rest: _Sum | None = None
        self.unnamed: set[str] = set()

    def add(self, record: RequestRecord) -> None:
        into = self.sums.get(record.workflow)
        if into is None and len(self.sums) < MOST_WORKFLOWS:
            into = self.sums[record.workflow] = _Sum(record)
        if into is None:
            self.unnamed.add(record.workflow)
            into = self.rest = self.rest or _Sum(record)
        into.add(record)

    @property
    def requests(self) -> int:
        return sum(each.requests for each in self.sums.values()) + (self.rest.requests if self.rest else 0)

    def records(self) -> list[RequestRecord]:
        rest = [] if self.rest is None else [self.rest.record(len(self.unnamed))]
        return [each.record() for each in self.sums.values()] + rest


class RefusalGroups:
    """Between ledger and recorder, on the gateway's loop."""

    def __init__(self, sink: RecordSink) -> None:
        self._sink = sink
        self._groups: dict[Kind, _Group] = {}

    def add(self, record: RequestRecord, reason: str) -> None:
        """Of a request that was refused before any engine was asked. `reason`: why it missed its targets, in one short
        code."""
        second = math.floor(record.arrived_at)
        asked = record.tenant, record.slo_class, record.model, type_of(record)
        kind = Kind(*asked, record.error_code, reason, second)
        group = self._groups.get(kind)
        if group is None:
            group = self._groups[kind] = _Group()
            asyncio.get_running_loop().call_later(OPEN_S, self._close, kind)
        if group.single < SINGLE:
            group.single += 1
            self._sink.add(record)
        else:
            group.add(record)

    @property
    def waiting(self) -> int:
        """Refused requests that no record stands for yet."""
        return sum(group.requests for group in self._groups.values())

    def _close(self, kind: Kind) -> None:
        group = self._groups.pop(kind, None)
        for record in group.records() if group is not None else ():
            self._sink.add(record)

    def close(self) -> None:
        """At shutdown: records for all groups that are open."""
        for kind in list(self._groups):
            self._close(kind)
