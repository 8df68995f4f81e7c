"""Who may do what: small rules that compose with `|` and `&`.

Viewers read everything but secrets. Operators also act on traffic: classes, mappings, scaling, instances, the queue.
Admins also own tenants, keys and the topology. A tenant's key sees its own tenant's data and nothing else; the views
narrow what it finds, so another tenant's object answers 404, not 403.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from rest_framework.permissions import BasePermission
from rest_framework.request import Request

from api.auth import TenantPrincipal


class Role(IntEnum):
    """Of people, as Django groups of these names (lower case); each role includes the ones below it."""

    NONE = 0
    VIEWER = 1
    OPERATOR = 2
    ADMIN = 3


def role_of(user: Any) -> Role:
    """The highest role a person has; a superuser is an admin. One query, remembered on the user object."""
    if isinstance(user, TenantPrincipal) or not user.is_authenticated or not user.is_active:
        return Role.NONE
    if user.is_superuser:
        return Role.ADMIN
    if not hasattr(user, "_slackline_role"):
        groups = {name.upper() for name in user.groups.values_list("name", flat=True)}
        user._slackline_role = max((role for role in Role if role.name in groups), default=Role.NONE)
    return user._slackline_role


class _AtLeast(BasePermission):
    role = Role.ADMIN
    message = "Your role does not allow this."

    def has_permission(self, request: Request, view: Any) -> bool:
        return role_of(request.user) >= self.role


class IsViewer(_AtLeast):
    """People with any role."""

    role = Role.VIEWER


class IsOperator(_AtLeast):
    """Operators and admins."""

    role = Role.OPERATOR


class IsAdmin(_AtLeast):
    """Admins only."""

    role = Role.ADMIN


class IsTenantKey(BasePermission):
    """A tenant's API key. The view must narrow its rows to `request.user.tenant_id`."""

    message = "This needs an API key of a tenant."

    def has_permission(self, request: Request, view: Any) -> bool:
        return isinstance(request.user, TenantPrincipal)
