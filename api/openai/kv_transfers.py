"""KV transfers of open requests: what each record says of them, and KV that is no longer needed, freed at once.

Each transfer becomes one step of its request's decisions (kind `transfer`), and from there a row (`kv_transfer`), with
the state it reached: placed, reserved (the decode engine took blocks), moving, committed, released (the prefill engine
has freed its copy). What engines measure comes with their answers; for engines that measure nothing the gateway's times
are used. The migrator decides when KV is freed, and when that is retried; it is told from here that an engine did so.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from api.openai.in_flight import InFlightRequest, RelayListener
from api.openai.protocol.translation import UnreadableAnswer
from controller.core import events as ev
from controller.core.decisions import Decision, Figure
from controller.core.kv_links import BorrowedKv, KvMoved, moved_from_json
from controller.dispatch.lifecycle import State
from controller.scale.traffic import StageRates
from workers.backends.base import Backend, Capabilities, EngineError

log = logging.getLogger(__name__)

RELEASE_S = 0.05  # how long releases wait for others for the same engine
NO_ROOM = 503  # the decode engine has no free blocks now; it may have some soon
COMPUTED = "the decode instance computed the prompt itself"
MOST_SAID = 300  # characters of what that instance says of it
MOST_OF_FLOW = 40  # characters of how it was scheduled, as the reference engine cuts it
LOST = {"unreachable", "other_model", "kv_lost", "cut", "corrupt", "timeout"}  # why a copied prefix did not come
NEVER_BEGAN = ("no_room", "unreachable", "no_instance")


class Notes(Protocol):
    def note(self, in_flight: InFlightRequest, decision: Decision) -> None: ...

    def push(self, event: ev.Event) -> None: ...

    def tell(self, event: ev.Event) -> None: ...

    def spawn(self, work: Any) -> asyncio.Task[None]: ...


@dataclass(slots=True)
class Opened:
    """A transfer under way, the `attempt`th of its request, and what its decode engine has reported of it: that it
    `reserved` blocks, that KV `moves`. Its state is the scheduler's, which may be further on (time-outs, rollbacks)."""

    place: ev.Place
    attempt: int
    reserved: bool = False
    moves: bool = False


