"""What a gateway reports of itself: /healthz, /metrics, and the message that scaler and pages read."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator
from typing import Any

from api.openai.gateway import Gateway
from api.openai.tokenizers import READY
from controller.core.messages import (
    QUEUE_PRESSURE_ROWS,
    ClassWindow,
    DecisionCount,
    FleetMessage,
    InstanceMessage,
    LinkMessage,
    ModelTraffic,
)
from controller.core.snapshot import FleetState
from controller.core.types import DEFAULT_MAX_NUM_SEQS, Role
from controller.scale.traffic import model_traffic

Gauge = tuple[str, str, dict[str, str], float]


def health(gateway: Gateway) -> tuple[int, dict[str, Any]]:
    """/healthz: 503 without a configuration, with one that is too old, and while shutting down. `up`: the instance
    takes requests."""
    ready = gateway.snapshot is not None and not gateway.config_stale and not gateway.closing
    age_s = gateway.config_age_s()
    body = {
        "status": "ok" if ready else "unavailable",
        "gateway": gateway.options.name,
        "policy": gateway.scheduler.name,
        "ordering": gateway.scheduler.dispatcher.ordering,
        "config_version": gateway.snapshot.version if gateway.snapshot else None,
        "config_age_s": round(age_s, 1) if age_s is not None and math.isfinite(age_s) else None,
        "config_stale": gateway.config_stale,
        "instances": {each["id"]: each["state"] for each in instances(gateway, gateway.clock())},
        "queued": len(gateway.scheduler.queue()),
        "open": len(gateway.runtime.requests),
        "redis": gateway.redis,
        "telemetry": "leading" if gateway.monitor.leading else "following",
        "tokenizers": gateway.tokenizers.states(),
    }
    return (200 if ready else 503), body


def windows(gateway: Gateway, now: float) -> list[ClassWindow]:
    """Attainment by (tenant, class) over the last minute."""
    ledger = gateway.ledger
    queued = gateway.scheduler.queue().by_class()
    kinds = ledger.windows.kinds() | queued.keys()
    targets = {(tenant, name): gateway.book.attainment_target(tenant, name) for tenant, name in kinds}
    return ledger.windows.view(now, queued, targets)


def instance_message(state: FleetState, up: bool) -> InstanceMessage:
    return InstanceMessage(
        id=state.id,
        model=state.model,
        role=state.role,
        state=state.state if up else "down",
        running=state.running,
        waiting=state.waiting,
        waiting_tokens=state.waiting_tokens,
        kv_usage=state.kv_usage,
        slots=state.slots,
        utilisation=state.utilisation,
        telemetry_age_s=state.telemetry_age_s,
        sent_total=state.sent_total,
        kept_kv=state.kept_kv,
        needed=state.needed,
        speed=state.speed,
    )


def instances(gateway: Gateway, now: float) -> list[InstanceMessage]:
    """The instances that the scheduler knows, and those that are configured but do not answer."""
    known = {state.id: instance_message(state, True) for state in gateway.scheduler.fleet(now)}
    for name, seat in gateway.fleet.seats.items():
        if name not in known:
            spec = seat.spec
            slots = spec.max_num_seqs or DEFAULT_MAX_NUM_SEQS
            state = FleetState(name, spec.model, spec.role.value, "down", slots=slots)
            known[name] = instance_message(state, False)
    return [known[name] for name in sorted(known)]


def fleet_message(gateway: Gateway, seq: int, classes: list[ClassWindow]) -> FleetMessage:
    now = gateway.clock()
    queue = gateway.scheduler.queue()
    models, known = traffic_of(gateway, now), instances(gateway, now)
    return FleetMessage(
        gateway=gateway.options.name,
        at=gateway.shared.now(),
        seq=seq,
        period_s=gateway.monitor.period_s,
        instances=known,
        queued=len(queue),
        queued_tokens=queue.tokens,
        in_flight=len(gateway.runtime.requests) - len(queue),
        arrival_rate=sum(traffic["arrival_rate"] for traffic in models.values()),
        service_rate=sum(traffic["service_rate"] for traffic in models.values()),
        wait_over_slo=max((traffic["wait_over_slo"] for traffic in models.values()), default=0.0),
        models=models,
        classes=classes,
        tenants=gateway.quotas.open(),
        policy=gateway.scheduler.name,
        links=links(gateway, now),
        decisions=decisions(gateway),
        learned=gateway.learned_versions(),
        capacity=capacity(gateway.named_models, known, gateway.fleet.coming, gateway.fleet.on_demand),
        wanted=sorted(gateway.scheduler.wanted(now)),
        counted_s=max(0.0, now - gateway.started_at),
        pruning_orders=dict(gateway.scheduler.dispatcher.orders.taken),
    )


def capacity(
    models: Iterable[str], known: Iterable[InstanceMessage], coming: Container[str], on_demand: Container[str]
) -> dict[str, str]:
    """For each model, what would happen to a request: as the dispatcher decides it (`Lane.unserved`), and the migrator
    once it is prefilled."""
    up = {(each["model"], each["role"]) for each in known if each["state"] == "up"}
    asleep = {each["model"] for each in known if each["state"] == "asleep" and each["role"] != Role.DECODE}
    found = {}
    for model in models:
        if (model, Role.COLLOCATED) in up or {(model, Role.PREFILL), (model, Role.DECODE)} <= up:
            found[model] = "up"
        elif (model, Role.PREFILL) in up:
            found[model] = "undecoded"
        elif model in asleep or model in coming:
            found[model] = "coming"
        else:
            found[model] = "on_demand" if model in on_demand else "none"
    return found


def traffic_of(gateway: Gateway, now: float) -> dict[str, ModelTraffic]:
    """By model; the wait is the largest share of a TTFT target among each model's most urgent queued requests."""
    waiting = gateway.scheduler.queue().pressure(QUEUE_PRESSURE_ROWS, now)
    moving = gateway.scheduler.decode_pressure(now)
    arrived, finished = gateway.arrivals.rates(now), gateway.ledger.finished.rates(now)
    return model_traffic(now, arrived, finished, gateway.runtime.rates, waiting, moving)


