"""Fleet: hosts, devices, links and instances; the page of one instance; its actions."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from typing import Any

from django.contrib import messages
from django.core.exceptions import BadRequest, ValidationError
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.template.loader import render_to_string
from django.views.decorators.gzip import gzip_page
from django.views.decorators.http import require_GET, require_POST

from console.access import actor_of, allows
from console.charts import base as charts
from console.forms.numbers import number_of
from console.live.live_view import merge_instances
from console.live.polled import SHARED_S, FleetNow, PagePart, charts_due, fleet_now
from console.live.ttl_cache import TtlCache
from console.panels.instance_actions import ACTIONS, SLEEP_BUTTONS, action_of, choices
from console.panels.instance_conflict import conflict_context
from console.panels.scale_outs import way_of
from console.views.editing import STALE
from console.wording.engine_spec import engine_spec
from controller.core.kv_links import LinkState
from controller.core.types import KEY_MADE
from controller.engine.start_steps import PROCESS, STEPS
from controller.models import Action, Instance, InstanceLink
from controller.selectors import catalogue
from controller.selectors.fleet import links, measured, topology
from controller.selectors.records import decisions
from controller.selectors.roles import UserRole
from controller.services.change import VersionConflict
from controller.wording.scaling import START_STEPS
from controller.wording.sentences import sentence
from workers.engine.profiles import shipped_profiles
from workers.notices import announce_config

BADGES = {
    "ready": "ok",
    "starting": "accent",
    "loading": "accent",
    "warm": "idle",
    "falling asleep": "warn",
    "asleep": "idle",
    "waking": "accent",
    "pending": "accent",
    "draining": "warn",
    "unreachable": "bad",
    "unhealthy": "bad",
    "lost": "bad",
    "failed": "bad",
    "stopped": "idle",
}
LINK_BADGES = {LinkState.CONNECTING: "accent", LinkState.UP: "ok", LinkState.DEGRADED: "warn", LinkState.DOWN: "bad"}
TRANSFER_BADGES = {"done": "ok", "failed": "bad", "undone": "warn"}
TRANSFERS = 15
LINKS = 60  # shown of an instance, and of those not up on the Fleet page
ROLES = {"collocated": "P+D", "prefill": "P", "decode": "D"}
DECISIONS = 25
LOADS = 10
TO_SERVICE = (Action.Kind.WEIGHTS_LOAD, Action.Kind.WAKE, Action.Kind.FIRST_SERVED)
ORDERS = 3 * LOADS  # actions of these kinds that the page reads
LENGTHS = 40  # points on the line of a latency model
POLLED: TtlCache[PagePart] = TtlCache(SHARED_S)


@require_GET
@allows(UserRole.VIEWER)
def fleet(request: HttpRequest) -> HttpResponse:
    now = fleet_now()
    return render(request, "console/fleet/fleet.html", fleet_context(now) | {"as_of": now.as_of})


@gzip_page
@require_GET
@allows(UserRole.VIEWER)
def fleet_live(request: HttpRequest) -> JsonResponse:
    """The parts of the page that update, shared by all viewers."""
    return POLLED.get(fleet_part).answer()


def fleet_part() -> PagePart:
    now = fleet_now()
    return PagePart(render_to_string("console/fleet/_fleet_live.html", fleet_context(now)), now.as_of)


def fleet_context(now: FleetNow) -> dict[str, Any]:
    live = {each["id"]: each for each in merge_instances(now.fleets)}
    host_links = topology.links()
    places: list[dict[str, Any]] = [
        {
            "place": place,
            "instances": [row_of(each, live.get(each.pk)) | {"place": place} for each in place.instances],
            "links": host_links.get(place.host.name, []) if place.host else [],
        }
        for place in topology.places()
    ]
    rows = [row for place in places for row in place["instances"]]
    policies = {(policy.model_id, policy.role): policy.pk for policy in catalogue.scaling_policies()}
    for row in rows:
        row["policy"] = policies.get((row["row"].model_id, row["row"].role))
    between = [*chain(*host_links.values())]
    context = {"places": places, "instances": rows, "roles": summary(rows), "links": between}
    looks = topology.provisioner_looks()
    context["unseen"] = [look for look in looks if look.failing_since is not None]
    context["clusters"] = [look for look in topology.clusters(looks) if look.hosts]
    return context | {"links_down": sum(link.state != "up" for link in between)} | links_in_trouble()


def row_of(instance: Instance, seen: Any) -> dict[str, Any]:
    """Desired and observed state come from the database, load from a gateway if one reports it."""
    badge = BADGES.get(instance.shown_state, "idle")
    load = seen["utilisation"] if seen else None
    status = badge if badge != "ok" or load is None else "bad" if load > 0.95 else "warn" if load > 0.8 else "ok"
    return {"row": instance, "badge": badge, "live": seen, "status": status, "letter": ROLES.get(instance.role, "?")}


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By model and role: how many instances, in which states, and their cost per second."""
    found = []
    for model, role in sorted({(each["row"].model.name, each["row"].role) for each in rows}):
        mine = [each for each in rows if (each["row"].model.name, each["row"].role) == (model, role)]
        states = Counter(each["row"].shown_state for each in mine)
        loads = [each["live"]["utilisation"] for each in mine if each["live"]]
        found.append(
            {
                "model": model,
                "role": role,
                "letter": ROLES.get(role, "?"),
                "count": len(mine),
                "policy": mine[0]["policy"],
                "states": ", ".join(f"{count} {state}" for state, count in states.most_common()),
                "load": sum(loads) / len(loads) if loads else None,
                "cost": sum(each["row"].unit_cost for each in mine if each["row"].observed_state != "pending"),
            }
        )
    return found


