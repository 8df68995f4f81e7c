"""Adding an instance: registering a server that runs already, and starting one from a launch template."""

from __future__ import annotations

import shlex

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_http_methods

from console.access import actor_of, allows
from console.forms.instances import InstanceForm, StartForm
from console.forms.unsaved_forms import data_of
from console.views.editing import form_page, saved, written
from controller.models import LaunchTemplate, ServedModel
from controller.selectors.roles import UserRole
from controller.services.fleet.instances import instance_create
from controller.services.fleet.launch_templates import example
from controller.services.fleet.launches import instance_join


@require_http_methods(["GET", "POST"])
@allows(UserRole.OPERATOR)
def instance_new(request: HttpRequest) -> HttpResponse:
    form = InstanceForm(data_of(request))
    if request.method == "POST" and form.is_valid():
        row = written(form, lambda: instance_join(actor=actor_of(request), **form.values()))
        if row is not None:
            messages.success(request, f"{row.pk} registered. It receives requests once it responds.")
            return saved("instance", row.pk)
    return form_page(request, "console/instance_form.html", form, no_model=not ServedModel.objects.exists())


@require_http_methods(["GET", "POST"])
@allows(UserRole.OPERATOR)
def instance_start(request: HttpRequest) -> HttpResponse:
    form = StartForm(data_of(request))
    if request.method == "POST" and form.is_valid():
        row = written(form, lambda: instance_create(actor=actor_of(request), **form.values()))
        if row is not None:
            messages.success(request, f"{row.pk} is being started. It receives requests once it is ready.")
            return saved("instance", row.pk)
    templates = [(row, shlex.join(example(row))) for row in LaunchTemplate.objects.order_by("name")]
    no_model = not ServedModel.objects.exists()
    return form_page(request, "console/instance_start.html", form, no_model=no_model, templates=templates)
