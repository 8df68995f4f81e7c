"""Disaggregation in a simulation: performs the scheduler's actions for decode stages on simulated engines and links.

A prefilled sequence keeps its KV on the prefill instance until the scheduler places its decode stage. The decode
instance then reserves blocks, the KV moves, the sequence continues there, and the prefill instance frees its copy. With
`links.overlap` the scheduler is told when a prompt is nearly computed, as by the reference engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from controller.core import events as ev
from controller.core.kv_links import KvMoved
from controller.core.steps import (
    Aborted,
    EngineAction,
    EngineEvent,
    Finish,
    Landed,
    Release,
    Reserve,
    Reserved,
    Seq,
    SeqState,
)
from controller.simulator.fleet.cluster import Cluster
from controller.simulator.fleet.driver import Driver
from controller.simulator.fleet.instance import SimulatedInstance
from controller.simulator.fleet.kv_in_flight import Move, Prefill
from controller.simulator.fleet.links import FleetLinks
from controller.simulator.heap import EventHeap, EventKind
from controller.simulator.in_flight import SimulatedRequest
from controller.simulator.network import NO_TARGET_S, NetworkTransfer
from controller.simulator.settings import SimulationSettings


class DisaggregatedRun(Protocol):
    """What KV transfers use of the simulation."""

    cluster: Cluster
    driver: Driver
    heap: EventHeap
    links: FleetLinks
    settings: SimulationSettings

    def tell(self, *events: ev.Event) -> None: ...

    def tell_engine(self, instance: SimulatedInstance, events: Sequence[EngineEvent]) -> Sequence[EngineAction]: ...

    def in_flight(self, request_id: str) -> SimulatedRequest | None: ...

    def later(self, do: Callable[[], None]) -> None: ...


class SimulatedTransfers:
    """The KV transfers of a run, from the end of a prefill to the decode instance that sends its first token."""

    def __init__(self, run: DisaggregatedRun) -> None:
        self.performs: dict[type, Callable[[Any], None]] = {
            ev.Place: self._place,
            ev.FreeKv: lambda action: self._free(action.request_id, action.instance_id),
            ev.Abort: self._abort,
            ev.PrefillAgain: self._again,
            ev.LeftToLease: lambda action: None,  # only the gateway's records show it
        }
        self._run = run
        self._ports = run.links.ports
        self._kept: dict[str, tuple[str, Seq]] = {}  # by request: the instance that keeps its KV, and the sequence
        self._ending: dict[str, Prefill] = {}  # until the gateway is told of its end
        self._moves: dict[str, Move] = {}

    @property
    def moving(self) -> int:
        """Number of requests between the end of their prefill and their decode instance."""
        return len(self._kept)

    # ---- what the simulation says ----------------------------------------------------------------------------------

    def links_of(self, instance_id: str) -> Sequence[ev.LinkSeen]:
        """The state of its links that an engine reports when it joins, if ports differ."""
        return self._ports.links_of(instance_id) if self._ports.differ else ()

    def watch(self, instance: SimulatedInstance, actions: Sequence[EngineAction]) -> None:
        """Look for last steps of prefills that began or ended in these actions, before the gateway is told."""
        ending, instance.ending = instance.ending, []
        if not self._run.settings.links.overlap:
            return
        for seq in ending:
            self._ending[seq.id] = Prefill(instance, seq)
            self._run.later(partial(self._heard_ending, instance.id, seq))
        for action in actions:
            if isinstance(action, Finish):
                self._computed(action.seq)

    def _heard_ending(self, instance_id: str, seq: Seq) -> None:
        prefill = self._ending.get(seq.id)
        if prefill is not None and prefill.seq is seq:
            self._run.tell(ev.PrefillEnding(seq.id, instance_id))
            self._run.heap.push(
                self._run.heap.now, EventKind.TICK, _nothing
            )  # makes the driver run a pass at this instant

    def _computed(self, seq: Seq) -> None:
        """The prefill has ended, so the last layer of KV that is already moving can follow."""
        prefill = self._ending.get(seq.id)
        if prefill is None or prefill.seq is not seq:
            return
        prefill.computed = True
        move = self._moves.get(seq.id)
        if move is not None and move.waits_since is not None:
            self._send_rest(seq.id, move)

    def prefilled(self, in_flight: SimulatedRequest, instance: SimulatedInstance, seq: Seq) -> None:
        """The engine ended the prefill and keeps the KV."""
        in_flight.prefill_instance = instance.id
        self._kept[seq.id] = (instance.id, seq)
        self._ending.pop(seq.id, None)
        in_flight.seq = None
        self._run.tell(ev.PrefillDone(in_flight.request, instance.id, seq.prompt_tokens))
        move = self._moves.get(seq.id)
        if move is not None and move.landed:
            self._run.heap.push(self._run.heap.now, EventKind.DELIVERY, partial(self._landed, seq.id, move))

    def forget(self, request_id: str) -> None:
        """The request has ended; drop whatever it was doing."""
        self._roll_back(request_id)
        self._ending.pop(request_id, None)
        self._free(request_id)

    def busy(self, instance_id: str) -> bool:
        """Whether the instance keeps KV for a request, or KV is moving to it."""
        kept = any(where == instance_id for where, _ in self._kept.values())
        return kept or any(instance_id in (move.source, move.target) for move in self._moves.values())

    def died(self, instance: SimulatedInstance) -> None:
        """All KV that it kept, sent or received is lost, and the migrator is told."""
        for name in [name for name, move in self._moves.items() if instance.id in (move.source, move.target)]:
            self._roll_back(name)
        for name in [name for name, (where, _) in self._kept.items() if where == instance.id]:
            del self._kept[name]
        for name in [name for name, prefill in self._ending.items() if prefill.instance is instance]:
            del self._ending[name]

    # ---- what the scheduler says -----------------------------------------------------------------------------------

    def _place(self, action: ev.Place) -> None:
        self._run.later(partial(self._reserve, action))

    def _abort(self, action: ev.Abort) -> None:
        self._roll_back(action.request_id)
        self._recall(action)

    def _again(self, action: ev.PrefillAgain) -> None:
        in_flight = self._run.in_flight(action.request.id)
        if in_flight is not None:
            self.stop_prefill(in_flight)

    def stop_prefill(self, in_flight: SimulatedRequest) -> None:
        """Stop a prefill that will not be decoded from here, if it still runs or its end was not reported yet."""
        prefill = self._ending.pop(in_flight.demand.id, None)
        instance = self._run.cluster.get(in_flight.instance)
        if prefill is None and in_flight.seq is not None and in_flight.landed_at is None and instance is not None:
            prefill = Prefill(instance, in_flight.seq)
            prefill.computed = in_flight.seq.state is SeqState.FINISHED  # and its end was not reported yet
        in_flight.restart()  # first, so that the engine's answer to the abort is not taken for the end of a prefill
        if prefill is None:
            return
        if (
            prefill.instance.up and prefill.seq.arrival <= self._run.heap.now
        ):  # otherwise it has not reached the engine, and will not
            over = Release(prefill.seq) if prefill.computed else Aborted(prefill.seq)
            self._run.tell_engine(prefill.instance, [over])

    def _reserve(self, place: ev.Place) -> None:
        """The decode stage was placed: its instance reserves blocks, and KV begins to move."""
        name, now = place.request.id, self._run.heap.now
        in_flight, instance = self._run.in_flight(name), self._run.cluster.get(place.target)
        source, early = self._run.cluster.get(place.source), self._ending.get(name)
        if in_flight is None or source is None or (early is None and name not in self._kept):
            return
        if instance is None or self._ports.dead(place.source, now) or self._ports.dead(place.target, now):
            self._failed(name, place.target, "no_instance" if instance is None else "link_down")
            return
        seq = in_flight.decode_sequence(now, place.rank, instance.spec.first_token_with_kv)
        answers = self._run.tell_engine(instance, [Reserve(seq)])
        if not any(isinstance(action, Reserved) for action in answers):
            self._failed(name, place.target, "no_room")
            return
        move = self._moves[name] = Move(seq, place.source, place.target, now)
        move.size = float((seq.prompt_tokens - seq.cached) * source.kv_bytes_per_token)
        if early is not None:
            move.rest = move.size / self._run.settings.links.layers
        latency_s = self._run.settings.links.latency_s
        self._report(ev.TransferStarted(name, place.target, moves=not latency_s))
        if latency_s:
            self._run.heap.push(now + latency_s, EventKind.DELIVERY, partial(self._pulls, name, move))
        self._send(name, move, move.size - move.rest)

    def _pulls(self, name: str, move: Move) -> None:
        """The prefill engine has answered. Only time-outs depend on this, so it is reported with the next events."""
        if self._moves.get(name) is move:
            self._run.later(partial(self._run.driver.report_later, ev.TransferMoves(name, move.target)))

    def _send(self, name: str, move: Move, size: float) -> None:
        due = move.seq.due if math.isfinite(move.seq.due) else move.began + NO_TARGET_S
        transfer = NetworkTransfer(name, move.source, move.target, size, due)
        self._run.links.send(transfer, partial(self._arrived, name, move), partial(self._link_failed, name, move))

    def _arrived(self, name: str, move: Move) -> None:
        """All that could be sent by now has come."""
        now, prefill = self._run.heap.now, self._ending.get(name)
        if not move.rest:
            latency_s = self._run.settings.links.latency_s
            self._run.heap.push(now + latency_s, EventKind.DELIVERY, partial(self._landed, name, move))
        elif prefill is None or prefill.computed:
            self._send_rest(name, move)
        else:
            move.waits_since = now

    def _send_rest(self, name: str, move: Move) -> None:
        rest, move.rest, now = move.rest, 0.0, self._run.heap.now
        if move.waits_since is not None:
            move.began += now - move.waits_since  # the link was not the bottleneck
        move.waits_since = None
        self._send(name, move, rest)

    def _landed(self, name: str, move: Move) -> None:
        in_flight, instance = self._run.in_flight(name), self._run.cluster.get(move.target)
        if self._moves.get(name) is not move or in_flight is None or instance is None:
            return  # rolled back meanwhile
        if name in self._ending:  # its first token is not reported yet: `prefilled` goes on
            move.landed = True
            return
        del self._moves[name]
        tokens = move.seq.prompt_tokens - move.seq.cached
        move.moved = KvMoved(round(move.size), tokens=tokens, seconds=self._run.heap.now - move.began)
        in_flight.go_on(instance.id, move.seq, self._run.heap.now)
        self._run.tell_engine(instance, [Landed(move.seq)])
        if instance.spec.first_token_with_kv:
            self._run.later(partial(self._heard_done, move, name))

    def _heard_done(self, move: Move, name: str) -> None:
        """Report the transfer and its first token, unless it was rolled back before the report arrived."""
        in_flight = self._run.in_flight(name)
        if in_flight is not None and in_flight.seq is move.seq:
            in_flight.first_at = self._run.heap.now
            self._run.driver.report(ev.TransferDone(name, move.target, move.moved))
            self._run.driver.report(ev.FirstToken(name))

    def _failed(self, name: str, target: str, reason: str) -> None:
        self._report(ev.TransferFailed(name, target, reason))

    def _report(self, event: ev.Event) -> None:
        """Report an event to the gateway, one network delay later."""
        self._run.later(partial(self._run.driver.report, event))

    # ---- undoing ---------------------------------------------------------------------------------------------------

    def _roll_back(self, name: str) -> None:
        move = self._moves.pop(name, None)
        if move is None:
            return
        self._run.links.cancel(name)
        instance = self._run.cluster.get(move.target)
        if instance is not None:
            self._run.tell_engine(instance, [Aborted(move.seq)])

    def _recall(self, abort: ev.Abort) -> None:
        """It landed before the migrator knew; the engine drops it again."""
        in_flight, instance = self._run.in_flight(abort.request_id), self._run.cluster.get(abort.instance_id)
        if in_flight is None or in_flight.landed_at is None or instance is None or in_flight.instance != instance.id:
            return
        if in_flight.seq is not None:
            seq = in_flight.seq
            in_flight.recall()
            self._run.tell_engine(instance, [Aborted(seq)])

    def _free(self, name: str, at: str = "") -> None:
        """Free its KV, `at` that instance or anywhere."""
        where, seq = self._kept.get(name, ("", None))
        instance = self._run.cluster.get(where)
        if at in ("", where):
            self._kept.pop(name, None)
        if instance is not None and seq is not None and at in ("", where):
            self._run.later(partial(self._release, instance, seq))
        elif at:
            self._run.driver.report_later(ev.KvReleased(name, at))

    def _release(self, instance: SimulatedInstance, seq: Seq) -> None:
        if instance.up:
            self._run.tell_engine(instance, [Release(seq)])
        self._run.driver.report_later(ev.KvReleased(seq.id, instance.id))

    def _link_failed(self, name: str, move: Move) -> None:
        self._roll_back(name)
        self._failed(name, move.target, "link_down")


def _nothing() -> None:
    """An empty happening, after which a pass follows."""
