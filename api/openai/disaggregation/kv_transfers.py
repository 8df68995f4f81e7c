"""The KV transfers of open requests: what each record will say of them, and KV that nobody needs, freed at once.

Each transfer becomes one step of its request's decisions (kind `transfer`), and from there a row (`kv_transfer`), with
the state it reached: placed, reserved (the decode engine took blocks), moving, committed, released (the prefill engine
has freed its copy). What engines measure comes with their answers; for engines that tell nothing the times are ours.
When KV is to be freed, and again, is the migrator's; that its engine has done so is told it from here.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from api.openai.in_flight import InFlightRequest
from controller.core import events as ev
from controller.core.decisions import Decision, Figure
from controller.core.kv_links import KvMoved, moved_from_json
from controller.dispatch.lifecycle import State
from workers.backends.base import Backend, EngineError

log = logging.getLogger(__name__)

RELEASE_S = 0.05  # how long releases wait for others of the same engine
NO_ROOM = 503  # the decode engine has no blocks now: it may have some soon
NEVER_BEGAN = ("no_room", "unreachable", "no_instance")


class Notes(Protocol):
    def note(self, in_flight: InFlightRequest, decision: Decision) -> None: ...

    def push(self, event: ev.Event) -> None: ...

    def tell(self, event: ev.Event) -> None: ...

    def spawn(self, work: Any) -> asyncio.Task[None]: ...


@dataclass(slots=True)
class Opened:
    """One under way: the `attempt`th of its request, in `state`."""

    place: ev.Place
    attempt: int
    state: str


class Transfers:
    """One entry for each request between its first placement and its end."""

    def __init__(self, host: Notes, backends: Mapping[str, Backend]) -> None:
        self.moved = 0  # that arrived
        self.left_to_lease = 0  # prompts whose KV its engine was told to free again and again, and never said it had
        self._host = host
        self._backends = backends
        self._open: dict[str, Opened] = {}
        self._attempts: dict[str, int] = {}
        self._ended: dict[str, dict[str, Any]] = {}  # figures of the one that arrived
        self._asked: set[tuple[str, str]] = set()  # to free: request, prefill instance
        self._soon: asyncio.TimerHandle | None = None

    # ---- what happens to a transfer --------------------------------------------------------------------------------

    def placed(self, place: ev.Place, state: str) -> None:
        """`state`: what it is in until its engine says more."""
        name = place.request.id
        self._attempts[name] = self._attempts.get(name, 0) + 1
        self._open[name] = Opened(place, self._attempts[name], state)

    def reached(self, in_flight: InFlightRequest, state: str) -> None:
        if (opened := self._open.get(in_flight.request.id)) is not None:
            opened.state = state

    def under_way(self, in_flight: InFlightRequest) -> bool:
        """Placed, and neither landed nor failed."""
        return in_flight.request.id in self._open

    def landed(self, in_flight: InFlightRequest, moved: KvMoved | None, now: float) -> None:
        """The decode engine goes on. One that measured the transfer has told the prefill engine that it has it all."""
        opened = self._close(in_flight)
        if opened is None:
            return
        self.moved += 1
        name, state = in_flight.request.id, "committed" if moved is None else "released"
        self._ended[name] = self._note(in_flight, opened, "kv_landed", now, moved, state, "done")
        if moved is not None:
            self._asked.discard((name, opened.place.source))

    def failed(self, in_flight: InFlightRequest, reason: str, error: EngineError, now: float) -> None:
        """The decode engine, or the way to it."""
        opened = self._close(in_flight)
        if opened is None:
            return
        moved = moved_in(error.body)
        state = _reached(moved, "placed" if reason in NEVER_BEGAN else opened.state)
        self._note(in_flight, opened, reason, now, moved, state, "failed", error=str(error) + _message(error.body))

    def undone(self, in_flight: InFlightRequest, reason: str, now: float) -> None:
        """By us: a time-out, a lost prefill engine, a request that ended."""
        opened = self._close(in_flight)
        if opened is not None:
            self._note(in_flight, opened, reason, now, None, opened.state, "undone", undo=reason)

    def forget(self, in_flight: InFlightRequest, now: float) -> None:
        """The request is over, or begins anew."""
        self.undone(in_flight, "request_ended", now)
        self._ended.pop(in_flight.request.id, None)
        if in_flight.state is State.ENDED:
            self._attempts.pop(in_flight.request.id, None)

    def _close(self, in_flight: InFlightRequest) -> Opened | None:
        """No transfer of it is under way any more."""
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
        state: str,
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
            "state": state,
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
        self._host.note(in_flight, Decision("transfer", reason, in_flight.request.id, now, figures))
        kept: dict[str, Any] = in_flight.decisions[-1]["figures"] if in_flight.decisions else {}
        return kept

    # ---- KV nobody needs -------------------------------------------------------------------------------------------

    def free(self, request_id: str, instance_id: str) -> None:
        """At the prefill instance; together with others a moment later."""
        backend = self._backends.get(instance_id)
        if backend is None or not backend.capabilities.frees_kv:
            self._host.tell(ev.KvReleased(request_id, instance_id, known=False))
            return
        self._asked.add((request_id, instance_id))
        self._later()

    def begun(self, request_id: str, instance_id: str) -> None:
        """It is prefilled there, maybe once more: what was to be freed of it is not to be any more."""
        self._asked.discard((request_id, instance_id))

    def left(self, action: ev.LeftToLease) -> None:
        """Its engine was asked often enough: it is said in the record, where the request has not ended before."""
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
        except EngineError as error:  # then it is asked again
            log.warning("%d prompts keep KV at %s: %s", len(names), backend.spec.id, error)
            return
        for name in names:
            ended = self._ended.get(name)
            if ended is not None and ended["source"] == backend.spec.id:
                ended["state"] = "released"
            self._host.tell(ev.KvReleased(name, backend.spec.id))


def reason_of(error: EngineError) -> str:
    """Of a decode stage that failed, as it is recorded: its engine's word, or else what the answer shows."""
    moved = moved_in(error.body)
    if moved is not None and moved.reason:
        return moved.reason
    return _shown_by_answer(error)


def _shown_by_answer(error: EngineError) -> str:
    return "no_room" if error.status == NO_ROOM else "unreachable" if error.unreachable else "transfer_failed"


def told_migrator(error: EngineError) -> str:
    """Whether it is the KV, the way or the engine, where that is known."""
    reason, moved = _shown_by_answer(error), moved_in(error.body)
    if reason == "no_room":
        return reason
    if moved is not None and moved.reason:
        return moved.reason
    return "refused" if error.client_fault else reason


def asks_wrong(error: EngineError) -> bool:
    """The engine refuses the request itself, not its KV or our offer of it: no other engine would take it."""
    about = _error_in(error.body).get("param")
    return error.client_fault and moved_in(error.body) is None and about != "kv_transfer_params"


def moved_in(body: bytes) -> KvMoved | None:
    """How far a transfer came, from the body of a decode engine's error; None where it does not say."""
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


def _reached(moved: KvMoved | None, otherwise: str) -> str:
    if moved is None:
        return otherwise
    return "moving" if moved.bytes else "reserved" if moved.reserved else "placed"
