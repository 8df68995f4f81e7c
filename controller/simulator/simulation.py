"""One run: a workload, a scheduler and simulated engines on one virtual clock.

The scheduler is told what a gateway would tell it, and no earlier: arrivals, first tokens, progress a few times a
second, ends, and telemetry with its period and delay. All state belongs to one Simulation, so that runs in one process
are independent. Nothing here draws random numbers (workloads do, before the run).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

from controller.core import events as ev
from controller.core.errors import ConfigError
from controller.core.steps import Added, EngineAction, EngineEvent, Finish, Reject, Seq
from controller.core.types import Part, Request
from controller.dispatch import Migrator, Scheduler, StageDispatcher, build_migrator
from controller.dispatch.lifecycle import Cause, cause_of, outcome
from controller.predict.lengths import OutputLengthModel
from controller.simulator.fleet.cluster import Cluster
from controller.simulator.fleet.disaggregation import SimulatedTransfers
from controller.simulator.fleet.driver import Driver
from controller.simulator.fleet.elastic import Elastic
from controller.simulator.fleet.failures import Failures
from controller.simulator.fleet.gateways import GatewayGroup
from controller.simulator.fleet.instance import SimulatedInstance
from controller.simulator.fleet.joins import Joins
from controller.simulator.fleet.links import FleetLinks
from controller.simulator.fleet.monitor import RunMonitor
from controller.simulator.fleet.presence import Presence
from controller.simulator.fleet.pruning import Pruning
from controller.simulator.heap import EventKind
from controller.simulator.in_flight import SimulatedRequest
from controller.simulator.mapping import MappedTargets
from controller.simulator.report.results import RunResult, SimRecord
from controller.simulator.report.trace_events import TraceWriter
from controller.simulator.settings import SimulationSettings
from controller.simulator.workloads.demand import Demand
from controller.simulator.workloads.programs import Programs

REPORT_EVERY = 500  # ended requests between two calls of `progress`


class Simulation:
    """A run, used once. `run` returns when every request has ended or its clients gave up."""

    def __init__(
        self,
        settings: SimulationSettings,
        dispatcher: StageDispatcher,
        demands: Sequence[Demand],
        *,
        programs: Programs | None = None,
        migrator: Migrator | None = None,
        keep_token_times: bool = False,
        trace: TraceWriter | None = None,
    ) -> None:
        """`migrator`: places decode stages, if instances have roles; None: that of the dispatcher's policy set."""
        if programs is not None:
            demands = [*demands, *programs.first()]
        if len({demand.id for demand in demands}) != len(demands):
            raise ConfigError("two requests of a workload have the same id", field="workload")
        self.settings = settings
        if settings.disaggregated:
            migrator = migrator or build_migrator(dispatcher.name)
        migrator = migrator if settings.disaggregated else None
        self.scheduler: Scheduler | GatewayGroup = Scheduler(dispatcher, migrator)
        if settings.gateways > 1:
            pairs = [deepcopy((dispatcher, migrator)) for _ in range(settings.gateways)]
            self.scheduler = GatewayGroup([Scheduler(*pair) for pair in pairs])
        self._elastic = Elastic(settings.elastic, self) if settings.elastic is not None else None
        listener = self._elastic.count if self._elastic is not None else None
        self.driver = Driver(self.scheduler, self._perform, listener=listener)
        self.heap = self.driver.heap
        self.result = RunResult(dispatcher.name)
        self._programs = programs
        self._expected = len(demands)
        self._demands = sorted(demands, key=lambda demand: (demand.at, demand.id))
        self._next = 0
        self._keep = keep_token_times
        self._lengths = OutputLengthModel()
        self._in_flight: dict[str, SimulatedRequest] = {}
        self.cluster = Cluster(settings)
        self.links = FleetLinks(settings.links, self.cluster, self.heap)
        self.joins = Joins(self.tell)
        self._trace = trace
        self.cluster.watch = trace.step if trace is not None else None
        self._mapped = MappedTargets(settings.mapping) if settings.mapping is not None else None
        self.kv = SimulatedTransfers(self) if settings.disaggregated else None
        self.performs = self._performers()
        self.driver.handlers |= {
            EventKind.STEP: self._step_ended,
            EventKind.FAILURE: self._fleet_changes,
            EventKind.DELIVERY: self._delivered,
            EventKind.ARRIVAL: self._arrival,
            EventKind.END: self._cut_off,
        }

    def _performers(self) -> dict[type, Callable[[Any], None]]:
        """What is done for each action of the scheduler."""
        return {
            ev.Send: lambda send: self._send(send.instance_id, [send]),
            ev.Refuse: self._refused,
            ev.Prune: self._pruned,
            ev.Drop: self._dropped,
            ev.Retry: lambda action: self._in_flight[action.request.id].restart(),
            ev.Fail: self._failed,
            ev.AnswerThere: self._answer_there,
            ev.Unscheduled: self._unscheduled,
            ev.GiveUp: self._given_up,
            ev.Abort: lambda action: None,  # without stages it answers a cancellation of what an engine had refused
            **(self.kv.performs if self.kv is not None else {}),
        }

    def run(self, progress: Callable[[int, int], None] | None = None) -> RunResult:
        """Run to the end. `progress(ended, of)` is called from time to time."""
        self._start()
        result, step = self.result, self.driver.step
        reported = 0
        while len(result.records) < (total := self._expected):
            if not self.heap:
                raise RuntimeError(f"{total - len(result.records)} requests can never end: nothing is scheduled")
            step()
            if progress is not None and len(result.records) >= reported + REPORT_EVERY:
                reported = len(result.records)
                progress(reported, total)
        self._finish()
        return result

    # ---- start and end --------------------------------------------------------------------------------------------

    def _start(self) -> None:
        Presence(self).start()
        Failures(self).start()
        self.links.start()
        if not self._demands:
            return
        self.heap.push(self._demands[0].at, EventKind.ARRIVAL)
        RunMonitor(self).start()
        if self.settings.pruning is not None:
            Pruning(self, self.settings.pruning).start()
        if self._elastic is not None:
            self._elastic.start()
            self.heap.push(self._elastic.settings.scaling.interval_s, EventKind.TICK, self._scale)
        if self.settings.cutoff_s is not None:
            self.heap.push(self._demands[-1].at + self.settings.cutoff_s, EventKind.END)

    def bring_up(self, name: str) -> None:
        """An ordered instance is up now, unless it was cancelled."""
        instance = self.cluster.bring_up(name)
        if instance is not None:
            self.tell(ev.InstanceUp(instance.spec))
            self.joins.came(name)
            if self.kv is not None:
                self.tell(*self.kv.links_of(instance.id))

    def tell(self, *events: ev.Event) -> None:
        """Give events to the scheduler in the next pass."""
        self.driver.tell(*events)

    def bring_up_later(self, name: str, at: float) -> None:
        """An instance that was ordered will serve at `at`."""
        self.heap.push(at, EventKind.FAILURE, name)

    def _finish(self) -> None:
        self.result.ended_at = self.heap.now
        self.result.events, self.result.rounds = self.driver.happened, self.driver.passes
        self.result.moved_bytes = self.links.network.moved_bytes
        if self._programs is not None:
            self.result.programs = self._programs.finished(self.heap.now)
        self.result.instances = self.cluster.uses(self.heap.now)
        if self._elastic is not None:
            self.result.decisions = self._elastic.decisions
            self.result.scaled_out = self._elastic.scaled_out(self.heap.now)

    def _cut_off(self, _: Any, __: int) -> None:
        """Clients give up: all open requests become misses."""
        for each in list(self._in_flight.values()):
            self._end(each, Cause.CUT_OFF, "cut_off", self._so_far(each))
        self._expected = len(self.result.records)  # calls not released yet are never made
        self.driver.drop_pending()

    # ---- arrivals --------------------------------------------------------------------------------------------------

    def _arrival(self, released: Demand | None, _: int) -> None:
        demand = released
        if demand is None:
            demand = self._demands[self._next]
            self._next += 1
            if self._next < len(self._demands):
                self.heap.push(self._demands[self._next].at, EventKind.ARRIVAL)
            if self._programs is not None:
                demand = self._programs.arrived(demand)
        in_flight = self._in_flight[demand.id] = SimulatedRequest(demand, self._request(demand))
        self.driver.tell(ev.Arrived(in_flight.request))

    def _request(self, demand: Demand) -> Request:
        model = demand.model or self.settings.instances[0].model
        expected = demand.output_tokens
        if not self.settings.know_output:
            expected = self._lengths.predict(demand.tenant, demand.slo_class, model, demand.max_tokens)
        targets, level, value = demand.targets, None, demand.value
        if self._mapped is not None:
            targets, level, value = self._mapped.assign(demand, self.scheduler.pending_above, self.heap.now)
        request = demand.request(model, targets, expected, level)
        request.value = value
        return request

    # ---- what the scheduler says -----------------------------------------------------------------------------------

    def _perform(self, actions: Sequence[ev.Action]) -> None:
        """Perform actions in their order, but combine successive sends to one instance."""
        sends: dict[str, list[ev.Send]] = {}
        for action in actions:
            kind = type(action)
            if kind is ev.Send:
                sends.setdefault(action.instance_id, []).append(action)  # type: ignore[union-attr, arg-type]
            else:
                if sends and kind is not ev.Refuse and kind is not ev.Drop:
                    self._send_all(sends)
                self.performs[kind](action)
        self._send_all(sends)

    def _refused(self, action: ev.Refuse) -> None:
        self._end(self._in_flight[action.request.id], cause_of(action), action.decision.reason, ())

    def _dropped(self, action: ev.Drop) -> None:
        self._end(self._in_flight[action.request.id], cause_of(action), action.decision.reason, ())

    def _pruned(self, action: ev.Prune) -> None:
        if action.decision.kind == "prune":
            self.result.pruned.add(action.request.id)

    def _unscheduled(self, action: ev.Unscheduled) -> None:
        self._end(self._in_flight[action.request.id], cause_of(action), "internal_error", ())

    def _given_up(self, action: ev.GiveUp) -> None:
        in_flight = self._in_flight.get(action.request.id)
        if in_flight is None:
            return
        if action.prefilled and self.kv is not None:
            self.kv.stop_prefill(in_flight)
        times = self._so_far(in_flight) if in_flight.first_at is not None else ()
        self._end(in_flight, cause_of(action), action.decision.reason, times)

    def _failed(self, action: ev.Fail) -> None:
        in_flight = self._in_flight[action.request.id]
        self._end(in_flight, cause_of(action), "engine_failed", in_flight.seen)

    def _send_all(self, sends: dict[str, list[ev.Send]]) -> None:
        for instance_id, batch in sends.items():
            self._send(instance_id, batch)
        sends.clear()

    def _send(self, instance_id: str, batch: Sequence[ev.Send]) -> None:
        now = self.heap.now
        arrives = now + self.settings.network_s
        seqs = []
        for send in batch:
            in_flight = self._in_flight[send.request.id]
            in_flight.instance, in_flight.sent_at = instance_id, now
            in_flight.sends += 1
            if self._elastic is not None:
                self._elastic.sent(send, now)
            seq = in_flight.sequence(arrives, prefill_only=send.part is Part.PREFILL)
            seq.priority = send.rank
            seqs.append(seq)
        self._deliver(instance_id, seqs)

    def _answer_there(self, action: ev.AnswerThere) -> None:
        """The call is made again without its stage, in the same attempt and with the same rank."""
        in_flight = self._in_flight[action.request.id]
        rank = in_flight.seq.priority if in_flight.seq is not None else 0
        seq = in_flight.sequence(self.heap.now + self.settings.network_s)
        seq.priority = rank
        self._deliver(action.instance_id, [seq])

    def _deliver(self, instance_id: str, seqs: Sequence[Seq]) -> None:
        if self.settings.network_s:
            self.heap.push(self.heap.now + self.settings.network_s, EventKind.DELIVERY, (instance_id, seqs))
        else:
            self._delivered((instance_id, seqs), 0)

    # ---- engines --------------------------------------------------------------------------------------------------

    def _delivered(self, subject: Any, _: int) -> None:
        """Sequences reached an engine, or (with a network delay) an answer came back from one."""
        if isinstance(subject, tuple) and isinstance(subject[1], list):
            instance_id, seqs = subject
            instance = self.cluster.get(instance_id)
            seqs = [seq for seq in seqs if self._current(seq)]
            if instance is None:
                for seq in seqs:
                    self.lost(self._in_flight[seq.id])
                return
            self.driver.tell(*(ev.Accepted(seq.id) for seq in seqs))
            self._tell(instance, instance.tell([Added(seq) for seq in seqs], self.heap.now))
        else:
            subject()

    def _current(self, seq: Seq) -> bool:
        in_flight = self._in_flight.get(seq.id)
        return in_flight is not None and in_flight.seq is seq

    def in_flight(self, request_id: str) -> SimulatedRequest | None:
        return self._in_flight.get(request_id)

    def tell_engine(self, instance: SimulatedInstance, events: Sequence[EngineEvent]) -> Sequence[EngineAction]:
        actions = instance.tell(events, self.heap.now)
        self._tell(instance, actions)
        return actions

    def _tell(self, instance: SimulatedInstance, actions: Sequence[EngineAction]) -> None:
        if instance.due is not None:
            self.heap.push(instance.due, EventKind.STEP, instance, instance.version)
        if self.kv is not None:
            self.kv.watch(instance, actions)
        for action in actions:
            if isinstance(action, Finish):
                self._finished(instance, action.seq)
            elif isinstance(action, Reject) and self._current(action.seq):
                self._rejected(action)

    def _step_ended(self, instance: SimulatedInstance, version: int) -> None:
        if version != instance.version or not instance.up:
            return
        first, actions = instance.complete(self.heap.now)
        for seq in first:
            self.later(partial(self._first_token, seq))
        self._tell(instance, actions)

    def later(self, do: Callable[[], None]) -> None:
        """Call now, or after the network delay."""
        if self.settings.network_s:
            self.heap.push(self.heap.now + self.settings.network_s, EventKind.DELIVERY, do)
        else:
            do()

    def _first_token(self, seq: Seq) -> None:
        """The client's first token, unless another instance decodes: then that one sends it (fleet.disaggregation)."""
        in_flight = self._in_flight.get(seq.id)
        if in_flight is not None and in_flight.seq is seq and not in_flight.prefills:
            if in_flight.landing:  # its decode engine says no more than this of the transfer
                self.driver.tell(ev.TransferDone(seq.id, in_flight.instance))
            in_flight.first_at = self.heap.now if in_flight.first_at is None else in_flight.first_at
            self.driver.tell(ev.FirstToken(seq.id))

    def _finished(self, instance: SimulatedInstance, seq: Seq) -> None:
        times = instance.token_times(seq)
        ended = partial(self._prefilled, instance) if seq.keep_kv else self._answered
        self.later(partial(ended, seq, times))

    def _prefilled(self, instance: SimulatedInstance, seq: Seq, times: array[float]) -> None:
        if self.kv is not None and self._current(seq):
            self._in_flight[seq.id].prefilled_at = times[0]
            self.kv.prefilled(self._in_flight[seq.id], instance, seq)

    def _answered(self, seq: Seq, times: array[float]) -> None:
        if not self._current(seq):
            return
        in_flight = self._in_flight[seq.id]
        if in_flight.prefills:  # and the engine keeps no KV of it: its first token was the last
            self.driver.tell(ev.AnsweredWhole(seq.id, in_flight.instance))
            return
        self.driver.tell(ev.Finished(seq.id, seq.output_tokens))
        request = in_flight.request
        self._lengths.observe(request.tenant, request.slo_class, request.model, seq.output_tokens)
        record = self._end(in_flight, Cause.ANSWERED, "", self._as_seen(in_flight.head + times))
        if self._mapped is not None and request.level is not None:
            self._mapped.ended(request.level, record, self.heap.now)

    def _as_seen(self, times: array[float]) -> array[float]:
        delay = self.settings.network_s
        return array("d", (at + delay for at in times)) if delay else times

    def _rejected(self, action: Reject) -> None:
        in_flight = self._in_flight[action.seq.id]
        if action.code == "too_long":
            self.driver.tell(ev.Cancelled(in_flight.request.id))
            self._end(in_flight, Cause.REJECTED, "too_long", ())
        else:
            self.lost(in_flight)

    def _so_far(self, in_flight: SimulatedRequest) -> array[float]:
        """Token times of an answer that is cut now."""
        instance = self.cluster.get(in_flight.instance)
        if instance is None or in_flight.seq is None:
            return self._as_seen(in_flight.head)
        return self._as_seen(in_flight.head + instance.token_times_so_far(in_flight.seq, self.heap.now))

    def _end(self, in_flight: SimulatedRequest, cause: Cause, reason: str, times: Sequence[float]) -> SimRecord:
        ended = outcome(cause, sent=in_flight.sends > 0, answering=in_flight.first_at is not None)
        del self._in_flight[in_flight.demand.id]
        if self.kv is not None:
            self.kv.forget(in_flight.demand.id)
        record = in_flight.record(ended, reason, self.heap.now, times, self._keep)
        self.result.records.append(record)
        if self._trace is not None:
            self._trace.request(record, self.heap.now)
        if self._programs is not None:
            for demand in self._programs.ended(
                in_flight.demand, ended, record.attained, record.goodput_tokens, self.heap.now
            ):
                self._expected += 1
                self.heap.push(demand.at, EventKind.ARRIVAL, demand)
        return record

    # ---- failures -------------------------------------------------------------------------------------------------

    def _fleet_changes(self, subject: Any, _: int) -> None:
        """A failure or a join (callable), or the id of an ordered instance that is up now."""
        if callable(subject):
            subject()
        else:
            self.bring_up(subject)

    def at_engine(self, instance_id: str) -> list[SimulatedRequest]:
        """Requests that the instance is serving."""
        return [each for each in self._in_flight.values() if each.instance == instance_id and each.seq is not None]

    def lost(self, in_flight: SimulatedRequest, *, down: bool = False) -> None:
        """The engine failed the request. `down`: because its instance is down."""
        if in_flight.landing:  # at a decode instance that has not said so yet: none of it is left
            in_flight.recall()
        in_flight.seen = self._so_far(in_flight)  # now, since the instance is gone when the scheduler answers
        failed = ev.EngineFailed(in_flight.request.id, in_flight.instance, "instance failed")
        self.driver.tell(failed._replace(at_fault="instance") if down else failed)

    # ---- ticks ----------------------------------------------------------------------------------------------------

    def _scale(self) -> None:
        if self._elastic is not None:
            self._elastic.tick(self.heap.now)
            self.heap.push(self.heap.now + self._elastic.settings.scaling.interval_s, EventKind.TICK, self._scale)
