"""The page for an object that someone removed in the meantime: by whom and when, with the entered values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any
from urllib.parse import urlencode

from django import forms
from django.core.exceptions import ObjectDoesNotExist
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.urls import reverse

from console.access import View
from console.forms.base import LevelForm, MappingForm, SLOClassForm
from console.forms.launch_templates import LaunchTemplateForm
from console.forms.scaling import ScalingForm
from console.forms.tenants import KeyForm, RotateForm, TenantForm
from controller.models import PriorityMapping
from controller.selectors.records.removals import Removal, removal

GONE = 410
UNTYPED = ("csrfmiddlewaretoken", "version", "simulate", "check")


@dataclass(frozen=True, slots=True)
class RemovedKind:
    """`again`: URL name of the create form; `fixed`: its fields that the edit form lacks, from the removed row."""

    words: str
    list: str
    list_name: str
    form: Callable[[], forms.BaseForm]
    history: str = ""
    again: str = ""
    fixed: tuple[str, ...] = ()


def _mapping_form() -> forms.BaseForm:
    return MappingForm(existing=PriorityMapping())


def _key_form() -> forms.BaseForm:
    form = KeyForm()
    form.fields |= RotateForm().fields
    return form


KINDS = {
    "slo_class": RemovedKind(
        "Class", "classes", "SLO classes", SLOClassForm, "class-history", "class-new", SLOClassForm.FIXED
    ),
    "priority_mapping": RemovedKind(
        "Priority mapping of", "mappings", "Priority mapping", _mapping_form, "mapping-history"
    ),
    "tenant": RemovedKind("Tenant", "tenants", "Tenants and keys", TenantForm, "", "tenant-new", ("name",)),
    "api_key": RemovedKind("Key", "tenants", "Tenants and keys", _key_form),
    "launch_template": RemovedKind(
        *("Launch template", "launch-templates", "Launch templates", LaunchTemplateForm),
        *("launch-template-history", "launch-template-new", LaunchTemplateForm.FIXED),
    ),
    "scaling_policy": RemovedKind(
        "Scaling policy", "scaling", "Scaling", ScalingForm, "scaling-history", "scaling-new", ("model", "role")
    ),
}


def says_if_removed(kind: str) -> Callable[[View], View]:
    """Wrap a view whose URL contains a row's id: if the row was removed, before or during a save, answer 410."""

    def wrap(view: View) -> View:
        @wraps(view)
        def guarded(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
            try:
                return view(request, *args, **kwargs)
            except (Http404, ObjectDoesNotExist):
                (pk,) = kwargs.values()
                found = removal(kind, pk)
                if found is None:
                    raise
                return removed(request, kind, pk, found)

        return guarded

    return wrap


def removed(request: HttpRequest, kind: str, pk: int, found: Removal) -> HttpResponse:
    named, decision = KINDS[kind], found.decision
    what = f"{named.words} {found.name.removeprefix('priorities of ')}"
    if "application/json" in request.headers.get("accept", ""):
        said = f"{what} was removed by {decision.actor} at {decision.at:%Y-%m-%d %H:%M:%S} UTC."
        return JsonResponse({"message": f"{said} Save to see your values."}, status=GONE)
    context = {
        "what": what,
        "removal": found,
        "kind": named,
        "typed": list(typed(request, named.form())) if request.method == "POST" else [],
        "again": again(request, named, found),
        "history_url": history_url(kind, pk, found),
    }
    return render(request, "console/removed.html", context, status=GONE)


def history_url(kind: str, pk: int, found: Removal) -> str:
    name = KINDS[kind].history
    if name:
        return reverse(name, args=[pk])
    return f"{reverse('audit')}?{urlencode({'subject_type': kind, 'subject': found.name})}"


def typed(request: HttpRequest, form: forms.BaseForm) -> Iterator[tuple[str, str]]:
    """Label and value with its unit, in the order of the form."""
    sent = {name: values for name, values in request.POST.lists() if name not in UNTYPED}
    for name in [*(name for name in form.fields if name in sent), *(name for name in sent if name not in form.fields)]:
        level = _level(name)
        label, field = (str(form[name].label), form.fields[name]) if name in form.fields else level or (name, None)
        if field is not None:
            yield label, ", ".join(_shown(field, value) for value in sent[name])


def _level(name: str) -> tuple[str, forms.Field] | None:
    """Label and field of `levels-2-ttft_s`, a field of a mapping's levels."""
    parts = name.split("-")
    if len(parts) != 3 or parts[0] != "levels" or parts[2] not in LevelForm.base_fields:
        return None
    field = LevelForm.base_fields[parts[2]]
    return f"Priority {parts[1]}: {field.label}", field


def _shown(field: forms.Field, value: str) -> str:
    choices = getattr(field, "choices", ())
    known = next((str(text) for key, text in choices if str(key) == value), value)
    return f"{known} {getattr(field, 'unit', '')}".strip() or "none"


def again(request: HttpRequest, kind: RemovedKind, found: Removal) -> list[tuple[str, str]]:
    """Fields to post to the create form, to create it again with the entered values."""
    if request.method != "POST" or not kind.again or found.went_with:
        return []
    fixed = [(name, str(found.before[name])) for name in kind.fixed if found.before.get(name) is not None]
    known = kind.form().fields
    sent = [
        (name, value)
        for name, values in request.POST.lists()
        for value in values
        if name in known and name not in (*UNTYPED, *kind.fixed)
    ]
    return [*fixed, *sent] if sent else []
