"""Prefill/decode disaggregation in a run: the migrator that serves, driven over simulated engines and links.

A prefilled sequence keeps its KV on the prefill instance; the migrator places its decode stage; the decode instance
reserves blocks, the bytes flow, the sequence lands and goes on there, and the prefill instance frees what it kept.
With `links.overlap` the migrator hears when a prompt is nearly computed, as from the reference engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

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
from controller.core.types import Outcome, Role
from controller.dispatch import Migrator
from controller.dispatch.lifecycle import MAX_PREFILLS
from controller.simulator.fleet.cluster import Cluster
from controller.simulator.fleet.instance import Instance
from controller.simulator.fleet.kv_in_flight import Move, Prefill
from controller.simulator.fleet.network import LinkFailure, Network
from controller.simulator.fleet.ports import Ports
from controller.simulator.heap import SHORTEST_WAKE_S, EventHeap, Kind
from controller.simulator.settings import SimulationSettings
from controller.simulator.trip import Trip


class Host(Protocol):
    """What the handoff asks of the simulation."""

    cluster: Cluster
    heap: EventHeap
    settings: SimulationSettings

    def tell_dispatcher(self, *events: ev.Event) -> None: ...

    def tell_engine(self, instance: Instance, events: Sequence[EngineEvent]) -> Sequence[EngineAction]: ...

    def trip(self, request_id: str) -> Trip | None: ...

    def later(self, do: Callable[[], None]) -> None: ...

    def stop(self, trip: Trip, outcome: Outcome, reason: str) -> None: ...


class Handoff:
    """Between a first token and the decode instance that goes on from it."""

    def __init__(self, migrator: Migrator, host: Host) -> None:
        self.migrator = migrator
        self._ports = Ports(host.settings.links, host.cluster)
        self.network = Network(host.settings.links, self._ports.gb_s if self._ports.differ else None)
        self._host = host
        self._kept: dict[str, tuple[str, Seq]] = {}  # by request: where its KV is kept, and for which sequence
        self._ending: dict[str, Prefill] = {}  # until the gateway hears of its end
        self._moves: dict[str, Move] = {}
        self._news: list[ev.Event] = []
        self._settling = False
        self._wake = 0
        self._wake_at: float | None = None
        self._network_version = 0

    @property
    def moving(self) -> int:
        """Requests between their first token and their decode instance."""
        return len(self._kept)

    def start(self) -> None:
        for failure in self._host.settings.links.failures:
            self._host.heap.push(failure.at, Kind.FAILURE, partial(self._link_failed, failure))

    # ---- what the simulation says ----------------------------------------------------------------------------------

    def take(self, events: Sequence[ev.Event], actions: Sequence[ev.Action]) -> None:
        """All that the dispatcher was told, and what it said: requests it sent to prefill instances concern us."""
        self._news += events
        if self._ports.differ:
            for event in events:
                if isinstance(event, ev.InstanceUp):
                    self._news += self._ports.links_of(event.spec.id)
        for action in actions:
            if isinstance(action, ev.Send) and self._role(action.instance_id) is Role.PREFILL:
                self._news.append(ev.PrefillSent(action.request, action.instance_id, prefill_s=action.prefill_s))
        self._settle()

    def watch(self, instance: Instance, actions: Sequence[EngineAction]) -> None:
        """What an engine did, before anybody hears of it: last steps of prefills have begun or ended."""
        ending, instance.ending = instance.ending, []
        if not self._host.settings.links.overlap:
            return
        for seq in ending:
            self._ending[seq.id] = Prefill(instance, seq)
            self._host.later(partial(self._heard_ending, instance.id, seq))
        for action in actions:
            if isinstance(action, Finish):
                self._computed(action.seq)

    def _heard_ending(self, instance_id: str, seq: Seq) -> None:
        prefill = self._ending.get(seq.id)
        if prefill is not None and prefill.seq is seq:
            self._host.tell_dispatcher(ev.PrefillEnding(seq.id, instance_id))
            self._host.heap.push(self._host.heap.now, Kind.TICK, _nothing)  # so that a pass follows at this instant

    def _computed(self, seq: Seq) -> None:
        """The last layer of what moved already may follow."""
        prefill = self._ending.get(seq.id)
        if prefill is None or prefill.seq is not seq:
            return
        prefill.computed = True
        move = self._moves.get(seq.id)
        if move is not None and move.waits_since is not None:
            self._send_rest(seq.id, move)

    def prefilled(self, trip: Trip, instance: Instance, seq: Seq) -> None:
        """The engine ended the prefill and keeps the KV."""
        trip.prefill_instance = instance.id
        self._kept[seq.id] = (instance.id, seq)
        self._ending.pop(seq.id, None)
        trip.seq = None
        self._host.tell_dispatcher(ev.PrefillDone(trip.request, instance.id, seq.prompt_tokens))

    def forget(self, request_id: str) -> None:
        """The request is over, whatever it was doing."""
        self._undo(request_id)
        self._ending.pop(request_id, None)
        self._free(request_id)

    def busy(self, instance_id: str) -> bool:
        """Does it keep KV for somebody, or is KV on its way there?"""
        kept = any(where == instance_id for where, _ in self._kept.values())
        return kept or any(instance_id in (move.source, move.target) for move in self._moves.values())

    def died(self, instance: Instance) -> None:
        """All it kept and all that was on its way there or from there is gone; the migrator learns of the death."""
        for name in [name for name, move in self._moves.items() if instance.id in (move.source, move.target)]:
            self._undo(name)
        for name in [name for name, (where, _) in self._kept.items() if where == instance.id]:
            del self._kept[name]
        for name in [name for name, prefill in self._ending.items() if prefill.instance is instance]:
            del self._ending[name]

    # ---- the migrator's side ---------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Let the migrator act until nothing new happens at this instant."""
        now = self._host.heap.now
        self._settling = True
        while True:
            news, self._news = self._news, []
            reply = self.migrator.handle(news, now)
            for action in reply.actions:
                self._act(action)
            if not self._news:
                break
        self._settling = False
        at = None if reply.wake_at is None else max(reply.wake_at, now + SHORTEST_WAKE_S)
        if at == self._wake_at:
            return  # most passes leave the next time-out as it was
        self._wake, self._wake_at = self._wake + 1, at
        if at is not None:
            self._host.heap.push(at, Kind.TICK, partial(self._woke, self._wake))

    def _woke(self, version: int) -> None:
        if version == self._wake:
            self._wake_at = None
            self._news.append(ev.Woke())
            self._settle()

    def _act(self, action: ev.Action) -> None:
        host = self._host
        if isinstance(action, ev.Place):
            host.later(partial(self._reserve, action))
        elif isinstance(action, ev.FreeKv):
            self._free(action.request_id, action.instance_id)
        elif isinstance(action, ev.Abort):
            self._undo(action.request_id)
            self._recall(action)
        elif isinstance(action, ev.PrefillAgain):
            self._again(action)
        elif isinstance(action, ev.GiveUp):
            trip = host.trip(action.request.id)
            if trip is not None:
                host.stop(trip, Outcome.CUT, action.decision.reason)

    def _again(self, action: ev.PrefillAgain) -> None:
        """As the gateway does: with the same bound on prefills of one request."""
        host, request = self._host, action.request
        trip = host.trip(request.id)
        if trip is None:
            return
        self._stop_prefill(trip, request.id)
        request.attempts += action.counts
        if request.attempts >= MAX_PREFILLS:
            host.stop(trip, Outcome.FAILED, action.decision.reason)
            return
        trip.restart()
        host.tell_dispatcher(ev.Arrived(request, action.avoid))
        host.heap.push(host.heap.now, Kind.TICK, _nothing)

    def _stop_prefill(self, trip: Trip, name: str) -> None:
        """One that is not to be decoded from here, and has not ended as far as the dispatcher knows."""
        prefill = self._ending.pop(name, None)
        if prefill is None:
            instance = self._host.cluster.get(trip.instance)
            if trip.seq is None or trip.landed_at is not None or instance is None:
                return
            prefill = Prefill(instance, trip.seq)
            prefill.computed = trip.seq.state is SeqState.FINISHED  # and nobody has heard so
        self._host.tell_dispatcher(ev.Failed(name, False, "prefilled elsewhere"))
        if prefill.instance.up and prefill.seq.arrival <= self._host.heap.now:  # else it is not there yet, nor will be
            over = Release(prefill.seq) if prefill.computed else Aborted(prefill.seq)
            self._host.tell_engine(prefill.instance, [over])

    def _reserve(self, place: ev.Place) -> None:
        """Placed: the decode instance takes blocks, and the bytes begin to flow."""
        name, now = place.request.id, self._host.heap.now
        trip, instance = self._host.trip(name), self._host.cluster.get(place.target)
        source, early = self._host.cluster.get(place.source), self._ending.get(name)
        if trip is None or source is None or (early is None and name not in self._kept):
            return
        if instance is None or self._ports.dead(place.source, now) or self._ports.dead(place.target, now):
            self._failed(name, place.target, "no_instance" if instance is None else "link_down")
            return
        seq = trip.decode_sequence(now, place.rank)
        answers = self._host.tell_engine(instance, [Reserve(seq)])
        if not any(isinstance(action, Reserved) for action in answers):
            self._failed(name, place.target, "no_room")
            return
        move = self._moves[name] = Move(seq, place.source, place.target, now)
        move.size = float((seq.prompt_tokens - seq.cached) * source.kv_bytes_per_token)
        if early is not None:
            move.rest = move.size / self._host.settings.links.layers
        latency_s = self._host.settings.links.latency_s
        self._report(ev.TransferStarted(name, place.target, moves=not latency_s))
        if latency_s:
            self._host.heap.push(now + latency_s, Kind.DELIVERY, partial(self._pulls, name, move))
        self.network.start(name, place.source, place.target, move.size - move.rest, now)
        self._plan()

    def _pulls(self, name: str, move: Move) -> None:
        """The source has answered. Only time-outs depend on it, so it travels with other news."""
        if self._moves.get(name) is move:
            self._host.later(partial(self._news.append, ev.TransferMoves(name, move.target)))

    def _plan(self) -> None:
        self._network_version += 1
        if len(self.network):
            do = partial(self._arrivals, self._network_version)
            self._host.heap.push(max(self.network.next_end, self._host.heap.now), Kind.DELIVERY, do)

    def _arrivals(self, version: int) -> None:
        if version != self._network_version:
            return
        now, latency = self._host.heap.now, self._host.settings.links.latency_s
        for name in self.network.ended(now):
            move, prefill = self._moves[name], self._ending.get(name)
            if not move.rest:
                self._host.heap.push(now + latency, Kind.DELIVERY, partial(self._landed, name, move))
            elif prefill is None or prefill.computed:
                self._send_rest(name, move)
            else:
                move.waits_since = now
        self._plan()

    def _send_rest(self, name: str, move: Move) -> None:
        rest, move.rest, now = move.rest, 0.0, self._host.heap.now
        if move.waits_since is not None:
            move.began += now - move.waits_since  # it was not the link that took so long
        move.waits_since = None
        self.network.start(name, move.source, move.target, rest, now)
        self._plan()

    def _landed(self, name: str, move: Move) -> None:
        trip, instance = self._host.trip(name), self._host.cluster.get(move.target)
        if self._moves.get(name) is not move or trip is None or instance is None:
            return  # undone meanwhile
        if name in self._ending:  # the news of its first token is still on its way
            soon = self._host.heap.now + max(self._host.settings.network_s, SHORTEST_WAKE_S)
            self._host.heap.push(soon, Kind.DELIVERY, partial(self._landed, name, move))
            return
        del self._moves[name]
        tokens = move.seq.prompt_tokens - move.seq.cached
        move.moved = KvMoved(round(move.size), tokens=tokens, seconds=self._host.heap.now - move.began)
        trip.go_on(instance.id, move.seq, self._host.heap.now)
        self._host.tell_engine(instance, [Landed(move.seq)])
        self._host.later(partial(self._heard_done, move, name))

    def _heard_done(self, move: Move, name: str) -> None:
        """What was recalled while the news was on its way is not reported."""
        trip = self._host.trip(name)
        if trip is not None and trip.seq is move.seq:
            self._heard(ev.TransferDone(name, move.target, move.moved))

    def _failed(self, name: str, target: str, reason: str) -> None:
        self._report(ev.TransferFailed(name, target, reason))

    def _report(self, event: ev.Event) -> None:
        """The gateway hears of it a network delay later."""
        self._host.later(partial(self._heard, event))

    def _heard(self, event: ev.Event) -> None:
        self._news.append(event)
        if not self._settling:
            self._host.heap.push(self._host.heap.now, Kind.TICK, self._settle_news)

    def _settle_news(self) -> None:
        if self._news:
            self._settle()

    # ---- undoing ---------------------------------------------------------------------------------------------------

    def _undo(self, name: str) -> None:
        move = self._moves.pop(name, None)
        if move is None:
            return
        if self.network.cancel(name, self._host.heap.now):
            self._plan()
        instance = self._host.cluster.get(move.target)
        if instance is not None:
            self._host.tell_engine(instance, [Aborted(move.seq)])

    def _recall(self, abort: ev.Abort) -> None:
        """It landed before the migrator knew: the engine lets go of it again."""
        trip, instance = self._host.trip(abort.request_id), self._host.cluster.get(abort.instance_id)
        if trip is None or trip.landed_at is None or instance is None or trip.instance != instance.id:
            return
        if trip.seq is not None:
            seq, trip.seq, trip.landed_at = trip.seq, None, None
            self._host.tell_engine(instance, [Aborted(seq)])

    def _free(self, name: str, at: str = "") -> None:
        """What is kept of it: `at` that instance, or anywhere."""
        where, seq = self._kept.get(name, ("", None))
        instance = self._host.cluster.get(where)
        if at in ("", where):
            self._kept.pop(name, None)
        if instance is not None and seq is not None and at in ("", where):
            self._host.later(partial(self._release, instance, seq))
        elif at:
            self._news.append(ev.KvReleased(name, at))

    def _release(self, instance: Instance, seq: Seq) -> None:
        if instance.up:
            self._host.tell_engine(instance, [Release(seq)])
        self._news.append(ev.KvReleased(seq.id, instance.id))

    def _link_failed(self, failure: LinkFailure) -> None:
        instance = self._host.cluster.in_slot(failure.instance)
        if instance is None:
            return
        self._ports.cut(instance.id, self._host.heap.now + failure.for_s)
        for name in self.network.touching(instance.id):
            move = self._moves[name]
            self._undo(name)
            self._failed(name, move.target, "link_down")

    def _role(self, instance_id: str) -> Role | None:
        instance = self._host.cluster.get(instance_id)
        return instance.spec.role if instance is not None else None


def _nothing() -> None:
    """Only a happening, so that a pass follows."""
