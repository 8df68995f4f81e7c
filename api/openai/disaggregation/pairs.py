"""Both stages of a request at once, for engines that find one another (SGLang's bootstrap server).

The dispatcher names the prefill instance, the migrator the decode instance; only then both are asked, with one room to
meet in. The decode engine answers; what the prefill engine answers says that the KV was taken. Whichever fails before
the first byte, the other is aborted, and both begin anew: at another decode engine, or from the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from api.openai.in_flight import Flight, Phase
from api.openai.relay import Driver, relay
from workers.backends.base import Backend, EngineError, UpstreamCall


class Stages(Protocol):
    """Who hears how the prefill of a pair ended, and keeps its tasks."""

    def spawn(self, work: object) -> asyncio.Task[None]: ...

    def prefilled(self, flight: Flight, source: str) -> None: ...

    def taken(self, flight: Flight) -> None: ...

    def prefill_lost(self, flight: Flight, source: str, error: EngineError) -> None: ...


class Pairs:
    """`holds`: requests that the dispatcher counts at a prefill instance until it hears what became of them."""

    def __init__(self, backends: Mapping[str, Backend], stages: Stages) -> None:
        self._backends = backends
        self._stages = stages
        self._legs: dict[str, asyncio.Task[None]] = {}  # prefills under way, by request
        self._held: set[str] = set()

    def takes(self, instance_id: str) -> bool:
        """Does this instance prefill in pairs?"""
        backend = self._backends.get(instance_id)
        return backend is not None and backend.capabilities.paired

    def expect(self, request_id: str) -> None:
        """The dispatcher sent it; it begins when its decode stage is placed."""
        self._held.add(request_id)

    def holds(self, request_id: str) -> bool:
        return request_id in self._held

    def begin(self, flight: Flight, source: str, call: UpstreamCall, rank: int, driver: Driver) -> None:
        """Both legs; `flight.instance` decodes."""
        work = self._both(flight, source, call, rank, driver)
        flight.task = self._stages.spawn(work)

    async def _both(self, flight: Flight, source: str, call: UpstreamCall, rank: int, driver: Driver) -> None:
        prefiller, decoder = self._backends.get(source), self._backends.get(flight.instance)
        try:
            if prefiller is None or decoder is None:
                raise EngineError(f"instance {source if prefiller is None else flight.instance} is gone")
            offer = await prefiller.meeting()
        except EngineError as error:
            self._prefill_lost(flight, source, error)
            return
        there = replace(call, offer=offer)
        self.end(flight.request.id)
        self._legs[flight.request.id] = self._stages.spawn(self._prefill(flight, source, prefiller, there))
        await relay(flight, decoder, replace(there, rank=rank), driver)

    async def _prefill(self, flight: Flight, source: str, backend: Backend, call: UpstreamCall) -> None:
        name, me = flight.request.id, asyncio.current_task()
        try:
            await backend.prefill(call)
        except EngineError as error:
            if self._legs.get(name) is me and flight.phase == Phase.SENT:
                self._prefill_lost(flight, source, error)
                return
        if self._legs.get(name) is not me:
            return
        del self._legs[name]  # its KV was taken, or the decode engine would not have begun
        self._held.discard(name)
        self._stages.prefilled(flight, source)
        self._stages.taken(flight)

    def _prefill_lost(self, flight: Flight, source: str, error: EngineError) -> None:
        """The prefill engine's fault: the decode leg goes, and the dispatcher hears of it as of any failure."""
        self._legs.pop(flight.request.id, None)  # the very task that runs here
        self._held.discard(flight.request.id)
        self._stages.prefill_lost(flight, source, error)

    def end(self, request_id: str) -> None:
        """Abort a prefill under way; what the dispatcher counts stays."""
        leg = self._legs.pop(request_id, None)
        if leg is not None:
            leg.cancel()

    def forget(self, request_id: str) -> None:
        self.end(request_id)
        self._held.discard(request_id)