@require_GET
@allows(UserRole.VIEWER)
def instance_detail(request: HttpRequest, instance_id: str) -> HttpResponse:
    row, now = get_object_or_404(catalogue.instances(), pk=instance_id), fleet_now()
    context = instance_context(row, now) | fit_context(row) | {"as_of": now.as_of}
    return render(request, "console/fleet/instance.html", context)


@require_GET
@allows(UserRole.VIEWER)
def instance_live(request: HttpRequest, instance_id: str) -> JsonResponse:
    """The parts of the page that update; with `?charts=1` also the measurements, which change less often."""
    row, now = get_object_or_404(catalogue.instances(), pk=instance_id), fleet_now()
    html = render_to_string("console/fleet/_instance_live.html", instance_context(row, now), request)
    due = charts_due(request)
    return PagePart(html, now.as_of, fit_context(row)["charts"] if due else {}).answer(due)


def instance_context(row: Instance, now: FleetNow) -> dict[str, Any]:
    seen = next((each for each in merge_instances(now.fleets) if each["id"] == row.pk), None)
    rows = decisions.search(subject_type="instance", subject=row.pk)[:DECISIONS]
    orders = list(catalogue.actions().filter(instance=row, kind__in=TO_SERVICE)[:ORDERS])
    return {
        "each": row_of(row, seen),
        "row": row,
        "unseen": [] if row.observed_state in Instance.GONE else topology.provisioners_unseen(row.source),
        "policy": catalogue.scaling_policies().filter(model=row.model, role=row.role).first(),
        "decisions": [(decision, sentence(decision)) for decision in rows],
        "actions": partial(choices, row),  # lazy: it queries, and only operators see it
        "loads": [order for order in orders if order.kind == Action.Kind.WEIGHTS_LOAD][:LOADS],
        "way": way_of(row, orders),
        "start": start_of(row),
        "made_key": KEY_MADE,
        "settings": engine_spec(row.spec),
        **links_of(row.pk),
    }


def start_of(row: Instance) -> list[tuple[str, datetime, float]]:
    """Steps that its engine reached at its last start: in words, when, and seconds since its process started."""
    known = {name: at for name in STEPS if isinstance(at := row.start_steps.get(name), int | float)}
    began = known.get(PROCESS, min(known.values(), default=0.0))
    return [
        (START_STEPS[name], datetime.fromtimestamp(at, UTC), max(0.0, at - began))
        for name, at in sorted(known.items(), key=lambda step: step[1])
    ]


def links_of(instance_id: str) -> dict[str, Any]:
    """For the page of an instance: links with badges, transfers with their peer. Two queries."""
    kept = links.instance_links(instance=instance_id)[:LINKS]
    transfers = [
        {
            "row": row,
            "badge": TRANSFER_BADGES.get(row.outcome, "idle"),
            "received": row.target == instance_id,
            "other": row.source if row.target == instance_id else row.target,
        }
        for row in links.kv_transfers(instance=instance_id)[:TRANSFERS]
    ]
    return {"instance_links": [with_badge(row) for row in kept], "transfers": transfers}


def links_in_trouble() -> dict[str, Any]:
    """For the Fleet page: the number of links by state, and those that are not up. At most two queries."""
    counts = links.link_counts()
    bad = links.instance_links().exclude(state=LinkState.UP.value)[:LINKS] if counts.all > counts.up else []
    return {"link_counts": counts, "instance_links": [with_badge(row) for row in bad]}


