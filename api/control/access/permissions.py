"""Permissions: small rules that can be combined with `|` and `&`.

Viewers may read everything except secrets. Operators may also change classes, mappings, scaling, instances and the
queue. Admins may also change tenants, keys and the topology. A tenant's key may read its own tenant's data only; views
filter their rows by the tenant, so another tenant's object is a 404 and not a 403.
"""

from __future__ import annotations

from typing import Any

from rest_framework.permissions import BasePermission
from rest_framework.request import Request

from api.control.access.auth import TenantPrincipal
from controller.selectors.roles import UserRole, role_of


class _AtLeast(BasePermission):
    role = UserRole.ADMIN
    message = "Your role does not allow this."

    def has_permission(self, request: Request, view: Any) -> bool:
        return role_of(request.user) >= self.role


class IsViewer(_AtLeast):
    """People with any role."""

    role = UserRole.VIEWER


class IsOperator(_AtLeast):
    """Operators and admins."""

    role = UserRole.OPERATOR


class IsAdmin(_AtLeast):
    """Admins only."""

    role = UserRole.ADMIN


class IsTenantKey(BasePermission):
    """A tenant's API key. The view must filter its rows by `request.user.tenant_id`."""

    role = None  # a key has none
    message = "This needs an API key of a tenant."

    def has_permission(self, request: Request, view: Any) -> bool:
        return isinstance(request.user, TenantPrincipal)