class KvTransfers:
    """One entry for each request between its first placement and its end."""

    def __init__(self, host: Notes, backends: Mapping[str, Backend]) -> None:
        self.moved = 0  # that arrived
        self.left_to_lease = 0  # prompts whose engine never confirmed that it freed their KV
        self._host = host
        self._backends = backends
        self._open: dict[str, Opened] = {}
        self._attempts: dict[str, int] = {}
        self._ended: dict[str, dict[str, Any]] = {}  # figures of the one that arrived
        self._asked: set[tuple[str, str]] = set()  # to free: request, prefill instance
        self._soon: asyncio.TimerHandle | None = None

    # ---- what happens to a transfer --------------------------------------------------------------------------------

    def placed(self, place: ev.Place, *, moves: bool) -> None:
        """`moves`: its engine will not report when it begins to pull, so KV counts as moving at once."""
        name = place.request.id
        self._attempts[name] = self._attempts.get(name, 0) + 1
        self._open[name] = Opened(place, self._attempts[name], moves=moves)

    def reported(self, in_flight: InFlightRequest, *, moves: bool) -> None:
        """Its decode engine has reserved blocks and, with `moves`, pulls."""
        if (opened := self._open.get(in_flight.request.id)) is not None:
            opened.reserved, opened.moves = True, moves

    def under_way(self, in_flight: InFlightRequest) -> bool:
        """Placed, and neither landed nor failed."""
        return in_flight.request.id in self._open

    def landed(self, in_flight: InFlightRequest, moved: KvMoved | None, now: float) -> bool:
        """The KV is at the decode engine. One that measured the transfer (`moved`) has told the prefill engine so, or,
        if the transfer failed, has computed the KV. False if no transfer was under way any more."""
        opened = self._close(in_flight)
        if opened is None:
            return False
        if moved is not None and moved.reason:
            error = f"{COMPUTED}: {moved.error[:MOST_SAID]}" if moved.error else COMPUTED
            self._note(in_flight, opened, moved.reason, now, moved, _reached(opened, moved), "failed", error=error)
            return True
        self.moved += 1
        name, state = in_flight.request.id, State.COMMITTED if moved is None else State.RELEASED
        self._ended[name] = self._note(in_flight, opened, "kv_landed", now, moved, state, "done")
        if moved is not None:
            self._asked.discard((name, opened.place.source))
        return True

    def failed(self, in_flight: InFlightRequest, error: EngineError, now: float) -> None:
        """The decode engine failed, or the transfer to it."""
        reason = reason_of(error)
        log.warning("decode of %s on %s: %s (%s)", in_flight.request.id, in_flight.instance, error, reason)
        opened = self._close(in_flight)
        if opened is None:
            return
        moved = moved_in(error.body)
        if reason in NEVER_BEGAN:
            opened.reserved = opened.moves = False
        state = _reached(opened, moved)
        self._note(in_flight, opened, reason, now, moved, state, "failed", error=str(error) + _message(error.body))

    def undone(self, in_flight: InFlightRequest, reason: str, now: float) -> None:
        """Rolled back by the gateway: a time-out, a lost prefill engine, a request that ended."""
        opened = self._close(in_flight)
        if opened is not None:
            self._note(in_flight, opened, reason, now, None, _reached(opened), "undone", undo=reason)

    def borrowed(self, in_flight: InFlightRequest, instance: str, borrowed: BorrowedKv, now: float) -> None:
        """Its engine, this instance, copied the beginning of its prompt from another one, or lost it on the way."""
        moved = borrowed.moved
        figures: dict[str, Figure] = {
            "instance": instance,
            "source": borrowed.source[:MOST_SAID],
            "outcome": "failed" if moved.reason else "done",
            "seconds": moved.seconds,
            "bytes": moved.bytes,
            "layers": moved.layers,
            "tokens": moved.tokens,
            "cached": moved.cached,
            **_turns(moved),
        }
        if moved.error:
            figures["error"] = moved.error[:MOST_SAID]
        reason = "prefix_copied"
        if moved.reason:
            reason = moved.reason if moved.reason in LOST else "transfer_failed"
        self._host.note(in_flight, Decision("prefix", reason, in_flight.request.id, now, figures))

    def forget(self, in_flight: InFlightRequest, now: float) -> None:
        """The request has ended, or starts over."""
        self.undone(in_flight, "request_ended", now)
        self._ended.pop(in_flight.request.id, None)
        if in_flight.over:
            self._attempts.pop(in_flight.request.id, None)

    def _close(self, in_flight: InFlightRequest) -> Opened | None:
        """From now on no transfer of it is under way."""
        return self._open.pop(in_flight.request.id, None)

    def close(self) -> None:
        if self._soon is not None:
            self._soon.cancel()

    def _note(
        self,
        in_flight: InFlightRequest,
        opened: Opened,
        reason: str,
        now: float,
        moved: KvMoved | None,
        state: State,
        outcome: str,
        **more: Figure,
    ) -> dict[str, Any]:
        place = opened.place
        after_s = now - place.decision.at
        figures: dict[str, Figure] = {
            "instance": place.target,
            "source": place.source,
            "attempt": opened.attempt,
            "outcome": outcome,
            "state": state.value,
            "after_s": after_s,
            "seconds": after_s if moved is None else moved.seconds,
            "measured_by": "gateway" if moved is None else "engine",
            **more,
        }
        if moved is not None:
            figures |= {
                "bytes": moved.bytes,
                "layers": moved.layers,
                "tokens": moved.tokens,
                "cached": moved.cached,
                "overlap_s": moved.busy_s,
                "early_bytes": moved.early_bytes,
            }
            figures |= _turns(moved)
        self._host.note(in_flight, Decision("transfer", reason, in_flight.request.id, now, figures))
        kept: dict[str, Any] = in_flight.decisions[-1]["figures"] if in_flight.decisions else {}
        return kept

    # ---- KV that is no longer needed -------------------------------------------------------------------------------

    def free(self, request_id: str, instance_id: str) -> None:
        """Free its KV at the prefill instance, a moment later, together with that of others."""
        backend = self._backends.get(instance_id)
        if backend is None or not backend.capabilities.frees_kv:
            self._host.tell(ev.KvReleased(request_id, instance_id, known=False))
            return
        self._asked.add((request_id, instance_id))
        self._later()

    def begun(self, request_id: str, instance_id: str) -> None:
        """It is prefilled there, maybe not for the first time: the new KV must not be freed for the old."""
        self._asked.discard((request_id, instance_id))

    def left(self, action: ev.LeftToLease) -> None:
        """Its engine never confirmed the release: the record shows it, unless the request ended before."""
        self.left_to_lease += 1
        log.warning("KV of %s at %s is left to its lease", action.request_id, action.instance_id)
        if (ended := self._ended.get(action.request_id)) is not None:
            ended["undo"] = "left_to_lease"

    def _later(self) -> None:
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_later(RELEASE_S, self._release)

    def _release(self) -> None:
        self._soon = None
        unwanted = defaultdict[str, list[str]](list)
        for request_id, instance_id in self._asked:
            unwanted[instance_id].append(request_id)
        self._asked.clear()
        for instance_id, names in unwanted.items():
            if backend := self._backends.get(instance_id):
                self._host.spawn(self._tell(backend, names))

    async def _tell(self, backend: Backend, names: Sequence[str]) -> None:
        try:
            await backend.free_kv(names)
        except EngineError as error:  # the migrator retries it
            log.warning("KV of %d prompts was not freed at %s: %s", len(names), backend.spec.id, error)
            return
        for name in names:
            ended = self._ended.get(name)
            if ended is not None and ended["source"] == backend.spec.id:
                ended["state"] = State.RELEASED.value
            self._host.tell(ev.KvReleased(name, backend.spec.id))


class Reporter(RelayListener, Protocol):
    def push(self, event: ev.Event) -> None: ...


