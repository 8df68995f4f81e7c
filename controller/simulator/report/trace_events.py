"""A run as a Chrome trace: steps in a lane for each instance, and each request's stages as nested spans.

The trace-event format (JSON object form) opens in Perfetto and chrome://tracing. Steps are complete events ("X"); a
leap is one of them, with its `repeats`. Requests are nestable asynchronous events ("b", "e") that share an id. Times
are microseconds of virtual time. Events are written as they happen, so memory stays constant. Their number is limited,
so that the file can be opened; the last event tells how many were left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from controller.core.steps import Step
from controller.simulator.report.results import SimRecord

MOST_EVENTS = 1_000_000
REQUESTS = 0  # the process of all requests; instances count from 1
MICRO = 1e6


class TraceSpan(NamedTuple):
    name: str
    start: float
    end: float


def stages(record: SimRecord, ended_at: float) -> Iterator[TraceSpan]:
    """Queue, prefill, transfer and decode of one request, in order and all within its life. The first token ends the
    prefill, or the transfer of a disaggregated request."""
    marks = [("queue", record.queue_s), ("prefill", record.ttft_s), ("decode", None)]
    if record.kv_transfer_s is not None and record.ttft_s is not None:
        prefilled = record.ttft_s - record.kv_transfer_s
        marks[1:2] = [("prefill", prefilled), ("transfer", record.ttft_s)]
    latest = ended_at if record.ttft_s is None else min(ended_at, record.at + record.ttft_s)
    start = record.at
    for name, after in marks:
        end = ended_at if after is None else record.at + after
        end = max(start, min(end, latest if name in ("queue", "prefill") else ended_at))
        if end > start:
            yield TraceSpan(name, start, end)
        start = end


class TraceWriter:
    """`write` takes text, as a file's does. Events are not kept; `close` ends the JSON."""

    def __init__(self, write: Callable[[str], object], most: int = MOST_EVENTS) -> None:
        self._write = write
        self._most = most
        self._lanes: dict[str, int] = {}
        self.written = 0
        self.dropped = 0
        write('{"displayTimeUnit":"ms","traceEvents":[\n')
        self._name(REQUESTS, "requests")

    def step(self, instance_id: str, step: Step, repeats: int, start: float, end: float) -> None:
        """Write a step, or a leap of `repeats` equal steps."""
        if not self._room(1):
            return
        lane = self._lane(instance_id)
        prefill = sum(chunk.length for chunk in step.chunks)
        name = "mixed" if prefill and step.decodes else "prefill" if prefill else "decode"
        args = {
            "prefill_tokens": prefill,
            "decodes": len(step.decodes),
            "context": step.context_sum,
            "repeats": repeats,
        }
        self._event(name=name, ph="X", pid=lane, tid=1, ts=start * MICRO, dur=(end - start) * MICRO, args=args)

    def request(self, record: SimRecord, ended_at: float) -> None:
        """Write an ended request: all of its spans, or none."""
        spans = list(stages(record, ended_at))
        if not self._room(2 + 2 * len(spans)):
            return
        args = {
            "outcome": record.outcome.value,
            "attained": record.attained,
            "prompt_tokens": record.prompt_tokens,
            "output_tokens": record.output_tokens,
            "instance": record.instance,
        }
        self._mark("b", record.id, record.slo_class or "request", record.at, args)
        for span in spans:
            self._mark("b", record.id, span.name, span.start)
            self._mark("e", record.id, span.name, span.end)
        self._mark("e", record.id, record.slo_class or "request", ended_at)

    def close(self) -> None:
        last = {"name": "left_out", "ph": "M", "pid": REQUESTS, "args": {"events": self.dropped}}
        self._write(json.dumps(last) + "\n]}\n")

    def _room(self, events: int) -> bool:
        if self.written + events > self._most:
            self.dropped += events
            return False
        return True

    def _lane(self, instance_id: str) -> int:
        lane = self._lanes.get(instance_id)
        if lane is None:
            lane = self._lanes[instance_id] = len(self._lanes) + 1
            self._name(lane, instance_id)
        return lane

    def _name(self, lane: int, name: str) -> None:
        self._write(json.dumps({"name": "process_name", "ph": "M", "pid": lane, "args": {"name": name}}) + ",\n")

    def _mark(self, phase: str, request_id: str, name: str, at: float, args: dict[str, Any] | None = None) -> None:
        more = {"args": args} if args else {}
        self._event(name=name, ph=phase, cat="request", id=request_id, pid=REQUESTS, tid=1, ts=at * MICRO, **more)

    def _event(self, **fields: Any) -> None:
        self.written += 1
        self._write(json.dumps(fields) + ",\n")
