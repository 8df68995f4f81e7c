"""Adding an instance: registering a server that runs already, and starting one from a launch template."""

from __future__ import annotations

import shlex

from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_http_methods

from console.access import allows
from console.forms.instances import InstanceForm, StartForm
from console.forms.unsaved_forms import data_of
from console.views.editing import created, form_page, saved
from controller.models import LaunchTemplate, ServedModel
from controller.scale.provisioning import abilities
from controller.selectors.fleet.topology import provisioners_unseen
from controller.selectors.roles import UserRole
from controller.services.fleet.instances import instance_create
from controller.services.fleet.launch_templates import example
from controller.services.fleet.launches import instance_join


@require_http_methods(["GET", "POST"])
@allows(UserRole.OPERATOR)
def instance_new(request: HttpRequest) -> HttpResponse:
    form = InstanceForm(data_of(request))
    row = created(request, form, instance_join, "{0.pk} registered. It receives requests once it responds.".format)
    if row is not None:
        return saved("instance", row.pk)
    return form_page(request, "console/fleet/instance_form.html", form, no_model=not ServedModel.objects.exists())


@require_http_methods(["GET", "POST"])
@allows(UserRole.OPERATOR)
def instance_start(request: HttpRequest) -> HttpResponse:
    form = StartForm(data_of(request))
    told = "{0.pk} is being started. It receives requests once it is ready.".format
    row = created(request, form, instance_create, told)
    if row is not None:
        return saved("instance", row.pk)
    templates = [(each, shlex.join(example(each))) for each in LaunchTemplate.objects.order_by("name")]
    unseen = [each for each in provisioners_unseen() if abilities(each.name).starts]
    no_model = not ServedModel.objects.exists()
    page = "console/fleet/instance_start.html"
    return form_page(request, page, form, no_model=no_model, templates=templates, unseen=unseen)
