"""Prometheus metrics of the gateway. Labels are bounded: tenants and classes of the configuration, codes, outcomes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from controller.core.types import RequestRecord

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
_PER_TOKEN = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)


class Instruments:
    """Children of labelled metrics are kept: looking one up costs more than counting."""

    def __init__(self) -> None:
        disable_created_metrics()  # a second series for each counter, which nobody reads
        self.registry = CollectorRegistry()
        labels = ("tenant", "slo_class")
        self._requests = self._counter("requests", "Requests by outcome.", (*labels, "outcome", "code"))
        self._attained = self._counter("attained", "Requests that met TTFT and TPOT (and their deadline).", labels)
        self._errors = self._counter("api_errors", "Requests refused before they got a class.", ("code",))
        self._tokens = self._counter("tokens", "Tokens of finished requests.", (*labels, "kind"))
        self._ttft = self._histogram("ttft_seconds", "Arrival to first token.", labels, _SECONDS)
        self._tpot = self._histogram("tpot_seconds", "Mean time per output token after the first.", labels, _PER_TOKEN)
        self._queue = self._histogram("queue_seconds", "Arrival to the last send to an engine.", labels, _SECONDS)
        self._e2e = self._histogram("e2e_seconds", "Arrival to last token.", labels, _SECONDS)
        self._children: dict[tuple[str, ...], Any] = {}

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> Counter:
        return Counter(f"slackline_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, labels: tuple[str, ...], buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"slackline_{name}", text, labels, buckets=buckets, registry=self.registry)

    def _child(self, metric: Counter | Histogram, *labels: str) -> Any:
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

    def refused(self, code: str) -> None:
        self._child(self._errors, code).inc()

    def page(self) -> bytes:
        return generate_latest(self.registry)

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
