"""What the relay tells of an answer that another engine prefilled: when its transfer began and ended, then the rest."""

from __future__ import annotations

from typing import Protocol

from api.openai.in_flight import Flight
from api.openai.relay import Driver
from controller.core import events as ev
from workers.backends.base import Capabilities, EngineError


class Host(Driver, Protocol):
    def push(self, event: ev.Event) -> None: ...


class Stages(Protocol):
    """Who keeps the transfers."""

    def reached(self, flight: Flight, state: str) -> None: ...

    def landed(self, flight: Flight, now: float) -> None: ...

    def decoded(self, flight: Flight, now: float) -> None: ...


class DecodeLeg:
    """`engine`: one that `tells_landing` sends the headers of a whole answer when the KV is there; of other whole
    answers the end of the transfer was assumed when it was placed. One that `tells_pulling` says inside a stream when
    it has begun to pull."""

    def __init__(self, host: Host, place: ev.Place, stages: Stages, engine: Capabilities) -> None:
        self._host = host
        self._target = place.target
        self._stages = stages
        self._engine = engine

    def clock(self) -> float:
        return self._host.clock()

    def accepted(self, flight: Flight) -> None:
        """Of a stream: blocks are reserved. Of a whole answer whose engine tells: its KV is there."""
        self._host.accepted(flight)
        if flight.streamed:
            moves = not self._engine.tells_pulling
            self._stages.reached(flight, "moving" if moves else "reserved")
            self._host.push(ev.TransferStarted(flight.request.id, self._target, moves))
        elif self._engine.tells_landing:
            self._landed(flight, self.clock())

    def pulling(self, flight: Flight) -> None:
        self._stages.reached(flight, "moving")
        self._host.push(ev.TransferMoves(flight.request.id, self._target))

    def first_token(self, flight: Flight, now: float) -> None:
        self._landed(flight, now)
        self._host.first_token(flight, now)

    def _landed(self, flight: Flight, now: float) -> None:
        self._stages.landed(flight, now)
        released = flight.moved is not None  # who measured it has told the prefill engine
        self._host.push(ev.TransferDone(flight.request.id, self._target, flight.moved, released=released))

    def progressed(self, flight: Flight, now: float) -> None:
        self._host.progressed(flight, now)

    def completed(self, flight: Flight, now: float) -> None:
        """Of an answer in one piece this may be when its first token is known to have been there."""
        self._stages.landed(flight, now)
        self._stages.decoded(flight, now)
        self._host.completed(flight, now)

    def lost(self, flight: Flight, error: EngineError) -> None:
        self._host.lost(flight, error)
