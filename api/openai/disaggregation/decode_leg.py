"""What the relay tells of an answer that another engine prefilled: when its transfer began and ended, then the rest."""

from __future__ import annotations

from typing import Protocol

from api.openai.disaggregation.kv_transfers import Transfers
from api.openai.in_flight import InFlightRequest
from api.openai.ledger import StageRates
from api.openai.relay import RelayListener
from controller.core import events as ev
from workers.backends.base import Capabilities, EngineError


class Reporter(RelayListener, Protocol):
    def push(self, event: ev.Event) -> None: ...


class DecodeLeg:
    """`engine`: one that `tells_landing` sends the headers of a whole answer when the KV is there; of other whole
    answers the end of the transfer was assumed when it was placed. One that `tells_pulling` says inside a stream when
    it has begun to pull."""

    def __init__(
        self, runtime: Reporter, target: str, transfers: Transfers, rates: StageRates, engine: Capabilities
    ) -> None:
        self._runtime = runtime
        self._target = target
        self._transfers = transfers
        self._rates = rates
        self._engine = engine

    def clock(self) -> float:
        return self._runtime.clock()

    def accepted(self, in_flight: InFlightRequest) -> None:
        """Of a stream: blocks are reserved. Of a whole answer whose engine tells: its KV is there."""
        self._runtime.accepted(in_flight)
        if in_flight.streamed:
            moves = not self._engine.tells_pulling
            self._transfers.reached(in_flight, "moving" if moves else "reserved")
            self._runtime.push(ev.TransferStarted(in_flight.request.id, self._target, moves))
        elif self._engine.tells_landing:
            self.landed(in_flight, self.clock())

    def pulling(self, in_flight: InFlightRequest) -> None:
        self._transfers.reached(in_flight, "moving")
        self._runtime.push(ev.TransferMoves(in_flight.request.id, self._target))

    def first_token(self, in_flight: InFlightRequest, now: float) -> None:
        self.landed(in_flight, now)
        self._runtime.first_token(in_flight, now)

    def landed(self, in_flight: InFlightRequest, now: float) -> None:
        self._transfers.landed(in_flight, in_flight.moved, now)
        released = in_flight.moved is not None  # who measured it has told the prefill engine
        self._runtime.push(ev.TransferDone(in_flight.request.id, self._target, in_flight.moved, released=released))

    def progressed(self, in_flight: InFlightRequest, now: float) -> None:
        self._runtime.progressed(in_flight, now)

    def completed(self, in_flight: InFlightRequest, now: float) -> None:
        """Of an answer in one piece this may be when its first token is known to have been there."""
        self._transfers.landed(in_flight, in_flight.moved, now)
        self._rates.decoded(in_flight.request.model, now)
        self._runtime.completed(in_flight, now)

    def lost(self, in_flight: InFlightRequest, error: EngineError) -> None:
        self._runtime.lost(in_flight, error)
