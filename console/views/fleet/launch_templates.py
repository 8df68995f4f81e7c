"""Launch templates: list, create, edit, resume, remove. Admins write them, since a template is a command on a host of
the fleet; operators resume one whose starts failed. The command is shown with example values before it is saved."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import partial
from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from console.access import actor_of, allows
from console.forms.launch_templates import LaunchTemplateForm, environment_lines
from console.forms.numbers import number_of
from console.forms.unsaved_forms import data_of
from console.removed import says_if_removed
from console.views.configuration.changes import before_of
from console.views.editing import Difference, created, form_page, removed, restore_link, say_updated, updated
from controller.models import LaunchTemplate
from controller.selectors import catalogue
from controller.selectors.records import decisions
from controller.selectors.roles import UserRole, role_of
from controller.services.change import VersionConflict
from controller.services.fleet.launch_templates import (
    example,
    launch_template_create,
    launch_template_remove,
    launch_template_resume,
    launch_template_update,
)
from controller.wording.changes import Changed

KIND = "launch_template"
FORM = "console/fleet/launch_template_form.html"
LIST = "launch-templates"


def as_typed(command: Sequence[str]) -> str:
    """A command as a person would type it."""
    return shlex.join(command)


@require_GET
@allows(UserRole.VIEWER)
def template_list(request: HttpRequest) -> HttpResponse:
    rows = [
        {"row": row, "command": as_typed(example(row)), "environment": environment_lines(row.environment)}
        for row in catalogue.launch_templates().order_by("name")
    ]
    context = {"rows": rows, "is_admin": role_of(request.user) >= UserRole.ADMIN}
    return render(request, "console/fleet/launch_templates.html", context)


@require_http_methods(["GET", "POST"])
@allows(UserRole.ADMIN)
def template_new(request: HttpRequest) -> HttpResponse:
    form = LaunchTemplateForm(data_of(request), initial=before_of(request, KIND))
    if "check" in request.POST:
        return checked(request, form)
    told = "Launch template {0.name} created. Operators can start instances from it.".format
    if created(request, form, launch_template_create, told) is not None:
        return redirect(LIST)
    return form_page(request, FORM, form)


@require_http_methods(["GET", "POST"])
@allows(UserRole.ADMIN)
@says_if_removed(KIND)
def template_edit(request: HttpRequest, template_id: int) -> HttpResponse:
    row = get_object_or_404(catalogue.launch_templates(), pk=template_id)
    form = LaunchTemplateForm(data_of(request), existing=row)
    conflict: list[Difference] = []
    if "check" in request.POST:
        return checked(request, form, row=row)
    if request.method == "POST" and form.is_valid():
        write = partial(launch_template_update, actor=actor_of(request), template_id=row.pk)
        stored, conflict = updated(form, row, write)
        if stored is not None:
            text = f"Launch template {stored.name} updated. Instances that are started from now on use it."
            newest = decisions.search(kind=f"{KIND}_updated", subject_type=KIND, subject=stored.name)
            say_updated(request, form, stored, text, lambda: restore_link("Revert", request.path, newest.first()))
            return redirect(LIST)
    elif request.method == "GET":
        form.initial.update(before_of(request, KIND, row))
    restoring = "restore" in request.GET
    return form_page(request, FORM, form, conflict, row=row, restoring=restoring, **run_as(row))


@require_http_methods(["GET", "POST"])
@allows(UserRole.ADMIN)
@says_if_removed(KIND)
def template_remove(request: HttpRequest, template_id: int) -> HttpResponse:
    """GET asks for confirmation; POST with the version shown there removes the template."""
    row = get_object_or_404(catalogue.launch_templates(), pk=template_id)
    if request.method == "GET":
        return removal_page(request, row)
    refused = removed(row, request, partial(launch_template_remove, template_id=row.pk), removal_page)
    if refused is not None:
        return refused
    messages.success(request, f"Launch template {row.name} removed.")
    return redirect(LIST)


@require_POST
@allows(UserRole.OPERATOR)
@says_if_removed(KIND)
def template_resume(request: HttpRequest, template_id: int) -> HttpResponse:
    row = get_object_or_404(catalogue.launch_templates(), pk=template_id)
    version = number_of(request.POST.get("version", ""))
    try:
        row = launch_template_resume(actor=actor_of(request), template_id=row.pk, version=version)
    except VersionConflict as error:
        messages.error(request, f"Not resumed: {error}")
    else:
        messages.success(request, f"Launch template {row.name} resumed. Instances are started from it again.")
    return redirect(LIST)


def checked(request: HttpRequest, form: LaunchTemplateForm, row: LaunchTemplate | None = None) -> HttpResponse:
    """The form again with the command as it would run. Nothing is saved."""
    shown = run_as(LaunchTemplate(**form.values())) if form.is_valid() else {}
    return form_page(request, FORM, form, row=row, checked=bool(shown), **shown)


def run_as(row: LaunchTemplate) -> dict[str, Any]:
    return {"command": as_typed(example(row)), "environment": environment_lines(row.environment)}


def removal_page(
    request: HttpRequest, row: LaunchTemplate, error: str = "", status: int = 200, changed: Sequence[Changed] = ()
) -> HttpResponse:
    context = {"row": row, "error": error, "changed": changed, **run_as(row)}
    return render(request, "console/fleet/launch_template_remove.html", context, status=status)
