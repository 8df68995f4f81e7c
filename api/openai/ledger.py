"""What a gateway counts of its requests: records, attainment windows, rates, Prometheus metrics.

The Ledger is told of every request that ended, exactly once, and keeps all of it up to date. Instruments are the
Prometheus metrics; their labels are bounded: tenants and classes of the configuration, codes, outcomes. Rates are
requests per second over the last ten seconds, which the scaler sizes a fleet by.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import prometheus_client as prometheus
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from api.openai.in_flight import InFlightRequest
from api.openai.state.refusal_groups import RecordSink, RefusalGroups
from api.openai.tenants import Quotas
from controller.core.types import Outcome, Outlook, RequestRecord
from controller.scale.traffic import ModelRates
from controller.slo.attainment import AttainmentWindows, judge
from controller.slo.request_types import RequestType, goodput_counts, type_of

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
_PER_TOKEN = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)

Learn = Callable[[InFlightRequest, RequestRecord, float], None]
Tell = Callable[[InFlightRequest, RequestRecord], None]


class Ledger:
    """`refused`: takes the records of requests that no engine was asked for. `learn`: told of every request that ended
    well, for the predictions made at arrival. `tell`: of every request that was let in and ended."""

    def __init__(
        self,
        sink: RecordSink,
        refused: RefusalGroups,
        quotas: Quotas,
        instruments: Instruments,
        learn: Learn = lambda in_flight, record, now: None,
        tell: Tell = lambda in_flight, record: None,
    ) -> None:
        self.windows = AttainmentWindows()
        self.finished = ModelRates()
        self.refusals: Counter[tuple[str, str, str]] = Counter()  # (tenant, class, code) since the last decision
        self._sink = sink
        self._refused = refused
        self._quotas = quotas
        self._instruments = instruments
        self._learn = learn
        self._tell = tell

    def ended(
        self, in_flight: InFlightRequest, outcome: Outcome, now: float, *, code: str = "", status: int = 200
    ) -> None:
        """A request that was let in has ended."""
        # First, so that the tenant's next request finds the room even if recording this one fails.
        self._quotas.release(in_flight.request.tenant, in_flight.charged_tokens, _tokens(in_flight))
        self._tell(in_flight, self.note(in_flight, outcome, now, code=code, status=status))

    def note(
        self, in_flight: InFlightRequest, outcome: Outcome, now: float, *, code: str = "", status: int = 200
    ) -> RequestRecord:
        """The same for a request that its quota refused, which was never let in."""
        record, cause = _record(in_flight, outcome, now, code, status)
        # First: whatever fails below, the request has its record.
        if outcome is Outcome.REFUSED and not record.attempts:
            self._refused.add(record, cause)
        else:
            self._sink.add(record)
        if outcome is Outcome.OK and not in_flight.follows:  # else another one stands for what the fleet did
            self.finished.tick(in_flight.request.model, now)
            self._learn(in_flight, record, now)
        elif outcome in (Outcome.REFUSED, Outcome.EXPIRED):
            self.refusals[record.tenant, record.slo_class, code] += 1
        self.windows.observe(record, cause, now)
        self._instruments.ended(record)
        return record


# ---- the record -----------------------------------------------------------------------------------------------------


def _tokens(in_flight: InFlightRequest) -> int:
    """What the tokens-a-minute quota is charged in the end: nothing if it never reached an engine."""
    prompt = in_flight.prompt_tokens
    return prompt + in_flight.output_tokens if in_flight.sends else 0


class _Measured(NamedTuple):
    """Seconds after arrival, and per token. `judged_s`: of the token that its targets call the first."""

    ttft_s: float | None
    first_answer_s: float | None
    judged_s: float | None
    tpot_s: float | None


def _measured(times: list[float], in_flight: InFlightRequest) -> _Measured:
    tokens, reasoning = in_flight.output_tokens, in_flight.reasoning_tokens
    thinks = in_flight.request.targets.thinking_s is not None
    ttft_s = times[0] if times else None
    answer_s = times[reasoning] if len(times) > reasoning and (thinks or reasoning) else None
    first_s, paced = ttft_s, float(tokens)
    if thinks:  # engines may put several tokens into an event, and say only how many there were in all
        ending = 1 if reasoning and tokens > len(times) else 0  # vLLM counts the token that ends the reasoning, unsent
        first_s, paced = answer_s, (tokens - ending) * (1.0 - reasoning / max(1, len(times)))
    tpot_s = (times[-1] - first_s) / (paced - 1.0) if first_s is not None and paced > 1.0 else None
    return _Measured(ttft_s, answer_s, first_s, tpot_s)


def _record(
    in_flight: InFlightRequest, outcome: Outcome, now: float, code: str, status: int
) -> tuple[RequestRecord, str]:
    request, prompt_tokens = in_flight.request, in_flight.prompt_tokens
    e2e_s = now - request.arrival
    times = [at - request.arrival for at in in_flight.times] if in_flight.times is not None else None
    n = in_flight.output_tokens
    measured = _measured(times or [], in_flight)
    outlook = judge(
        request.targets,
        outcome,
        ttft_s=measured.judged_s,
        tpot_s=measured.tpot_s,
        e2e_s=e2e_s,
        prompt_tokens=prompt_tokens,
        output_tokens=n,
        token_times=(times or []) if in_flight.streamed else None,
        reasoning=in_flight.reasoning_tokens,
    )
    queue_s = in_flight.sent_at - request.arrival if in_flight.sent_at is not None else None
    record = RequestRecord(
        id=request.id,
        arrived_at=in_flight.arrived_wall,
        tenant=request.tenant,
        slo_class=request.slo_class,
        model=request.model,
        priority=request.priority,
        instance=in_flight.instance,
        outcome=outcome.value,
        error_code=code,
        http_status=status,
        streamed=in_flight.streamed,
        judged_by="tokens" if in_flight.streamed else "e2e",
        prompt_tokens=prompt_tokens,
        output_tokens=n,
        target_ttft_s=request.targets.ttft_s,
        target_tpot_s=request.targets.tpot_s,
        target_deadline_s=request.targets.deadline_s,
        waiting_time_s=request.targets.waiting_time_s,
        queue_s=queue_s,
        ttft_s=measured.ttft_s,
        tpot_s=measured.tpot_s,
        e2e_s=e2e_s,
        ttft_met=outlook.ttft_met,
        tpot_met=outlook.tpot_met,
        deadline_met=outlook.deadline_met,
        attained=outlook.attained,
        goodput_tokens=outlook.goodput_tokens,
        attempts=in_flight.sends,
        **_place(in_flight),
        decisions=in_flight.decisions or [],
        token_times=summary(times) if times else [],
        prefill_instance=in_flight.prefill_instance,
        may_defer=request.may_defer,
        target_thinking_s=request.targets.thinking_s,
        **_reasoned(in_flight, measured),
        **_lengths(in_flight),
    )
    return record, _cause(in_flight, outcome, outlook, code, queue_s)


def _place(in_flight: InFlightRequest) -> dict[str, Any]:
    """In its workflow."""
    request, (key, parents, tools) = in_flight.request, in_flight.named
    return {
        "workflow": request.workflow,
        "stage": request.stage,
        "step_key": key,
        "parents": None if parents is None else list(parents),
        "tool_steps": [dict(each) for each in tools],
    }


def _reasoned(in_flight: InFlightRequest, measured: _Measured) -> dict[str, Any]:
    """What came before its answer, and when that began."""
    return {"first_answer_s": measured.first_answer_s, "reasoning_tokens": in_flight.reasoning_tokens}


def _lengths(in_flight: InFlightRequest) -> dict[str, Any]:
    """What the length of its answer was predicted from. Nobody learns from a request that no engine was asked for."""
    foretold = in_flight.foretold
    if foretold is None or not in_flight.sends:
        return {}
    return {
        "length_features": list(foretold.features),
        "length_bounds": list(foretold.bounds or ()),
        "length_version": foretold.version,
        "refined_bounds": None if in_flight.refined is None else list(in_flight.refined[:3]),
    }


def summary(times: list[float]) -> list[float]:
    """The 1st, 2nd, 4th, 8th ... and last time, rounded to microseconds."""
    kept, index = [], 1
    while index < len(times):
        kept.append(round(times[index - 1], 6))
        index *= 2
    return [*kept, round(times[-1], 6)]


def _cause(in_flight: InFlightRequest, outcome: Outcome, outlook: Outlook, code: str, queue_s: float | None) -> str:
    """Why it is a miss, in one short code; "" when attained or cancelled by its client."""
    if outlook.attained or outcome is Outcome.CANCELLED:
        return ""
    if outcome is Outcome.CUT and code != "cancelled":
        return code if code == "shutting_down" else "engine_cut"
    if outcome is not Outcome.OK:
        return _decided(in_flight) or code or outcome.value
    if not in_flight.streamed and not outlook.ttft_met:
        return "e2e_missed"
    if not outlook.ttft_met:
        targets = in_flight.request.targets
        # With a thinking deadline, `ttft_s` is a guess of when the reasoning has to begin.
        due_s, late = targets.ttft_s, "slow_first_token"
        if targets.thinking_s is not None:
            due_s, late = targets.thinking_s, "slow_thinking"
        return "queued_too_long" if (queue_s or 0.0) > due_s / 2 else late
    return "slow_decode" if not outlook.tpot_met else "deadline_missed"


def _decided(in_flight: InFlightRequest) -> str:
    """The reason of the decision that ended it, which says more than the code its client got; "" if none ended it."""
    if not in_flight.decisions:
        return ""
    last = in_flight.decisions[-1]
    if last["kind"] not in ("refuse", "expire", "cancel"):
        return ""
    known = _expired(last["figures"]) if last["reason"] == "waiting_time" else ""
    return known or str(last["reason"])


def _expired(figures: Mapping[str, Any]) -> str:
    """Why its waiting time ran out, if more is known than that."""
    if figures.get("paused"):
        return "expired_paused"
    if figures.get("instances") == 0:
        return "expired_without_instance"
    if figures.get("pruned"):
        return "expired_pruned"
    return "expired_hopeless" if figures.get("hopeless") else ""


# ---- Prometheus -----------------------------------------------------------------------------------------------------


class Instruments:
    """Prometheus metrics. Children of labelled metrics are kept: looking one up costs more than counting."""

    def __init__(self) -> None:
        prometheus.disable_created_metrics()  # a second series for each counter, which nobody reads
        self.registry = prometheus.CollectorRegistry()
        labels = ("tenant", "slo_class")
        self._requests = self._counter("requests", "Requests by outcome.", (*labels, "outcome", "code"))
        self._attained = self._counter("attained", "Requests that met TTFT and TPOT (and their deadline).", labels)
        types = (*labels, "type")
        self._finished = self._counter("goodput_finished", "Requests that goodput counts, misses too.", types)
        self._in_time = self._counter("goodput_requests", "Requests in time, without those of workflows.", types)
        self._goodput = self._counter("goodput_tokens", "Tokens in time, without those of workflows.", types)
        self._errors = self._counter("api_errors", "Requests refused before they got a class.", ("code",))
        self._tokens = self._counter("tokens", "Tokens of finished requests.", (*labels, "kind"))
        self._ttft = self._histogram("ttft_seconds", "Arrival to first token.", labels, _SECONDS)
        self._tpot = self._histogram("tpot_seconds", "Mean time per output token after the first.", labels, _PER_TOKEN)
        self._queue = self._histogram("queue_seconds", "Arrival to the last send to an engine.", labels, _SECONDS)
        self._e2e = self._histogram("e2e_seconds", "Arrival to last token.", labels, _SECONDS)
        self._children: dict[tuple[str, ...], Any] = {}

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> prometheus.Counter:
        return prometheus.Counter(f"slackline_{name}", text, labels, registry=self.registry)

    def _histogram(
        self, name: str, text: str, labels: tuple[str, ...], buckets: tuple[float, ...]
    ) -> prometheus.Histogram:
        return prometheus.Histogram(f"slackline_{name}", text, labels, buckets=buckets, registry=self.registry)

    def _child(self, metric: prometheus.Counter | prometheus.Histogram, *labels: str) -> Any:
        key = (metric._name, *labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = metric.labels(*labels)
        return child

    def ended(self, record: RequestRecord) -> None:
        who = (record.tenant, record.slo_class)
        self._child(self._requests, *who, record.outcome, record.error_code).inc()
        if record.attained:
            self._child(self._attained, *who).inc()
        if record.output_tokens:
            self._child(self._tokens, *who, "prompt").inc(record.prompt_tokens)
            self._child(self._tokens, *who, "output").inc(record.output_tokens)
        times = ((self._queue, record.queue_s), (self._ttft, record.ttft_s), (self._tpot, record.tpot_s))
        for metric, seconds in times:
            if seconds is not None:
                self._child(metric, *who).observe(seconds)
        if record.outcome == "ok" and record.e2e_s is not None:
            self._child(self._e2e, *who).observe(record.e2e_s)

        self._count_goodput(record)

    def _count_goodput(self, record: RequestRecord) -> None:
        """A workflow's requests come to several gateways, and it counts once: the console counts it from its row."""
        kind = type_of(record)
        if kind is RequestType.COMPOUND:
            return
        counts = goodput_counts(record, kind)
        who = (record.tenant, record.slo_class, kind.value)
        amounts = (
            (self._finished, counts.finished),
            (self._in_time, counts.in_time),
            (self._goodput, counts.goodput_tokens),
        )
        for metric, amount in amounts:
            if counts.finished:
                self._child(metric, *who).inc(amount)

    def refused(self, code: str) -> None:
        self._child(self._errors, code).inc()

    def page(self) -> bytes:
        return prometheus.generate_latest(self.registry)

    def watch(self, read: Callable[[], Iterable[tuple[str, str, dict[str, str], float]]]) -> None:
        """Gauges read at scrape time: (name, help, labels, value) each."""
        self.registry.register(_Gauges(read))


class _Gauges(Collector):
    def __init__(self, read: Callable[[], Iterable[tuple[str, str, dict[str, str], float]]]) -> None:
        self._read = read

    def describe(self) -> Iterable[Any]:
        return []

    def collect(self) -> Iterator[Any]:
        families: dict[str, Any] = {}
        for name, text, labels, value in self._read():
            family = families.get(name)
            if family is None:
                kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                family = families[name] = kind(f"slackline_{name}", text, labels=list(labels))
            family.add_metric(list(labels.values()), value)
        yield from families.values()
