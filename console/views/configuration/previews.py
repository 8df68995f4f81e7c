"""Previews: the effect of an unsaved edit of a class, a mapping or the flow settings, shown next to its form.

One URL does three things with the form: it validates, compares the last hour's requests to the new targets in the
database and, with `simulate`, starts a simulation of the newest requests. Flow settings have no targets to compare to.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from django.conf import settings
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import get_object_or_404, render
from django.template.loader import render_to_string
from django.utils import timezone
from django.views.decorators.http import require_GET, require_POST

from console.access import actor_of, allows
from console.forms.base import MappingForm, SLOClassForm
from console.forms.flows import FlowSettingsForm
from console.live.polled import fleet_now
from console.removed import says_if_removed
from console.views.configuration.mappings import as_levels, level_forms
from console.views.editing import written
from controller.core.errors import ConfigError
from controller.core.snapshot import LevelBounds
from controller.dispatch.policy_sets import ordering_of
from controller.models import Experiment, FlowSettings
from controller.selectors import catalogue
from controller.selectors.experiments import previews
from controller.selectors.experiments import results as experiments
from controller.selectors.experiments.edits import ClassEdit, Edit, MappingEdit
from controller.selectors.roles import UserRole
from controller.services.experiments.previews import EDITED, RECORDED, preview_flow_settings, preview_order
from controller.services.slo.flow_settings import flow_settings_check
from controller.wording.vocabulary import class_name

VALID: dict[str, Any] = {"errors": {}, "summary": ""}


@require_POST
@allows(UserRole.OPERATOR)
@says_if_removed("slo_class")
def class_preview(request: HttpRequest, class_id: int) -> JsonResponse:
    row = get_object_or_404(catalogue.slo_classes(), pk=class_id)
    form = SLOClassForm(request.POST, existing=row)
    if not form.is_valid():
        return wrong(form.errors)
    data = form.cleaned_data
    targets = {name: data[name] for name in ("ttft_s", "tpot_s", "deadline_s", "waiting_time_s", "value", "may_defer")}
    return answer(request, f"class {row.name}", ClassEdit(row.name, previews.class_owners(row), **targets))


@require_POST
@allows(UserRole.OPERATOR)
@says_if_removed("priority_mapping")
def mapping_preview(request: HttpRequest, mapping_id: int) -> JsonResponse:
    row = get_object_or_404(catalogue.priority_mappings(), pk=mapping_id)
    form, levels = MappingForm(request.POST, existing=row), level_forms(request, row.levels)
    if not all([form.is_valid(), levels.is_valid()]):
        by_level = {
            f"{levels.prefix}-{place}-{name}": texts
            for place, errors in enumerate(levels.errors)
            for name, texts in errors.items()
        }
        return wrong({**form.errors, **by_level})
    bounds = tuple(LevelBounds(**level) for level in as_levels(levels))
    return answer(request, str(row), MappingEdit(previews.mapping_owners(row), bounds))


@require_POST
@allows(UserRole.OPERATOR)
def flow_settings_preview(request: HttpRequest) -> JsonResponse:
    """The ordering and the drop budget are simulated, not the flow policy. `model`: whose traffic; absent: the busiest
    one's."""
    form = FlowSettingsForm(request.POST, existing=catalogue.flow_settings().first())
    if not form.is_valid() or written(form, lambda: _checked(form)) is None:
        return wrong(form.errors)
    if not request.POST.get("simulate"):
        return JsonResponse(VALID)
    return simulated(
        lambda: preview_flow_settings(
            actor=actor_of(request),
            ordering=form.cleaned_data["ordering"],
            options=form.cleaned_data["ordering_options"],
            drop_budget=form.cleaned_data["drop_budget"],
            gateways=len({fleet["gateway"] for fleet in fleet_now().fleets}),
            model=request.POST.get("model") or None,
            policy=settings.DISPATCH_POLICY,
            overrides=settings.DISPATCH_OVERRIDES,
            now=timezone.now(),
        )
    )


def _checked(form: FlowSettingsForm) -> FlowSettings:
    """The row as the form would store it. Raises ValidationError."""
    row = FlowSettings(**form.values())
    flow_settings_check(row)
    return row


def wrong(errors: Any) -> JsonResponse:
    """No preview; 200, since a half-typed number is not a failure."""
    return JsonResponse({"errors": {name: [str(text) for text in texts] for name, texts in errors.items()}})


