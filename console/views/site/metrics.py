"""Prometheus form: the console's own requests and sockets; attainment and queue by class as gateways publish them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta

from django.db import InterfaceError, OperationalError
from django.http import HttpRequest, HttpResponse
from django.utils import timezone
from django.views.decorators.http import require_GET
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from psycopg_pool import PoolTimeout

from console.live.live_view import merge_instances
from console.live.ttl_cache import TtlCache
from console.metrics import REGISTRY
from console.views.site.health import reads_details
from controller.core.messages import FleetMessage
from controller.selectors.records.goodput import Goodput, workflow_goodput
from controller.slo.windows import merged_windows
from workers import live
from workers.http.details import KEPT_S, MISSING

log = logging.getLogger(__name__)
WORKFLOWS_KEPT_S = 10.0  # a scrape a second must not sum an hour of workflows each time


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


class WorkflowCollector(Collector):
    """Workflows that ended in the last hour. None: the database could not be read, so that there are no figures."""

    def __init__(self, rows: Sequence[Goodput] | None) -> None:
        self._rows = rows

    def collect(self) -> Iterable[Metric]:
        labels = ["tenant", "slo_class"]
        ended = GaugeMetricFamily(
            "slackline_goodput_hour_workflows_finished", "Workflows that ended in the last hour", labels=labels
        )
        in_time = GaugeMetricFamily(
            "slackline_goodput_hour_workflows", "Those of them that were in time", labels=labels
        )
        tokens = GaugeMetricFamily("slackline_goodput_hour_workflow_tokens", "Tokens of those in time", labels=labels)
        for row in self._rows or ():
            names = [row.tenant or "", row.slo_class or ""]
            ended.add_metric(names, row.finished)
            in_time.add_metric(names, row.in_time)
            tokens.add_metric(names, row.goodput_tokens)
        yield from (ended, in_time, tokens) if self._rows is not None else ()


WORKFLOWS: TtlCache[list[Goodput] | None] = TtlCache(WORKFLOWS_KEPT_S)
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
    registry.register(WorkflowCollector(WORKFLOWS.get(_workflows)))
    return generate_latest(REGISTRY) + generate_latest(registry)


def _workflows() -> list[Goodput] | None:
    """Without the database None, which is kept as well: no scrape after it waits for the database again so soon."""
    until = timezone.now()
    try:
        return workflow_goodput(since=until - timedelta(hours=1), until=until)
    except (OperationalError, InterfaceError, PoolTimeout) as error:
        log.warning("goodput of workflows was not read: %s", error, extra={"action": "goodput_not_read"})
        return None
