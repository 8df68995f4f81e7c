"""Flows: the transfers that share the links of hosts now, which goes first, and the form of the flow settings."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.template.loader import render_to_string
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.gzip import gzip_page
from django.views.decorators.http import require_GET, require_http_methods

from console.access import actor_of, allows
from console.forms.flows import FlowSettingsForm
from console.forms.numbers import number_of
from console.forms.unsaved_forms import data_of
from console.live.polled import REDIS_AWAY, SHARED_S, AsOf, PagePart
from console.live.ttl_cache import TtlCache
from console.views.configuration.changes import before_of
from console.views.editing import Difference, form_page, saved, say_updated, updated, written
from console.views.paging import numbered_page
from console.views.traffic.pruning import IGNORED, pruning_context
from controller.core.messages import HostFlow, HostFlows
from controller.dispatch.policy_sets import ordering_options
from controller.flow.gate import OFF
from controller.selectors import catalogue
from controller.selectors.experiments.traffic import busiest_models
from controller.selectors.fleet.flow_replay import replay_last_hour
from controller.selectors.records.unscheduled import WINDOW as LATELY
from controller.selectors.records.unscheduled import (
    UnscheduledLoads,
    UnscheduledTransfers,
    loads_unscheduled_lately,
    unscheduled_lately,
)
from controller.selectors.roles import UserRole, role_of
from controller.services.experiments.previews import WINDOW
from controller.services.slo.flow_settings import flow_settings_create, flow_settings_update
from controller.wording.flows import (
    policy_in_words,
    port_in_words,
    stage_in_words,
    state_in_words,
    unscheduled_in_words,
)
from controller.wording.values import ORDERING_WORDS
from workers import live
from workers.flowd.settings import DEFAULT_LINK_GBPS

SILENT_S = 5.0  # a transfer daemon reports each second
PAGE_ROWS = 50
LINK_PORT = "out"
FASTER = 1.1  # than the daemon was told: a link whose bandwidth is set too low
NO_DAEMON = "No transfer daemon is reporting"


@dataclass(frozen=True, slots=True)
class Reported:
    """What daemons published in the last hour. `away`: Redis cannot be read."""

    hosts: Sequence[HostFlows]
    away: bool = False

    def as_of(self, now: float) -> AsOf:
        """That of the host that reported last: a silent one is marked by itself."""
        if self.away:
            return AsOf(None, SILENT_S, REDIS_AWAY.split(":", maxsplit=1)[0])
        if not self.hosts:
            return AsOf(now, SILENT_S, NO_DAEMON)
        at = max(host["at"] for host in self.hosts)
        return AsOf(at, SILENT_S, NO_DAEMON if now - at > SILENT_S else "")


def _read() -> Reported:
    try:
        return Reported(live.read_host_flows())
    except live.LiveUnavailable:
        return Reported([], away=True)


POLLED: TtlCache[Reported] = TtlCache(SHARED_S)
UNSCHEDULED: TtlCache[Sequence[UnscheduledTransfers]] = TtlCache(SILENT_S)
LOADS_UNSCHEDULED: TtlCache[Sequence[UnscheduledLoads]] = TtlCache(SILENT_S)


@require_GET
@allows(UserRole.VIEWER)
def flows_page(request: HttpRequest) -> HttpResponse:
    return render(request, "console/traffic/flows.html", _context(number_of(request.GET.get("page", "")) or 1))


@gzip_page
@require_GET
@allows(UserRole.VIEWER)
def flows_live(request: HttpRequest, page: int) -> JsonResponse:
    """The live part of the page."""
    context = _context(page) | {"can_act": role_of(request.user) >= UserRole.OPERATOR}
    html = render_to_string("console/traffic/_flows_live.html", context)
    return PagePart(html, context["as_of"]).answer()


def _context(page: int) -> dict[str, Any]:
    """`page`: of the transfers, from 1; one beyond the last is the last."""
    reported, now = POLLED.get(_read), time.time()
    rows = [_row(host, flow, now) for host in reported.hosts for flow in host["flows"]]
    # Those in progress first.
    rows.sort(key=lambda row: (bool(row["flow"]["end"]), row["stale"], row["flow"]["ended_s"]))
    stored = catalogue.flow_settings().first()
    off = stored.flow_policy == OFF if stored else all(host["policy"] == OFF for host in reported.hosts)
    return {
        "settings": stored,
        "policy": policy_in_words(stored.flow_policy) if stored else "",
        "ordering": stored.ordering if stored else "",
        "options": json.dumps(stored.ordering_options) if stored and stored.ordering_options else "",
        "off": off,
        "hosts": [_host(host, stored.flow_policy if stored else None, now) for host in reported.hosts],
        "page": numbered_page(rows, page, PAGE_ROWS),
        "away": reported.away,
        "as_of": reported.as_of(now),
        "unscheduled": None if off else _unscheduled(),
        "pruning": pruning_context(stored),
    }


def _host(host: HostFlows, stored: str | None, now: float) -> dict[str, Any]:
    silent_s = now - host["at"]
    return {
        "name": host["host"],
        "policy": policy_in_words(host["policy"]),
        "off": host["policy"] == OFF,
        "behind": stored is not None and host["policy"] != stored,
        "at": host["at"],
        "silent": silent_s > SILENT_S,
        "open": host["open"],
        "ending": host["ending"],
        "ignored": {outcome: host.get("orders", {}).get(outcome, 0) for outcome in IGNORED},
        "bandwidth": host["bandwidth"],
        "faster": any(port["rate"] > FASTER * host["bandwidth"] for port in host["ports"] if port["port"] == LINK_PORT),
        "ports": [
            {**port, "name": port_in_words(port["port"]), "share": port["rate"] / host["bandwidth"]}
            for port in host["ports"]
        ],
    }


def _row(host: HostFlows, flow: HostFlow, now: float) -> dict[str, Any]:
    """`stale`: the daemon has not said what has become of it since."""
    due_s = flow["due_in_s"]
    return {
        "flow": flow,
        "stale": not flow["end"] and now - host["at"] > SILENT_S,
        "host": host["host"],
        "what": stage_in_words(flow["stage"]),
        "port": port_in_words(flow["port"]),
        "state": state_in_words(flow),
        "late_s": -due_s if due_s is not None and due_s < 0 else None,
        "levels": [{"after_s": after, "level": level} for after, level in flow["levels"]],
    }


def _unscheduled() -> dict[str, Any]:
    """KV transfers and weight loads that went unscheduled, by why."""
    found = UNSCHEDULED.get(lambda: unscheduled_lately(timezone.now()))
    rows = [{"why": unscheduled_in_words(each.reason), "each": each} for each in found]
    total = sum(each.transfers for each in found)
    loads = LOADS_UNSCHEDULED.get(lambda: loads_unscheduled_lately(timezone.now()))
    return {
        "minutes": round(LATELY.total_seconds() / 60),
        "transfers": total,
        "rows": rows,
        "loads": sum(each.loads for each in loads),
        "load_rows": [{"why": unscheduled_in_words(each.reason), "each": each} for each in loads],
    }


def _replayed() -> dict[str, Any]:
    """The preview: the transfers of the last hour under each policy, over links as slow as the slowest reported one."""
    reported = POLLED.get(_read)
    known = [host["bandwidth"] for host in reported.hosts]
    found = replay_last_hour(timezone.now(), min(known) if known else DEFAULT_LINK_GBPS * 1e9 / 8)
    rows = [{"name": policy_in_words(each.policy), "each": each} for each in found.policies]
    return {"found": found, "rows": rows, "reported": bool(known)}


@require_http_methods(["GET", "POST"])
@allows(UserRole.OPERATOR)
def flow_settings_edit(request: HttpRequest) -> HttpResponse:
    """The first save creates the row; until then daemons follow their own FLOW_POLICY."""
    row = catalogue.flow_settings().first()
    form = FlowSettingsForm(data_of(request), existing=row)
    conflict: list[Difference] = []
    if request.method == "POST" and form.is_valid():
        if row is None:
            stored = written(form, lambda: flow_settings_create(actor=actor_of(request), **form.values()))
            if stored is not None:
                messages.success(request, "Flow settings saved. Transfer daemons and gateways follow within a second.")
                return saved("flows")
        else:
            stored, conflict = updated(form, row, partial(flow_settings_update, actor=actor_of(request)))
            if stored is not None:
                text = "Flow settings updated. Transfer daemons and gateways follow within a second."
                say_updated(request, form, stored, text)
                return saved("flows")
    elif request.method == "GET" and row is not None:
        before = before_of(request, "flow_settings", row)
        form.initial.update({name: before[name] for name in form.CHANGEABLE if name in before})
    return form_page(
        request,
        "console/traffic/flow_settings_form.html",
        form,
        conflict,
        row=row,
        restoring="restore" in request.GET and row is not None,
        back=reverse("flows"),
        replay=_replayed(),
        models=busiest_models(timezone.now() - WINDOW, timezone.now()),
        orderings=[
            (name, ORDERING_WORDS[name], [(option, json.dumps(value)) for option, value in options.items()])
            for name, options in ordering_options().items()
        ],
    )