def simulated(ask: Callable[[], Experiment]) -> JsonResponse:
    """The slug of the preview that `ask` created, or why it cannot run."""
    try:
        row = ask()
    except ConfigError as error:
        return JsonResponse({**VALID, "refused": f"The simulation cannot run: {error}."})
    return JsonResponse({**VALID, "slug": row.slug})


def answer(request: HttpRequest, name: str, edit: Edit) -> JsonResponse:
    if request.POST.get("simulate"):
        return simulated(
            lambda: preview_order(
                actor=actor_of(request),
                name=f"Edit of {name}",
                edit=edit,
                policy=settings.DISPATCH_POLICY,
                overrides=settings.DISPATCH_OVERRIDES,
                now=timezone.now(),
            )
        )
    found = previews.last_hour(edit, timezone.now())
    context = {"judged": found, "mapping": isinstance(edit, MappingEdit)}
    html = render_to_string("console/configuration/_judged.html", context, request=request)
    return JsonResponse({**VALID, "html": html})


@require_GET
@allows(UserRole.OPERATOR)
def preview_result(request: HttpRequest, slug: str) -> HttpResponse:
    """An HTML fragment: the result of a finished preview, or why it has none."""
    row = experiments.experiment(slug)
    if row is None or row.kind != Experiment.Kind.PREVIEW or row.created_by != request.user.get_username():
        raise Http404(f"no preview {slug}")
    rows = compared(row.result) if row.result else []
    context = {
        "row": row,
        "rows": rows,
        "sample": (row.result or {}).get("sample"),
        "model": row.spec["workload"]["model"],
        "orderings": orderings_of(row.spec["policies"]),
        "pruning": pruning_of(row.spec["policies"], row.result) if row.result else [],
        "gateways": row.spec.get("settings", {}).get("gateways", 1),
    }
    return render(request, "console/configuration/_preview.html", context)


def orderings_of(policies: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[tuple[str, str]]]]:
    """The ordering before and after the edit, each with its settings as JSON; empty where the edit keeps it."""
    found = [ordering_of(each["name"], each.get("overrides", {})) for each in policies]
    if found[0] == found[1]:
        return []
    return [(name, [(key, json.dumps(value)) for key, value in options.items()]) for name, options in found]


def pruning_of(policies: Sequence[Mapping[str, Any]], result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The drop budget before and after the edit, with how many requests were pruned and how many of them were in time;
    empty where neither run pruned."""
    budgets = [each.get("pruning", {}).get("drop_budget", 0.0) for each in policies]
    if not any(budgets):
        return []
    pruned = {entry["policy"]: entry["first_seed"]["pruned"] for entry in result["entries"]}
    return [{"budget": budget, **pruned[label]} for budget, label in zip(budgets, (RECORDED, EDITED), strict=True)]


def compared(result: dict[str, Any]) -> list[dict[str, Any]]:
    """All traffic, then by class: recorded attainment of the sample, simulated before and after the edit."""
    by_label = {entry["policy"]: entry["first_seed"] for entry in result["entries"]}
    before, after = by_label[RECORDED], by_label[EDITED]
    sample = result.get("sample", {"attained": None, "by_class": {}})
    counted = sample.get("counted")  # None: a preview of an older release
    every = None if counted is None else sum(counted.values())
    rows = [figures("all traffic", sample["attained"], before, after, every)]
    names = sorted(set(before["by_class"]) | set(after["by_class"]))
    nothing: dict[str, Any] = {"ttft_s": {}, "tpot_s": {}}
    for name in names:
        each = before["by_class"].get(name, nothing), after["by_class"].get(name, nothing)
        number = None if counted is None else counted.get(name, 0)
        rows.append(figures(class_name(name), sample["by_class"].get(name), *each, number))
    return rows


def figures(
    name: str, recorded: float | None, before: dict[str, Any], after: dict[str, Any], counted: int | None = None
) -> dict[str, Any]:
    """`counted`: requests that count for attainment; None: as many as were simulated."""
    first_tokens = [each["first_tokens"] for each in (before, after) if "first_tokens" in each]
    return {
        "name": name,
        "requests": after.get("requests") if counted is None else counted,
        "recorded": recorded,
        "before": before.get("attainment"),
        "after": after.get("attainment"),
        "worse": (after.get("attainment") or 0) < (before.get("attainment") or 0) - 0.005,
        "ttft_before": before["ttft_s"].get("p95"),
        "ttft_after": after["ttft_s"].get("p95"),
        "ttft_of": first_tokens if any(each != after.get("requests") for each in first_tokens) else [],
        "tpot_before": before["tpot_s"].get("p95"),
        "tpot_after": after["tpot_s"].get("p95"),
    }
