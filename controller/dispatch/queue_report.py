"""What a dispatcher tells the coordinator of pruning about its queues."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain, islice

from controller.core.pruning import KvPort, ModelQueue, PrefillUnit, QueueReport, WaitingPrefill
from controller.dispatch.lane import Lane
from controller.dispatch.queue import Entry
from controller.dispatch.scheduler import Scheduler
from controller.dispatch.shadow_state import ShadowInstance
from controller.dispatch.supply import MOST_PREFILLING

MOST_ROWS = 1_000  # of a queue; building them takes a millisecond
MARGIN_S = 0.05  # least slack of a first token, about one decode step
LEAST_OWN = 0.1  # of a prompt's time alone, at least, is its own when it shares a step with others


def queue_report(scheduler: Scheduler, gateway: str, now: float, clock_s: float = 0.0) -> QueueReport:
    """`clock_s` is added to the scheduler's times, for the clock that gateways share.

    Those that orders have pruned, and the first of each queue in its order: what comes later changes nothing for what
    comes before. Requests that cannot be in time any more, or that an operator paused, are left out.
    """
    migrator = scheduler.migrator
    ports = {} if migrator is None else migrator.kv_ports(clock_s)
    queues = []
    for model, lane in scheduler.dispatcher.lanes.items():
        queue = _queue(model, lane, ports, now, clock_s)
        if queue is not None:
            queues.append(queue if migrator is None else queue._replace(inbound=migrator.inbound(model)))
    return QueueReport(gateway, now + clock_s, queues)


def _queue(model: str, lane: Lane, ports: Mapping[str, KvPort], now: float, clock_s: float) -> ModelQueue | None:
    instances = [each for each in lane.instances.values() if each.takes]
    if not instances:
        return None
    constant_s = min(each.latency.coefficients.prefill_a for each in instances)
    pruned = (entry for _, entry in lane.queue.hopeless if entry.pruned and entry.hopeless_at > now)
    ready = (entry for _, entry in lane.queue.ready)
    entries = list(islice(chain(pruned, ready), MOST_ROWS))
    move_s = sum(entry.cost.first_byte_s for entry in entries) / max(1, len(entries))
    rows = [_row(entry, constant_s, clock_s) for entry in entries]
    return ModelQueue(model, rows, [_unit(each, ports.get(each.id), move_s, now) for each in instances])


def _row(entry: Entry, constant_s: float, clock_s: float) -> WaitingPrefill:
    """A prompt in a batch does not pay the batch's constant; a slot is also held while its prompt is computed."""
    request, cost = entry.request, entry.cost
    held = cost.prefill_s / cost.decode_step_s if cost.decode_step_s > 0 else 0.0
    return WaitingPrefill(
        request.id,
        request.due - cost.first_byte_s - MARGIN_S + clock_s,
        max(LEAST_OWN * cost.prefill_s, cost.prefill_s - constant_s),
        request.prompt_tokens,
        request.output_tokens + held,
        entry.forced,
        request.value,
    )


def _unit(instance: ShadowInstance, port: KvPort | None, move_s: float, now: float) -> PrefillUnit:
    token_rate, free_slots = 0.0, 0
    if instance.decodes:
        step_s = instance.full_step_s() / (1.0 - min(MOST_PREFILLING, instance.prefilling(now)))
        token_rate = instance.slots / max(step_s, 1e-6)
        free_slots, port = max(0, instance.free_slots), None
    return PrefillUnit(
        instance.id,
        instance.kept_for_prefills(),
        instance.waiting_prefill_s(),
        token_rate,
        free_slots,
        None if port is None else port._replace(move_s=move_s),
    )