def with_badge(row: InstanceLink) -> tuple[InstanceLink, str]:
    return row, LINK_BADGES.get(LinkState(row.state), "idle")


def fit_context(row: Instance) -> dict[str, Any]:
    profile, points = measured.profile_of(row), measured.measurements(row.pk)
    return {
        "profile": profile,
        "shipped": profile is not None and not profile.samples and profile.source in shipped_profiles(),
        "emulated": emulated(row),
        "points": len(points),
        "stages": stages_of(row, points),
        "charts": charts_of(row, profile, points),
    }


def stages_of(row: Instance, points: list[measured.Measured]) -> list[str]:
    """Stages that it can have measurements of: those of its role, and any that it measured in an earlier role."""
    prefills = row.role != "decode" or any(point.prefill_s is not None for point in points)
    decodes = row.role != "prefill" or any(point.tpot_s is not None for point in points)
    return [stage for stage, there in (("prefill", prefills), ("decode", decodes)) if there]


def emulated(row: Instance) -> str:
    """The profile that its engine emulates; "" if it runs a real model or is not a reference engine."""
    computes = row.backend != "reference" or row.spec.get("executor") == "torch"
    return "" if computes else str(row.spec.get("profile", ""))


def charts_of(row: Instance, profile: Any, points: list[measured.Measured]) -> dict[str, Any]:
    """Measured points with the lines of the latency model: an idle engine, for decode also a full batch."""
    longest = max((point.prompt_tokens for point in points), default=0)
    lengths = [max(1, longest * step // LENGTHS) for step in range(LENGTHS + 1)] if longest else []
    decoded = [(p.prompt_tokens + p.output_tokens / 2, p.tpot_s) for p in points if p.tpot_s is not None]
    furthest = int(max((context for context, _ in decoded), default=0))
    contexts = [max(1, furthest * step // LENGTHS) for step in range(LENGTHS + 1)] if furthest else []
    prefill, decode = {}, {}
    if profile is not None and lengths:
        prefill["model, idle engine"] = list(zip(lengths, measured.prefill_line(profile, lengths), strict=True))
    if profile is not None and contexts:
        for batch in (1, row.max_num_seqs):
            line = measured.decode_line(profile, contexts, batch)
            decode[f"model, batch of {batch}"] = list(zip(contexts, line, strict=True))
    return {
        "prefill": charts.measured(
            [(point.prompt_tokens, point.prefill_s) for point in points if point.prefill_s is not None],
            prefill,
            "prompt tokens",
            "time to first token, s",
        ),
        "decode": charts.measured(decoded, decode, "context tokens", "time per output token, s"),
    }


@require_POST
@allows(UserRole.OPERATOR)
def instance_act(request: HttpRequest) -> HttpResponse:
    """Run `action` of ACTIONS on `instance`, unless it changed since the page was loaded (`version`): then 412 with
    what is different (`seen`: the states that the page showed)."""
    row = get_object_or_404(catalogue.instances(), pk=request.POST.get("instance", ""))
    action = action_of(request.POST.get("action", ""), row)
    version = number_of(request.POST.get("version", ""))
    if action is None or version is None:
        raise BadRequest(f"action must be one of {', '.join(ACTIONS)}; version must be the one that was shown")
    try:
        action.service(actor=actor_of(request), instance_id=row.pk, version=version)
    except VersionConflict:
        return act_conflict(request, request.POST["action"], version)
    except ValidationError as error:
        messages.error(request, " ".join(error.messages))
    else:
        announce_config()
        messages.success(request, f"{row.pk} {action.done}")
    return redirect("instance", row.pk)


def act_conflict(request: HttpRequest, name: str, version: int) -> HttpResponse:
    """What is different now, and the same action on the instance as it is now, if it is still possible."""
    row = get_object_or_404(catalogue.instances(), pk=request.POST["instance"])
    choice = next((each for each in choices(row) if each.action == name), None)
    context = conflict_context(row, version, request.POST.get("seen", "")) | {"field": "action", "value": name}
    if choice is None:
        asked = SLEEP_BUTTONS.get(name) or (action_of(name, row) or ACTIONS[name]).button
        refused = f"{asked} is not possible while {row.pk} is {row.shown_state} and its desired state is "
        context |= {"asked": asked, "refused": f"{refused}{row.desired_state}."}
    else:
        context |= {"asked": choice.button, "effects": [choice.effect]}
    return render(request, "console/fleet/instance_conflict.html", context, status=STALE)
