"""Experiments: the list with quick what-ifs, the form, one experiment with charts, and its files."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from typing import Any

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from console.access import actor_of, allows
from console.charts import experiments as experiment_charts
from console.consumers.experiments import as_state
from console.forms.experiments import (
    ContenderFormSet,
    ExperimentForm,
    changed_words,
    estimate_words,
    first_contenders,
    place_error,
    policy_now,
)
from console.forms.unsaved_forms import data_of
from console.views.paging import page_of
from controller.core.errors import ConfigError
from controller.models import Experiment
from controller.selectors import catalogue
from controller.selectors.experiments import results as experiments
from controller.selectors.experiments.fleet_model import default_model
from controller.selectors.roles import UserRole
from controller.services.change import VersionConflict
from controller.services.experiments.commands import (
    experiment_cancel,
    experiment_create,
    experiment_remove,
    experiment_update,
)
from controller.services.experiments.specs import requests_expected, resolved, run_count
from workers.experiments.shipped_profiles import shipped_profile

PAGE_ROWS = 50
NAME_MAX = 120
BADGES = {"queued": "idle", "running": "accent", "done": "ok", "failed": "bad", "cancelled": "warn"}
# Quick what-ifs: the time range, and the change in the number of instances.
WINDOWS = {"yesterday": "Yesterday (UTC)", "hour": "The last hour"}
CHANGES = {"less": -1, "more": 1}


# ---- list and questions -----------------------------------------------------------------------


@require_GET
@allows(UserRole.VIEWER)
def experiment_list(request: HttpRequest) -> HttpResponse:
    text, state = request.GET.get("q", "")[:NAME_MAX].replace("\x00", ""), request.GET.get("state", "")
    wanted = state if state in Experiment.State.values else None
    rows = experiments.experiments(state=wanted, text=text or None).defer("result")
    page = page_of(rows, experiments.ORDER, request.GET.get("after"), PAGE_ROWS)
    context = {
        "rows": [(row, as_state(row), BADGES[row.state]) for row in page.rows],
        "next_url": page.next_url(request),
        "windows": WINDOWS.items(),
        "states": Experiment.State.choices,
        "state": wanted,
        "text": text,
    }
    return render(request, "console/experiments/experiments.html", context)


@require_POST
@allows(UserRole.OPERATOR)
def experiment_ask(request: HttpRequest) -> HttpResponse:
    """ "What would yesterday have looked like with one fewer instance?" """
    window, change = request.POST.get("window", ""), CHANGES.get(request.POST.get("change", ""))
    if window not in WINDOWS or change is None:
        messages.error(request, "Unknown time range or change. Use the buttons on this page.")
        return redirect("experiments")
    since, until = window_of(window, timezone.now())
    policy, model = policy_now(settings_policy()), default_model()
    fleet = {"fleet": "then", "model": model}
    words = changed_words(change).removeprefix(", ")
    spec = {
        "instances": fleet,
        "workload": {"kind": "window", "since": since.isoformat(), "until": until.isoformat()},
        "policies": [
            {**policy, "label": "unchanged", "instances": fleet},
            {**policy, "label": words, "instances": {**fleet, "change": change}},
        ],
    }
    name = f"{WINDOWS[window]} with {words}"
    try:
        row = experiment_create(actor=actor_of(request), name=name, spec=spec, read_profile=shipped_profile)
    except (ConfigError, ValidationError) as error:
        text = "; ".join(error.messages) if isinstance(error, ValidationError) else str(error)
        messages.error(request, f"{name} could not start: {text}.".replace("..", "."))
        return redirect("experiments")
    return redirect("experiment", row.slug)


def window_of(name: str, now: datetime) -> tuple[datetime, datetime]:
    """Yesterday is the calendar day in UTC."""
    if name == "hour":
        return now - timedelta(hours=1), now
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    return midnight - timedelta(days=1), midnight


def settings_policy() -> str:
    from django.conf import settings

    return str(settings.DISPATCH_POLICY)


# ---- the form ---------------------------------------------------------------------------------


def bound(request: HttpRequest) -> tuple[ExperimentForm, Any]:
    data = data_of(request)
    if data is not None:
        return ExperimentForm(data), ContenderFormSet(data, prefix="contenders")
    return ExperimentForm(), ContenderFormSet(initial=first_contenders(), prefix="contenders")


@require_http_methods(["GET", "POST"])
@allows(UserRole.OPERATOR)
def experiment_new(request: HttpRequest) -> HttpResponse:
    form, contenders = bound(request)
    if request.method == "POST" and all([form.is_valid(), contenders.is_valid()]):
        used = contenders.used()
        rows = [row for _, row in used]
        name = form.cleaned_data["name"] or form.default_name(rows)
        try:
            row = experiment_create(
                actor=actor_of(request), name=name, spec=form.spec(rows), read_profile=shipped_profile
            )
        except ConfigError as error:
            place_error(form, contenders, [place for place, _ in used], error.field or "", str(error))
        except ValidationError as error:
            for text in error.messages:
                form.add_error(None, text)
        else:
            return redirect("experiment", row.slug)
    bad = bool(form.errors or any(contenders.errors))
    context = {"form": form, "contenders": contenders}
    return render(request, "console/experiments/experiment_form.html", context, status=422 if bad else 200)


@require_POST
@allows(UserRole.OPERATOR)
def experiment_check(request: HttpRequest) -> JsonResponse:
    """Live validation: errors by field, or the size of the experiment. Nothing is stored."""
    form, contenders = bound(request)
    summary = ""
    if all([form.is_valid(), contenders.is_valid()]):
        used = contenders.used()
        try:
            spec, notes = resolved(form.spec([row for _, row in used]), shipped_profile)
            summary = " ".join([estimate_words(requests_expected(spec), run_count(spec)), *notes])
        except ConfigError as error:
            place_error(form, contenders, [place for place, _ in used], error.field or "", str(error))
    errors = {name: [str(text) for text in texts] for name, texts in form.errors.items()}
    for place, each in enumerate(contenders.errors):
        errors |= {f"contenders-{place}-{name}": [str(text) for text in texts] for name, texts in each.items()}
    return JsonResponse({"errors": errors, "summary": summary})


# ---- one experiment ---------------------------------------------------------------------------


def found(slug: str) -> Experiment:
    row = experiments.experiment(slug)
    if row is None or row.kind != Experiment.Kind.EXPERIMENT:
        raise Http404(f"no experiment {slug}")
    return row


@require_GET
@allows(UserRole.VIEWER)
def experiment_detail(request: HttpRequest, slug: str) -> HttpResponse:
    row = found(slug)
    targets = {name: share for (_, name), share in catalogue.targets().items()}
    context = {
        "row": row,
        "state": as_state(row),
        "badge": BADGES[row.state],
        "runs": row.runs.defer("report").order_by("number") if row.state != Experiment.State.DONE else (),
        "entries": [entry_row(entry) for entry in row.result["entries"]] if row.result else [],
        "charts": experiment_charts.charts(row.result, targets) if row.result else None,
        "spec_text": json.dumps(row.spec, indent=1),
    }
    return render(request, "console/experiments/experiment.html", context)


def entry_row(entry: dict[str, Any]) -> dict[str, Any]:
    """One row of the results table."""
    first = entry["first_seed"]
    attained = first["attained_per_s"] * first["seconds"]
    return {
        **entry,
        "rate_words": experiment_charts.rate_words(entry["rate"]),
        "requests": first["requests"],
        "refused": sum(count for name, count in first["outcomes"].items() if name != "ok"),
        "cost_each": entry["cost"] / attained if attained else None,
        "ttft_p99_s": first["ttft_s"]["p99"],
        "ttft_whose": whose(first.get("first_tokens"), first["requests"]),
        "tpot_p95_s": first["tpot_s"]["p95"],
    }


def whose(first_tokens: int | None, requests: int) -> str:
    """Which requests the TTFT percentiles count. None: an older result that does not store it."""
    if first_tokens is None:
        return "those with a first token"
    if first_tokens == requests:
        return f"all {requests:,} requests"
    return f"{first_tokens:,} of {requests:,} requests" if first_tokens else f"none of {requests:,} requests"


@require_POST
@allows(UserRole.OPERATOR)
def experiment_change(request: HttpRequest, slug: str) -> HttpResponse:
    """Change its name, and whether it is kept."""
    row = found(slug)
    changes: dict[str, Any] = {"kept": request.POST.get("kept") == "on"}
    name = request.POST.get("name", "").strip()
    try:
        version = int(request.POST.get("version", ""))
        if not 1 <= len(name) <= NAME_MAX or "\x00" in name:
            raise ValidationError(f"Name must be 1 to {NAME_MAX} characters.")
        experiment_update(
            actor=actor_of(request), experiment_id=row.pk, version=version, changes={"name": name, **changes}
        )
    except VersionConflict:
        row.refresh_from_db()
        messages.error(request, changed_by_someone_else(row, name, kept=changes["kept"]))
    except (ValidationError, ValueError) as error:
        messages.error(
            request, "; ".join(getattr(error, "messages", None) or ["Not saved: the form was incomplete. Try again."])
        )
    else:
        messages.success(request, "Experiment updated.")
    return redirect("experiment", slug)


def changed_by_someone_else(row: Experiment, name: str, *, kept: bool) -> str:
    """What is stored beside what was entered."""
    stored, yours = (
        f"“{each}”, {'kept' if keeps else 'not kept'}" for each, keeps in ((row.name, row.kept), (name, kept))
    )
    return f"Not saved: the experiment was changed by someone else. It is now {stored}; you entered {yours}."


@require_POST
@allows(UserRole.OPERATOR)
def experiment_stop(request: HttpRequest, slug: str) -> HttpResponse:
    try:
        experiment_cancel(actor=actor_of(request), slug=found(slug).slug)
    except ValidationError as error:
        messages.error(request, " ".join(error.messages))
    return redirect("experiment", slug)


@require_POST
@allows(UserRole.OPERATOR)
def experiment_delete(request: HttpRequest, slug: str) -> HttpResponse:
    row = found(slug)
    experiment_remove(actor=actor_of(request), slug=row.slug)
    messages.success(request, f"Experiment {row.name} removed.")
    return redirect("experiments")


@require_GET
@allows(UserRole.VIEWER)
def experiment_file(request: HttpRequest, slug: str, form: str) -> HttpResponse:
    row = found(slug)
    if row.result is None:
        raise Http404(f"experiment {slug} has no result")
    head = {"Content-Disposition": f'attachment; filename="{row.slug}.{form}"'}
    if form == "csv":
        return HttpResponse(experiments.as_csv(row), content_type="text/csv; charset=utf-8", headers=head)
    whole = {"slug": row.slug, "name": row.name, "notes": row.notes, "spec": row.spec, "result": row.result}
    return JsonResponse(whole, headers=head, json_dumps_params={"indent": 1})
