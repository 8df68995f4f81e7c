"""Records unauthorised calls of the control API in the audit, if they would have changed something."""

from __future__ import annotations

from django.core.exceptions import PermissionDenied as NotAllowed
from rest_framework.exceptions import AuthenticationFailed, NotAuthenticated, PermissionDenied
from rest_framework.permissions import SAFE_METHODS
from rest_framework.request import Request

from api.control.access.auth import CsrfFailed, ScopeMissing, TenantPrincipal
from controller.selectors.roles import ServicePrincipal
from controller.services.actors import Actor
from controller.services.records.refusals import NOBODY, access_refused

# The reason code is that of the first class that matches.
REASONS: tuple[tuple[type[Exception], str], ...] = (
    (CsrfFailed, "csrf_failed"),
    (ScopeMissing, "scope_missing"),
    (NotAuthenticated, "not_signed_in"),
    (AuthenticationFailed, "invalid_api_key"),
    (PermissionDenied, "role_too_low"),
    (NotAllowed, "role_too_low"),
)


def refusal_record(request: Request, error: Exception) -> None:
    """Record the refusal, unless the call was a read or the error is another one. Never raises."""
    reason = next((reason for kind, reason in REASONS if isinstance(error, kind)), None)
    if reason is None or request.method in SAFE_METHODS:
        return
    actor, bucket = _caller(request, error)
    access_refused(
        actor=actor,
        bucket=bucket,
        subject_type="api",
        subject=request.path,
        reason="keys_change_nothing" if bucket == "keys" else reason,
        inputs={"method": request.method},
    )


def _caller(request: Request, error: Exception) -> tuple[Actor, str]:
    """The caller as far as known, and the bucket that limits how often such refusals are recorded."""
    if isinstance(error, CsrfFailed):
        return Actor.person(error.username), "people"
    if isinstance(request.user, TenantPrincipal):
        return Actor.person(f"{request.user.tenant}/{request.user.pk}"), "keys"
    if isinstance(request.user, ServicePrincipal):
        return Actor.service(request.user.name), "services"
    if request.user.is_authenticated:
        return Actor.person(request.user.get_username()), "people"
    return NOBODY, "unauthenticated"
