"""SLO classes: list, create, edit, remove. Services write and audit; a conflicting save shows both sets of values."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.urls import reverse
from django.utils.html import format_html
from django.views.decorators.http import require_GET, require_http_methods

from console.access import actor_of, allows
from console.forms.base import SLOClassForm
from console.forms.unsaved_forms import data_of
from console.removed import says_if_removed
from console.views.configuration.changes import before_of
from console.views.editing import Difference, created, form_page, removed, restore_link, saved, say_updated, updated
from controller.models import Decision, SLOClass
from controller.selectors import catalogue
from controller.selectors.records import decisions
from controller.selectors.roles import UserRole
from controller.services.slo.slo_classes import slo_class_create, slo_class_remove, slo_class_update
from controller.wording.changes import Changed

NEW_CLASS = {"waiting_time_s": 5.0, "target": 0.95, "value": 1.0}


@require_GET
@allows(UserRole.VIEWER)
def class_list(request: HttpRequest) -> HttpResponse:
    rows = catalogue.slo_classes().order_by("tenant__name", "ttft_s", "tpot_s", "name")
    return render(request, "console/configuration/classes.html", {"classes": rows})


@require_http_methods(["GET", "POST"])
@allows(UserRole.OPERATOR)
def class_new(request: HttpRequest) -> HttpResponse:
    initial = NEW_CLASS | restored(request)
    form = SLOClassForm(data_of(request), initial=initial)
    told = "Class {0.name} created. Gateways use it within a second.".format
    if created(request, form, slo_class_create, told) is not None:
        return saved("classes")
    return form_page(request, "console/configuration/class_form.html", form)


@require_http_methods(["GET", "POST"])
@allows(UserRole.OPERATOR)
@says_if_removed("slo_class")
def class_edit(request: HttpRequest, class_id: int) -> HttpResponse:
    row = get_object_or_404(catalogue.slo_classes(), pk=class_id)
    form = SLOClassForm(data_of(request), existing=row)
    conflict: list[Difference] = []
    if request.method == "POST" and form.is_valid():
        write = partial(slo_class_update, actor=actor_of(request), slo_class_id=row.pk)
        stored, conflict = updated(form, row, write)
        if stored is not None:
            say_updated(
                request,
                form,
                stored,
                f"Class {stored.name} updated. Gateways use it within a second.",
                lambda: restore_link("Revert", request.path, newest_decision("slo_class_updated", stored)),
            )
            return saved("classes")
    elif request.method == "GET":
        form.initial.update({name: value for name, value in restored(request).items() if name in form.CHANGEABLE})
    restoring = "restore" in request.GET
    return form_page(request, "console/configuration/class_form.html", form, conflict, row=row, restoring=restoring)


@require_http_methods(["GET", "POST"])
@allows(UserRole.OPERATOR)
@says_if_removed("slo_class")
def class_remove(request: HttpRequest, class_id: int) -> HttpResponse:
    """GET asks for confirmation; POST with the version shown there removes the class."""
    row = get_object_or_404(catalogue.slo_classes(), pk=class_id)
    if request.method == "GET":
        return removal_page(request, row)
    refused = removed(row, request, partial(slo_class_remove, slo_class_id=row.pk), removal_page)
    if refused is not None:
        return refused
    decision = newest_decision("slo_class_removed", row)
    again = restore_link("Create again", reverse("class-new"), decision)
    messages.success(request, format_html("Class {} removed.{}{}", row.name, without_default(decision), again))
    return saved("classes")


def removal_page(
    request: HttpRequest, row: SLOClass, error: str = "", status: int = 200, changed: Sequence[Changed] = ()
) -> HttpResponse:
    default_of = catalogue.tenants().filter(default_class=row).order_by("name")
    context = {"row": row, "default_of": default_of, "error": error, "changed": changed}
    return render(request, "console/configuration/class_remove.html", context, status=status)


def without_default(decision: Decision | None) -> str:
    """Which tenants lost their default class, as recorded with the removal; "" if none did."""
    names = decision.inputs.get("default_of", []) if decision else []
    if not names:
        return ""
    have = "has" if len(names) == 1 else "have"
    return f" {', '.join(names)} {have} no default class now. Creating it again does not make it the default again."


def newest_decision(kind: str, row: SLOClass) -> Decision | None:
    return decisions.search(kind=kind, subject_type="slo_class", subject=str(row)).first()


def restored(request: HttpRequest) -> dict[str, Any]:
    """Values before a recorded change, to revert it: shown, not saved. Those of a removed class create a new one."""
    before = before_of(request, "slo_class")
    values = {name: before[name] for name in ("name", *SLOClassForm.CHANGEABLE) if name in before}
    return values | ({"tenant": before["tenant"]} if "tenant" in before else {})
