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
    "tenants": Scope.TENANTS,
    "api-keys": Scope.TENANTS,
    "instances": Scope.FLEET,
    "models": Scope.FLEET,
    "hosts": Scope.FLEET,
    "devices": Scope.FLEET,
    "links": Scope.FLEET,
    "queue": Scope.QUEUE,
    "simulations": Scope.EXPERIMENTS,
    "traces": Scope.EXPERIMENTS,
}


def scope_missing(scopes: Sequence[str], method: str, path: str) -> str:
    """The scope that a call lacks; "" if it has what it needs."""
    resource = path.removeprefix(PREFIX).split("/", 1)[0]
    needed = OF_RESOURCE.get(resource)
    if needed is not None and needed in scopes:
        return ""
    if method in SAFE_METHODS:
        return "" if Scope.READ in scopes else Scope.READ.value
    return needed.value if needed is not None else Scope.READ.value