def links(gateway: Gateway, now: float) -> list[LinkMessage]:
    """Links between prefill and decode instances, as the migrator believes them to be."""
    views = gateway.scheduler.links(now)
    return [
        LinkMessage(
            source=view.source,
            target=view.target,
            state=view.state.value,
            closed=view.closed,
            bandwidth_bytes_s=view.bandwidth_bytes_s,
            latency_s=view.latency_s,
        )
        for view in views
    ]


def decisions(gateway: Gateway) -> list[DecisionCount]:
    return [
        DecisionCount(tenant=tenant, slo_class=name, kind=kind, reason=reason, count=count)
        for (tenant, name, kind, reason), count in sorted(gateway.runtime.decided.items())
    ]


def metrics(gateway: Gateway) -> bytes:
    return gateway.instruments.page()


def gauges(gateway: Gateway) -> Iterator[Gauge]:
    """Figures that are read at each scrape: attainment, queue, fleet, decisions."""
    now = gateway.clock()
    for window in windows(gateway, now):
        who = {"tenant": window["tenant"], "slo_class": window["slo_class"]}
        if window["finished"]:
            share = window["attained"] / window["finished"]
            yield "attainment_ratio", "Attained share of requests over the last minute.", who, share
        yield "attainment_target_ratio", "Wanted share.", who, window["target"]
        yield (
            "goodput_tokens_per_second",
            "Token goodput, last minute.",
            who,
            window["goodput_tokens"] / window["window_s"],
        )
        yield "queued_requests", "Requests waiting in the gateway.", who, window["queued"]
        if window["oldest_slack_s"] is not None:
            yield "least_slack_seconds", "Smallest time to a first-token deadline.", who, window["oldest_slack_s"]
    for instance in instances(gateway, now):
        where = {"instance": instance["id"]}
        yield "instance_up", "1 when requests may be sent there.", where, float(instance["state"] == "up")
        yield "instance_running", "Requests decoding there.", where, instance["running"]
        yield "instance_waiting", "Requests waiting for prefill there.", where, instance["waiting"]
        yield "instance_kv_usage_ratio", "KV cache in use.", where, instance["kv_usage"]
    for link in links(gateway, now):
        ends = {"source": link["source"], "target": link["target"]}
        usable = link["state"] != "down" and not link["closed"]
        yield "link_usable", "1 when KV may be sent over it.", ends, float(usable)
        if link["bandwidth_bytes_s"] is not None:
            yield "link_bytes_per_second", "Bandwidth as its engine measured it.", ends, link["bandwidth_bytes_s"]
    for said in decisions(gateway):
        who = {"tenant": said["tenant"], "slo_class": said["slo_class"]}
        what = {"kind": said["kind"], "reason": said["reason"]}
        yield "decisions_total", "Decisions about requests.", who | what, said["count"]
    orders = "Orders of the coordinator of pruning, by what became of them."
    for outcome, count in sorted(gateway.scheduler.dispatcher.orders.taken.items()):
        yield "pruning_orders_total", orders, {"outcome": outcome}, count
    yield from _agents(gateway)
    for model, state in gateway.tokenizers.states().items():
        yield (
            "tokenizer_ready",
            "1 when prompts are counted by the model's tokenizer.",
            {"model": model},
            float(state == READY),
        )
    for model, error in gateway.prompt_lengths.errors().items():
        yield "prompt_error_ratio", "Mean error of prompt lengths taken from text.", {"model": model}, error
    left = gateway.runtime.transfers.left_to_lease
    yield "kv_left_to_lease", "Prompts whose KV its engine never said it had freed, since the start.", {}, left
    for part, count in gateway.unpublished.items():
        yield "publish_failures_total", "Times that a part of the state was not published.", {"part": part}, count
    yield "open_requests", "Requests queued or in flight.", {}, len(gateway.runtime.requests)
    yield (
        "config_version",
        "Version of the configuration in use.",
        {},
        gateway.snapshot.version if gateway.snapshot else 0,
    )


def _agents(gateway: Gateway) -> Iterator[Gauge]:
    """Of workflows, their steps, and calls that equal requests share."""
    alone = "Requests whose workflow's deadline could not be read from Redis, since the gateway started."
    yield "workflow_steps_alone_total", alone, {}, gateway.workflows.alone
    steps = "Answers of steps (`metadata.step_key`), by what came of keeping or finding them."
    for result, count in sorted(gateway.steps.counts.items()):
        yield "steps_total", steps, {"result": result}, count
    responses = "Stored responses, by what came of keeping or finding them."
    for result, count in sorted(gateway.responses.counts.items()):
        yield "stored_responses_total", responses, {"result": result}, count
    shared = "Requests that got the answer of an equal one's call (`share_call`)."
    for tenant, count in sorted(gateway.shared_calls.shared.items()):
        yield "shared_requests_total", shared, {"tenant": tenant}, count
