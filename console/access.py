"""Who may see and do what on pages: viewer reads, operator acts, admin also owns people and keys.

Roles are Django groups of these names; a superuser is an admin. `view_for` wraps a view; a refused action is audited.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from functools import wraps
from typing import Any

from django.contrib.auth.views import redirect_to_login
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse

from controller.services.actors import Actor
from controller.services.decisions import decision_record

View = Callable[..., HttpResponse]


class Role(IntEnum):
    NONE = 0
    VIEWER = 1
    OPERATOR = 2
    ADMIN = 3


def role_of(user: Any) -> Role:
    """The highest role of a person: one query, remembered on the user object, which lives for one request."""
    if not user.is_authenticated or not user.is_active:
        return Role.NONE
    if user.is_superuser:
        return Role.ADMIN
    if not hasattr(user, "_console_role"):
        groups = {name.upper() for name in user.groups.values_list("name", flat=True)}
        user._console_role = max((role for role in Role if role.name in groups), default=Role.NONE)
    return user._console_role


def allows(role: Role) -> Callable[[View], View]:
    """The page needs at least `role`. Anonymous people go to the login; others are refused, and that is audited."""

    def wrap(view: View) -> View:
        @wraps(view)
        def guarded(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
            if not request.user.is_authenticated:
                return redirect_to_login(request.get_full_path())
            held = role_of(request.user)
            if held < role:
                refuse(request, held, role)
            return view(request, *args, **kwargs)

        return guarded

    return wrap


def refuse(request: HttpRequest, held: Role, needed: Role) -> None:
    """403. Attempts to change something are recorded; looking at a page one may not see is not worth a row."""
    if request.method not in ("GET", "HEAD", "OPTIONS"):
        decision_record(
            actor=Actor.person(request.user.get_username()),
            kind="access_refused",
            subject_type="page",
            subject=request.path[:255],
            reason="role_too_low",
            inputs={"method": request.method, "role": held.name.lower(), "needed": needed.name.lower()},
        )
    raise PermissionDenied(f"This needs the role {needed.name.lower()}; yours is {held.name.lower()}.")
