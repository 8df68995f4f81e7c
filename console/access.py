"""Access to pages: `allows` wraps a view with the role that it requires. Refused actions are audited."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from django.contrib.auth.views import redirect_to_login
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase

from console.forms.refused import SAFE, refused_record
from console.forms.unsaved_forms import came_from, forget_shown, keep
from controller.selectors.roles import UserRole, role_of
from controller.services.actors import Actor
from controller.services.records.refusals import access_refused

View = Callable[..., HttpResponseBase]


def actor_of(request: HttpRequest) -> Actor:
    """The signed-in person, as decisions name them."""
    return Actor.person(request.user.get_username())


def allows(role: UserRole) -> Callable[[View], View]:
    """Requires at least `role`. Anonymous visitors go to the login page; others get 403, and actions are audited."""

    def wrap(view: View) -> View:
        @wraps(view)
        def guarded(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
            if not request.user.is_authenticated:
                return to_login(request)
            held = role_of(request.user)
            if held < role:
                refuse(request, held, role)
            return forget_shown(request, view(request, *args, **kwargs))

        return guarded

    return wrap


def to_login(request: HttpRequest) -> HttpResponse:
    """To the login page and back afterwards. A refused POST is recorded, and its form input is kept."""
    if request.method in SAFE:
        return redirect_to_login(request.get_full_path())
    refused_record(request, "not_signed_in")
    response = redirect_to_login(came_from(request))
    keep(request, response)
    return response


def refuse(request: HttpRequest, held: UserRole, needed: UserRole) -> None:
    """Raises PermissionDenied. Attempts to change something are audited; attempts to view a page are not."""
    if request.method not in SAFE:
        access_refused(
            actor=actor_of(request),
            bucket="people",
            subject_type="page",
            subject=request.path,
            reason="role_too_low",
            inputs={"method": request.method, "role": held.name.lower(), "needed": needed.name.lower()},
        )
    raise PermissionDenied(f"This requires the {needed.name.lower()} role. Your role is {held.name.lower()}.")
