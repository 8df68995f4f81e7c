"""The form of an existing instance: what its operator says of it, such as the name of its API key."""

from __future__ import annotations

from functools import partial

from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404
from django.urls import reverse
from django.views.decorators.http import require_http_methods

from console.access import actor_of, allows
from console.forms.instances import InstanceEditForm
from console.forms.unsaved_forms import data_of
from console.views.editing import Difference, form_page, saved, say_updated, updated
from controller.selectors import catalogue
from controller.selectors.roles import UserRole
from controller.services.fleet.instances import instance_update


@require_http_methods(["GET", "POST"])
@allows(UserRole.OPERATOR)
def instance_edit(request: HttpRequest, instance_id: str) -> HttpResponse:
    row = get_object_or_404(catalogue.instances(), pk=instance_id)
    form = InstanceEditForm(data_of(request), existing=row)
    conflict: list[Difference] = []
    if request.method == "POST" and form.is_valid():
        write = partial(instance_update, actor=actor_of(request), instance_id=row.pk)
        stored, conflict = updated(form, row, write)
        if stored is not None:
            say_updated(request, form, stored, f"{row.pk} updated. Gateways use the new values within a second.")
            return saved("instance", row.pk)
    return form_page(
        request, "console/fleet/instance_edit.html", form, conflict, row=row, back=reverse("instance", args=[row.pk])
    )
