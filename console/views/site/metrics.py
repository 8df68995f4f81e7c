"""Prometheus form: the console's own requests and sockets; attainment and queue by class as gateways publish them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_GET
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from console.live.live_view import merge_instances
from console.live.ttl_cache import TtlCache
from console.metrics import REGISTRY
from console.views.site.health import reads_details
from controller.core.messages import FleetMessage
from controller.slo.windows import merged_windows
from workers import live
from workers.http.details import KEPT_S, MISSING


class FleetCollector(Collector):
    """One scrape's view of the fleet. Without Redis only `slackline_live_available 0` is left: no figure is made up."""

    def __init__(self, fleets: Sequence[FleetMessage] | None, now: float) -> None:
        self._fleets, self._now = fleets, now

    def collect(self) -> Iterable[Metric]:
        available = GaugeMetricFamily("slackline_live_available", "1 if live state could be read from Redis")
        available.add_metric([], 0.0 if self._fleets is None else 1.0)
        yield available
        if self._fleets:
            yield from self._gateways(self._fleets)
            yield from self._classes(self._fleets)
            yield self._decisions(self._fleets)
            yield from self._instances(self._fleets)

    def _gateways(self, fleets: Sequence[FleetMessage]) -> Iterable[Metric]:
        age = GaugeMetricFamily("slackline_fleet_age_seconds", "Age of a gateway's newest state", labels=["gateway"])
        for fleet in fleets:
            age.add_metric([fleet["gateway"]], max(0.0, self._now - fleet["at"]))
        yield age

    def _classes(self, fleets: Sequence[FleetMessage]) -> Iterable[Metric]:
        labels = ["tenant", "slo_class"]
        share = GaugeMetricFamily("slackline_attainment_ratio", "Share attained in the last window", labels=labels)
        target = GaugeMetricFamily("slackline_attainment_target_ratio", "Attainment target of the class", labels=labels)
        finished = GaugeMetricFamily("slackline_window_requests", "Requests in the last window", labels=labels)
        queued = GaugeMetricFamily("slackline_queued_requests", "Waiting in gateways", labels=labels)
        least = "Least slack of a waiting request, in seconds"
        slack = GaugeMetricFamily("slackline_queue_least_slack_seconds", least, labels=labels)
        for window in merged_windows(fleets):
            names = [window["tenant"], window["slo_class"]]
            if window["finished"]:
                share.add_metric(names, window["attained"] / window["finished"])
            target.add_metric(names, window["target"])
            finished.add_metric(names, window["finished"])
            queued.add_metric(names, window["queued"])
            if window["oldest_slack_s"] is not None:
                slack.add_metric(names, window["oldest_slack_s"])
        yield from (share, target, finished, queued, slack)

    def _decisions(self, fleets: Sequence[FleetMessage]) -> Metric:
        """By gateway: each begins at 0 when it starts, so their sum would seem to be reset by any of them."""
        names = ["gateway", "tenant", "slo_class", "kind", "reason"]
        total = CounterMetricFamily(
            "slackline_decisions", "Decisions about requests, as published by gateways", labels=names
        )
        for fleet in fleets:
            for said in fleet.get("decisions", ()):
                who = [fleet["gateway"], said["tenant"], said["slo_class"], said["kind"], said["reason"]]
                total.add_metric(who, said["count"])
        return total

    def _instances(self, fleets: Sequence[FleetMessage]) -> Iterable[Metric]:
        labels = ["instance", "model", "role", "state"]
        load = GaugeMetricFamily("slackline_instance_utilisation_ratio", "Load of an instance, 0 to 1", labels=labels)
        for each in merge_instances(fleets):
            load.add_metric([each["id"], each["model"], each["role"], each["state"]], each["utilisation"])
        yield load


PAGE: TtlCache[bytes] = TtlCache(KEPT_S)


@require_GET
def metrics(request: HttpRequest) -> HttpResponse:
    if not reads_details(request):
        head = {"WWW-Authenticate": 'Bearer realm="slackline"'}
        return HttpResponse(f"{MISSING}\n", status=401, content_type="text/plain; charset=utf-8", headers=head)
    return HttpResponse(PAGE.get(_page), content_type=CONTENT_TYPE_LATEST)


def _page() -> bytes:
    try:
        fleets: list[FleetMessage] | None = live.read_fleet()
    except live.LiveUnavailable:
        fleets = None
    registry = CollectorRegistry()
    registry.register(FleetCollector(fleets, time.time()))
    return generate_latest(REGISTRY) + generate_latest(registry)