class DecodeLeg:
    """The relay's listener for a decode stage: reports when its transfer began and ended, then what any answer reports.

    `engine`: with `tells_landing` it sends the headers of a whole answer when the KV is there; for other whole answers
    the end of the transfer was assumed when it was placed. With `tells_pulling` it says inside a stream when it begins
    to pull.
    """

    def __init__(
        self, runtime: Reporter, target: str, transfers: KvTransfers, rates: StageRates, engine: Capabilities
    ) -> None:
        self._runtime = runtime
        self._target = target
        self.transfers = transfers
        self._rates = rates
        self._engine = engine

    def clock(self) -> float:
        return self._runtime.clock()

    def accepted(self, in_flight: InFlightRequest) -> None:
        """For a stream: blocks are reserved. For a whole answer with `tells_landing`: its KV is there."""
        self._runtime.accepted(in_flight)
        if in_flight.streamed:
            moves = not self._engine.tells_pulling
            self.transfers.reported(in_flight, moves=moves)
            self._runtime.push(ev.TransferStarted(in_flight.request.id, self._target, moves))
        elif self._engine.tells_landing:
            self._landed(in_flight)

    def pulling(self, in_flight: InFlightRequest) -> None:
        self.transfers.reported(in_flight, moves=True)
        self._runtime.push(ev.TransferMoves(in_flight.request.id, self._target))

    def pulled(self, in_flight: InFlightRequest) -> None:
        """Its engine measured the transfer, so all KV is there."""
        self._landed(in_flight)

    def first_token(self, in_flight: InFlightRequest, now: float) -> None:
        """The first sign that its KV is there, of an engine that measures nothing."""
        self._landed(in_flight)
        self._runtime.first_token(in_flight, now)

    def _landed(self, in_flight: InFlightRequest) -> None:
        if not self.transfers.landed(in_flight, in_flight.moved, self.clock()):
            return  # reported before
        moved = in_flight.moved
        released = moved is not None and not moved.reason  # an engine that measured it has told the prefill engine
        self._runtime.push(ev.TransferDone(in_flight.request.id, self._target, moved, released=released))

    def progressed(self, in_flight: InFlightRequest, now: float) -> None:
        self._runtime.progressed(in_flight, now)

    def completed(self, in_flight: InFlightRequest, now: float) -> None:
        """For an answer in one piece this may be the first sign that its KV arrived."""
        self.transfers.landed(in_flight, in_flight.moved, now)
        self._rates.decoded(in_flight.request.model, now)
        self._runtime.completed(in_flight, now)

    def lost(self, in_flight: InFlightRequest, error: EngineError) -> None:
        self._runtime.lost(in_flight, error)


# ---- why a decode stage failed --------------------------------------------------------------------------------------


def reason_of(error: EngineError) -> str:
    """Why a decode stage failed, for its record: as its engine says, else what the answer shows."""
    moved = moved_in(error.body)
    if moved is not None and moved.reason:
        return moved.reason
    return _shown_by_answer(error)


def _shown_by_answer(error: EngineError) -> str:
    return "no_room" if error.status == NO_ROOM else "unreachable" if error.unreachable else "transfer_failed"


def migrator_reason(error: EngineError) -> str:
    """Why it failed, for the migrator: the KV, the link or the engine, where that is known."""
    reason, moved = _shown_by_answer(error), moved_in(error.body)
    if reason == "no_room":
        return reason
    if moved is not None and moved.reason:
        return moved.reason
    return "refused" if error.client_fault else reason


def fault_of(error: EngineError) -> ev.AtFault:
    """What the engine's answer shows, whatever the call was for."""
    if isinstance(error, UnreadableAnswer):
        return "answer"
    if not error.client_fault:
        return "engine"
    of_kv = moved_in(error.body) is not None or _error_in(error.body).get("param") == "kv_transfer_params"
    return "kv" if of_kv else "request"


def moved_in(body: bytes) -> KvMoved | None:
    """How far a transfer got, from the body of a decode engine's error; None where that is not in it."""
    return moved_from_json(_error_in(body).get("kv"))


def _message(body: bytes) -> str:
    said = _error_in(body).get("message")
    return f": {said}" if isinstance(said, str) else ""


def _error_in(body: bytes) -> Mapping[str, Any]:
    try:
        said = orjson.loads(body) if body else {}
    except orjson.JSONDecodeError:
        return {}
    error = said.get("error") if isinstance(said, dict) else None
    return error if isinstance(error, dict) else {}


def _turns(moved: KvMoved) -> dict[str, Figure]:
    """What is known of its turns if it was scheduled on a shared link, or was not although it should have been."""
    if not moved.flow:
        return {}
    return {
        "flow": moved.flow[:MOST_OF_FLOW],
        "held_s": moved.held_s,
        "flow_level": moved.level,
        "promotions": moved.promotions,
    }


def _reached(opened: Opened, moved: KvMoved | None = None) -> State:
    """The state for the record of a transfer that did not land: as its engine measured it, else as it reported."""
    if moved is not None:
        return State.MOVING if moved.bytes else State.RESERVED if moved.reserved else State.PLACED
    return State.MOVING if opened.moves else State.RESERVED if opened.reserved else State.PLACED
