"""What the scopes of a service account open: one table, by the first part of the address.

A role says what may be changed at all; the scopes say of what. Reading needs the scope `read`, or the one of the
resource. A resource that is missing here can be read only.
"""

from __future__ import annotations

from collections.abc import Sequence

from rest_framework.permissions import SAFE_METHODS

from controller.models import ServiceAccount

Scope = ServiceAccount.Scope
PREFIX = "/api/v1/"

OF_RESOURCE = {
    "slo-classes": Scope.CONFIGURATION,
    "priority-mappings": Scope.CONFIGURATION,
    "scaling-policies": Scope.CONFIGURATION,
    "flow-settings": Scope.CONFIGURATION,
    "tenants": Scope.TENANTS,
    "api-keys": Scope.TENANTS,
    "instances": Scope.FLEET,
    "launch-templates": Scope.FLEET,
    "models": Scope.FLEET,
    "hosts": Scope.FLEET,
    "devices": Scope.FLEET,
    "links": Scope.FLEET,
    "queue": Scope.QUEUE,
    "workflows": Scope.QUEUE,
    "simulations": Scope.EXPERIMENTS,
    "traces": Scope.EXPERIMENTS,
}


def scopes_for(method: str, path: str) -> tuple[str, ...]:
    """The scopes each of which opens a call, the one to ask for first. None opens a change of what is not listed."""
    needed = OF_RESOURCE.get(path.removeprefix(PREFIX).split("/", 1)[0])
    own = () if needed is None else (needed.value,)
    return (Scope.READ.value, *own) if method in SAFE_METHODS else own


def scope_missing(scopes: Sequence[str], method: str, path: str) -> str:
    """The scope that a call lacks; "" if it has what it needs."""
    opening = scopes_for(method, path)
    if any(scope in scopes for scope in opening):
        return ""
    return opening[0] if opening else Scope.READ.value
