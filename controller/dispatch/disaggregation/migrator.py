"""The migrator: which decode instance takes over a prefilled request, and the life of each KV transfer, without I/O.

HyperFlexis sec. 5.1 schedules the two stages of disaggregation separately: the dispatcher knows the prefill instances,
the migrator the decode instances. A request is prefilling, waiting, placed (Place went out), reserved (blocks are
taken), moving (KV flows), committed (it decodes; what the prefill instance kept may go) and released (it is gone).

The migrator follows each transfer through these states. Where a decode stage goes is decided in `Placing`, by a
placement policy. Every state but the last has a time-out and a rollback (`Rollback`): whatever an instance or a link
does, the request is placed again, prefilled again (its KV is lost, cannot leave or never comes), or given up. Links
that are down are avoided.

Where KV can be pulled while it is computed, a stage is placed when its prompt is nearly computed: late enough to know
which instance will be free, early enough that most of the transfer happens during the prefill.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from controller.core import events as ev
from controller.core.kv_links import OTHER_MODEL, KvMoved
from controller.core.pruning import KvPort, OutgoingKv
from controller.core.snapshot import FleetState
from controller.core.types import Role
from controller.dispatch.disaggregation.first_byte import FirstBytes
from controller.dispatch.disaggregation.link_book import LinkBook
from controller.dispatch.disaggregation.migrator_config import MigratorConfig
from controller.dispatch.disaggregation.placements import Placement, Prefilled
from controller.dispatch.disaggregation.placing import Placing
from controller.dispatch.disaggregation.reach import IncompatiblePeers, Reach, begins_new_run
from controller.dispatch.disaggregation.rollback import Rollback
from controller.dispatch.disaggregation.transfers import DecodeTransfer, TransferQueue
from controller.dispatch.lane import speed_of, undominated
from controller.dispatch.learned import learned_states
from controller.dispatch.lifecycle import On, State
from controller.dispatch.orders import OrderBook
from controller.dispatch.shadow_state import Roster, ShadowInstance
from controller.dispatch.sole_keepers import Keepers

MOST_OUTGOING = 1_000  # requests of one instance that are told to the coordinator of pruning


class Migrator:
    """`name` is the policy set it was built from. `now` never goes backwards."""

    def __init__(self, name: str, config: MigratorConfig, placement: Placement) -> None:
        self.name = name
        self.config = config
        self.placement = placement
        self.links = LinkBook(config.link_failures, config.link_closed_s)
        self._roster = Roster()
        self.first_bytes = FirstBytes(self._roster.instances, self.links)
        self._queue = TransferQueue(placement.order, config)
        self._incompatible = IncompatiblePeers(config.incompatible_s, self._queue.under_way)
        self._reach = Reach(self._roster.instances, self.links, self._incompatible)
        self.rollback = Rollback(
            config, self._queue, self._roster, self.links, self._reach, self._incompatible, placement.one_shot
        )
        self.placing = Placing(
            name,
            config,
            placement,
            self._queue,
            self._roster,
            self.links,
            self._reach,
            self._incompatible,
            self.rollback,
        )
        self._orders = OrderBook()
        self._keepers: defaultdict[str, Keepers] = defaultdict(Keepers)  # by model
        self._now = 0.0
        self._handlers: dict[type, Callable[[Any, float, list[ev.Action]], None]] = {
            ev.PrefillSent: self._prefill_sent,
            ev.PrefillEnding: self._prefill_ending,
            ev.PrefillDone: self._prefill_done,
            ev.TransferStarted: self._started,
            ev.TransferMoves: self._moves,
            ev.TransferDone: self._done,
            ev.TransferFailed: self._transfer_failed,
            ev.KvReleased: self._released,
            ev.LinkSeen: self._link_seen,
            ev.Progress: self._progress,
            ev.AnswerBounded: self._bounded,
            ev.Finished: self._over,
            ev.Failed: self._over,
            ev.Cancelled: self._cancelled,
            ev.InstanceUp: self._instance_up,
            ev.InstanceDown: self._instance_down,
            ev.Telemetry: self._telemetry,
            ev.ClockOffset: self._clock_offset,
            ev.Orders: self._ordered,
        }

    # ---- the driver's side -----------------------------------------------------------------------------------------

    def handle(self, events: Sequence[ev.Event], now: float) -> ev.Reply:
        """Take in what happened, then place the stages that find an instance."""
        now = self._now = self._queue.now = max(now, self._now)
        actions: list[ev.Action] = []
        for event in events:
            handler = self._handlers.get(type(event))
            if handler is not None:
                handler(event, now, actions)
            else:
                self._roster_event(event)
        if now >= self._orders.expires_at:
            actions += self._orders.expire([self._queue], now)
        self.rollback.overdue(now, actions)
        self.placing.place_waiting(now, actions)
        wake_at = min(self.placing.next_at(now), self._orders.expires_at)
        return ev.Reply(actions, None if math.isinf(wake_at) else wake_at)

    def fleet(self, now: float) -> list[FleetState]:
        """The decode instances as they are believed to be."""
        decoders = [each for each in self._roster.instances.values() if each.spec.role is Role.DECODE]
        states = [instance.view(now) for instance in decoders]
        needed = self._needed(now) | self.wanted(now)
        for state in states:
            state.needed, state.speed = state.id in needed, speed_of(self._roster.instances[state.id])
        return states

    def kv_ports(self, clock_s: float = 0.0) -> dict[str, KvPort]:
        """The ports of prefill instances that transfers have measured, and what has to leave through them. `clock_s` is
        added to times."""
        rates = {name: self.links.port_s_a_token(name) for name in self._roster.instances}
        outgoing: dict[str, list[OutgoingKv]] = {name: [] for name, rate in rates.items() if rate}
        if outgoing:
            for transfer in self._queue:
                rows = outgoing.get(transfer.source)
                if rows is not None and not transfer.landed and len(rows) < MOST_OUTGOING:
                    request = transfer.request
                    tokens = transfer.kv_tokens or request.prompt_tokens
                    due = request.ttft_due + clock_s
                    rows.append(OutgoingKv(request.id, due, tokens, transfer.forced, request.value, transfer.target))
        return {name: KvPort(rates[name] or 0.0, outgoing=rows) for name, rows in outgoing.items()}

    def inbound(self, model: str) -> dict[str, float]:
        """Of the decode instances of a model, seconds of the port that receives KV for a token; 0 where transfers did
        not measure it. Empty if they measured none."""
        decoding = [each.id for each in self._roster.of_model(model) if each.takes_decodes]
        found = {name: self.links.inbound_s_a_token(name) or 0.0 for name in decoding}
        return found if any(found.values()) else {}

    def wanted(self, now: float) -> set[str]:
        """Ids of decode instances that drain or left, and that recent requests need."""
        return {name for keepers, serving, best in self._stages() for name in keepers.wanted(serving, best, now)}

    def _needed(self, now: float) -> set[str]:
        """Ids of decode instances that alone can keep the pace or the deadline of some recent request."""
        return {name for keepers, serving, best in self._stages() for name in keepers.needed(serving, best, now)}

    def _stages(self) -> Iterator[tuple[Keepers, list[ShadowInstance], list[ShadowInstance]]]:
        """Of each model: its keepers, the instances that decode, and those of which none is slower in everything."""
        for model, keepers in self._keepers.items():
            serving = [each for each in self._roster.of_model(model) if each.takes_decodes]
            yield keepers, serving, undominated(serving)

    def learned_state(self) -> dict[str, dict[str, Any]]:
        """All that was learned of decode instances, for another process (`controller.dispatch.learned`)."""
        return learned_states(self._roster.instances.values())

    def kept_kv(self) -> Counter[str]:
        """By prefill instance, how many prompts it computed whose KV is still to be pulled or freed. A copy that an
        engine left to its lease is not counted: nobody needs it."""
        kept = {(transfer.request.id, transfer.source) for transfer in self._queue if transfer.kv_is_kept}
        kept.update(self.rollback.kv_releases)
        return Counter(instance_id for _, instance_id in kept)

    @property
    def busy(self) -> bool:
        """Whether any decode stage is open, from the sending of its prefill on, or any KV is to be freed."""
        return len(self._queue) > 0 or len(self.rollback.kv_releases) > 0

    def waiting(self) -> int:
        """Prefilled requests that have no decode instance yet."""
        return self._queue.waiting

    def pressure(self, now: float) -> dict[str, tuple[int, float]]:
        """By model: how many wait for a decode instance, and the largest of their waits over what was left of TTFT."""
        return self._queue.pressure(now)

    def state_of(self, request_id: str) -> State | None:
        transfer = self._queue.get(request_id)
        return transfer.state if transfer is not None else None

    # ---- what happens ----------------------------------------------------------------------------------------------

    def _prefill_sent(self, event: ev.PrefillSent, now: float, actions: list[ev.Action]) -> None:
        self._keepers[event.request.model].noted.append((now, event.request))
        # Nothing is left of an earlier attempt, and what was decided for it in this pass no longer applies.
        self.rollback.forget(event.request.id)
        actions[:] = [each for each in actions if not _is_of_earlier(each, event)]
        self.rollback.kv_releases.over(event.request.id, event.instance_id)  # or the new KV would be freed for the old
        transfer = DecodeTransfer(event.request, event.instance_id, now, event.prefill_s, event.paired)
        self._queue.add(transfer)
        if self._incompatible and self.placing.turned_away(transfer, now, actions):
            return
        if self.placement.one_shot:
            candidates = self._reach.candidates(transfer, self._reach.decoders(transfer, now))
            choice = self.placement.choose(transfer.stage, candidates, now)
            if choice is not None:
                self.placing.assign(transfer, choice, now)
        if event.paired:
            self._begin_early(transfer, now)
        else:
            self.rollback.prefill_begins(transfer, now)

    def overlaps(self, event: ev.PrefillEnding) -> bool:
        """Whether its decode stage may be placed before its prefill has ended."""
        transfer = self._queue.get(event.request_id)
        if transfer is None or not self.config.overlap:
            return False
        return transfer.source == event.instance_id and transfer.state is State.PREFILLING

    def _prefill_ending(self, event: ev.PrefillEnding, now: float, actions: list[ev.Action]) -> None:
        transfer = self._queue.get(event.request_id)
        if transfer is not None and self.overlaps(event):
            self._begin_early(transfer, now)

    def _begin_early(self, transfer: DecodeTransfer, now: float) -> None:
        transfer.begin_early(max(now, transfer.due))
        self._queue.advance(transfer, On.PREFILL_ENDING, now)

    def _prefill_done(self, event: ev.PrefillDone, now: float, actions: list[ev.Action]) -> None:
        request = event.request
        known = self._queue.get(request.id)
        transfer = known or DecodeTransfer(request, event.instance_id, now)
        if known is not None and known.state is not State.PREFILLING:
            if known.early:  # from now on the time-outs of the transfer count
                self._queue.prefill_ended(known, now)
            return
        transfer.stage = Prefilled(request, now)
        transfer.source, transfer.kv_tokens = event.instance_id, event.kv_tokens
        self._queue.add(transfer)
        self._queue.advance(transfer, On.PREFILL_DONE, now)

    def _started(self, event: ev.TransferStarted, now: float, actions: list[ev.Action]) -> None:
        transfer = self._of(event.request_id, event.instance_id, actions)
        if transfer is not None:
            self._queue.advance(transfer, On.MOVES if event.moves else On.STARTED, now)

    def _moves(self, event: ev.TransferMoves, now: float, actions: list[ev.Action]) -> None:
        transfer = self._of(event.request_id, event.instance_id, actions)
        if transfer is not None:
            self._queue.advance(transfer, On.MOVES, now)

    def _done(self, event: ev.TransferDone, now: float, actions: list[ev.Action]) -> None:
        transfer = self._of(event.request_id, event.instance_id, actions)
        if transfer is None:
            return
        measured_late = transfer.landed and transfer.assumed and event.moved is not None  # with its whole answer
        if not measured_late and not self._queue.advance(transfer, On.DONE, now):
            return
        transfer.assumed = event.assumed
        if event.moved is not None and event.moved.reason:
            self.rollback.remember(transfer, event.moved.reason, now)
        elif not event.assumed:
            self._arrived(transfer, event.moved, now)
            if not measured_late:
                self.first_bytes.came(transfer, now)
        if event.released:
            self._queue.advance(transfer, On.RELEASED, now)
        elif not event.assumed:  # else it may still be pulled: freed when the answer has ended
            self.rollback.free(transfer, now, actions)
        instance = self._roster.instances.get(transfer.target)
        if instance is not None:
            instance.first_token(event.request_id, now, elsewhere=True)

    def _released(self, event: ev.KvReleased, now: float, actions: list[ev.Action]) -> None:
        self.rollback.kv_releases.over(event.request_id, event.instance_id)
        transfer = self._queue.get(event.request_id)
        if event.known and transfer is not None and transfer.source == event.instance_id:
            self._queue.advance(transfer, On.RELEASED, now)

    def _of(self, request_id: str, instance_id: str, actions: list[ev.Action]) -> DecodeTransfer | None:
        """The transfer that a report is about. One that was rolled back meanwhile is aborted at the engine too."""
        transfer = self._queue.get(request_id)
        if transfer is None or transfer.target != instance_id or transfer.state in (State.PREFILLING, State.WAITING):
            actions.append(ev.Abort(request_id, instance_id))
            return None
        return transfer

    def _transfer_failed(self, event: ev.TransferFailed, now: float, actions: list[ev.Action]) -> None:
        transfer = self._queue.get(event.request_id)
        if transfer is None or transfer.target != event.instance_id:
            return
        if transfer.kv_has_left:
            self.rollback.lost_at_target(transfer, event.reason, now, actions)
            return
        assumed = transfer.landed and transfer.assumed
        if not assumed and event.request_id not in self._queue.moving:
            return
        reason = event.reason
        if transfer.paired and reason == "no_room":
            reason = "refused"  # an engine without room lets a pair wait, so its refusal is a failure
        if transfer.state is State.RELEASED:  # it was only assumed to have landed, and now its KV is gone
            self.rollback.prefill_again(transfer, "kv_lost", now, actions)
        elif reason == "no_room":  # the shadow state was wrong: not counted as a failure
            transfer.not_before, transfer.turned_away = now + self.config.retry_s, True
            self.rollback.withdraw(transfer, now)
        elif transfer.kv_is_lost(reason):
            self.rollback.prefill_again(transfer, "kv_lost", now, actions)
        elif assumed and reason != OTHER_MODEL:  # its KV may be gone
            self.links.failed((transfer.source, transfer.target), transfer, now)
            self.rollback.free(transfer, now, actions)
            self.rollback.prefill_again(transfer, "decode_failed", now, actions)
        else:
            self.rollback.failed(transfer, reason, now, actions)

    def _link_seen(self, event: ev.LinkSeen, now: float, actions: list[ev.Action]) -> None:
        self.links.seen((event.source, event.target), event.state, event.bandwidth_bytes_s, event.latency_s)
        for instance in map(self._roster.instances.get, (event.source, event.target)):
            if instance is not None:
                self._queue.changed(instance.spec.model)

    def _progress(self, event: ev.Progress, now: float, actions: list[ev.Action]) -> None:
        transfer = self._queue.get(event.request_id)
        instance = self._roster.instances.get(transfer.target) if transfer is not None else None
        if instance is not None:
            instance.progress(event.request_id, event.tokens, now)

    def _bounded(self, event: ev.AnswerBounded, now: float, actions: list[ev.Action]) -> None:
        transfer = self._queue.get(event.request_id)
        instance = self._roster.instances.get(transfer.target) if transfer is not None else None
        if instance is not None:
            instance.bounded(event.request_id, event.most_tokens)

    def _over(self, event: ev.Finished | ev.Failed, now: float, actions: list[ev.Action]) -> None:
        if isinstance(event, ev.Finished):
            self._progress(ev.Progress(event.request_id, event.output_tokens), now, actions)
        transfer = self.rollback.forget(event.request_id)
        if transfer is None or not (transfer.landed and transfer.assumed):
            return
        self.rollback.free(transfer, now, actions)
        if isinstance(event, ev.Finished):
            self._arrived(transfer, None, now)

    def _ordered(self, event: ev.Orders, now: float, actions: list[ev.Action]) -> None:
        """Daemons send the KV of those that are named after that of others; here records are told."""
        actions += self._orders.take(event, [self._queue], now)

    def _arrived(self, transfer: DecodeTransfer, moved: KvMoved | None, now: float) -> None:
        """Its KV arrived, for certain: the link is good and the two instances are compatible."""
        if self.links.moved((transfer.source, transfer.target), moved, now) or self._incompatible:
            self._queue.changed(transfer.request.model)  # there may be a way now that others wait for
        self._incompatible.read(transfer.source, transfer.target, now)

    def _cancelled(self, event: ev.Cancelled, now: float, actions: list[ev.Action]) -> None:
        transfer = self.rollback.forget(event.request_id)
        if transfer is None:
            return
        if transfer.target and transfer.state is not State.PREFILLING:
            actions.append(ev.Abort(event.request_id, transfer.target))
        if not transfer.landed or transfer.assumed:  # also while it is prefilled: that may have ended just now
            self.rollback.free(transfer, now, actions)

    def _instance_up(self, event: ev.InstanceUp, now: float, actions: list[ev.Action]) -> None:
        before = self._roster.instances.get(event.spec.id)
        self._roster.handle(event)
        self._incompatible.forget(event.spec.id)
        self._keepers[event.spec.model].joined(event.spec.id)
        self._instances_changed(event.spec.model, now)
        if before is not None and before.spec.model != event.spec.model:
            self._instances_changed(before.spec.model, now)

    def _telemetry(self, event: ev.Telemetry, now: float, actions: list[ev.Action]) -> None:
        instance = self._roster.instances.get(event.instance_id)
        if instance is not None and self._incompatible and begins_new_run(event.load, instance.load):
            self._incompatible.forget(event.instance_id)
        self._roster_event(event)

    def _clock_offset(self, event: ev.ClockOffset, now: float, actions: list[ev.Action]) -> None:
        self.placing.offset_s = event.seconds

    def _roster_event(self, event: ev.Event) -> None:
        """What is believed of an instance changes."""
        self._roster.handle(event)
        instance = self._roster.instances.get(getattr(event, "instance_id", ""))
        if instance is not None:
            self._queue.changed(instance.spec.model)
            if isinstance(event, ev.InstanceDraining) and instance.spec.role is Role.DECODE:
                self._keepers[instance.spec.model].left(instance)

    def _instances_changed(self, model: str, now: float) -> None:
        self._queue.context_lengths(model, (each.spec.max_model_len for each in self._roster.of_model(model)), now)

    def _instance_down(self, event: ev.InstanceDown, now: float, actions: list[ev.Action]) -> None:
        gone = event.instance_id
        instance = self._roster.instances.get(gone)
        self._roster.handle(event)
        if instance is not None:
            self._instances_changed(instance.spec.model, now)
            if instance.spec.role is Role.DECODE:
                self._keepers[instance.spec.model].left(instance)
        self.links.forget(gone, self._roster.instances)
        self.first_bytes.forget(gone)
        self._incompatible.forget(gone)
        self.rollback.kv_releases.gone(gone)
        self._queue.prefills.forget(gone)
        for transfer in [t for t in self._queue if not t.landed]:
            if transfer.target == gone:
                transfer.target = ""
                self._queue.advance(transfer, On.UNDONE, now)
            if transfer.source == gone and transfer.state is not State.PREFILLING:
                self.rollback.prefill_again(transfer, "kv_lost", now, actions)


def _is_of_earlier(action: ev.Action, sent: ev.PrefillSent) -> bool:
    """Whether an earlier attempt caused it: another prefill, giving up, or freeing KV that is now computed again."""
    if isinstance(action, ev.PrefillAgain | ev.GiveUp):
        return action.request.id == sent.request.id
    return isinstance(action, ev.FreeKv) and action == ev.FreeKv(sent.request.id, sent.instance_id)
