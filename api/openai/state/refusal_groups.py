"""Refusals that come faster than a rate are recorded as one: a tenant that hammers must not fill PostgreSQL.

The first `SINGLE` refusals of a second are recorded one by one. What else is refused in that second for the same
tenant, class, model and reason becomes one record: the first of them, with how many requests it stands for. All figures
count every request. A group never spans two minutes, since the roll-up is by minute. Decision 175.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import NamedTuple, Protocol

from controller.core.types import RequestRecord

SINGLE = 10  # refusals of one kind in one second that are recorded one by one
OPEN_S = 1.0  # how long a group waits for more, after its first refusal


class RecordSink(Protocol):
    def add(self, record: RequestRecord) -> None: ...


class Kind(NamedTuple):
    """What refusals of one group have in common. `second`: of their arrival, epoch."""

    tenant: str
    slo_class: str
    model: str
    error_code: str
    reason: str
    second: int


class _Group:
    __slots__ = ("first_at", "last_at", "prompt_tokens", "requests", "sample", "single")

    def __init__(self) -> None:
        self.single = 0
        self.sample: RequestRecord | None = None
        self.requests = 0
        self.prompt_tokens = 0
        self.first_at = math.inf
        self.last_at = -math.inf

    def add(self, record: RequestRecord) -> None:
        self.sample = self.sample or record
        self.requests += 1
        self.prompt_tokens += record.prompt_tokens
        self.first_at = min(self.first_at, record.arrived_at)
        self.last_at = max(self.last_at, record.arrived_at)

    def record(self) -> RequestRecord | None:
        if self.sample is None or self.requests == 1:
            return self.sample
        return replace(
            self.sample,
            arrived_at=self.first_at,
            stands_for=self.requests,
            last_arrived_at=self.last_at,
            all_prompt_tokens=self.prompt_tokens,
        )


class RefusalGroups:
    """Between ledger and recorder, on the gateway's loop."""

    def __init__(self, sink: RecordSink) -> None:
        self._sink = sink
        self._groups: dict[Kind, _Group] = {}

    def add(self, record: RequestRecord, reason: str) -> None:
        """Of a request that was refused before any engine was asked. `reason`: why it missed its targets, in one short
        code."""
        second = math.floor(record.arrived_at)
        kind = Kind(record.tenant, record.slo_class, record.model, record.error_code, reason, second)
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
        record = group.record() if group is not None else None
        if record is not None:
            self._sink.add(record)

    def close(self) -> None:
        """At shutdown: records for all groups that are open."""
        for kind in list(self._groups):
            self._close(kind)
