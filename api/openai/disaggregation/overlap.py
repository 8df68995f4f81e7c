"""Prefills whose decode stage begins before they end: their KV is pulled while it is computed.

A prefill engine that can says where its KV waits when its prompt is nearly computed: when its last step begins, or, of
one that is a single step however long, when three quarters of it are done. From then on the request has two legs: the
prefill, kept here, and once it is placed the decode, which is the flight's own task. Until the prefill has ended the
dispatcher counts the request there, as it does pairs.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from api.openai.in_flight import Flight


@dataclass(frozen=True, slots=True)
class Leg:
    """A prefill under way at `source`, whose task it is."""

    source: str
    task: asyncio.Task[None]


class Overlap:
    def __init__(self) -> None:
        self._legs: dict[str, Leg] = {}  # by request

    def begin(self, flight: Flight) -> None:
        """Its prefill, so far the flight's only task, goes on beside what comes."""
        if flight.task is not None:
            self._legs[flight.request.id] = Leg(flight.instance, flight.task)
            flight.task = None

    def holds(self, request_id: str) -> bool:
        return request_id in self._legs

    def source(self, request_id: str) -> str:
        """Where it is prefilled; "" if it is not."""
        leg = self._legs.get(request_id)
        return leg.source if leg is not None else ""

    def ended(self, request_id: str) -> bool:
        """Its prefill has; False if it was not one of these."""
        return self._legs.pop(request_id, None) is not None

    def forget(self, request_id: str) -> None:
        """Abort the prefill, if it is still under way."""
        leg = self._legs.pop(request_id, None)
        if leg is not None and leg.task is not asyncio.current_task():
            leg.task.cancel()
