"""Calls of the control API by who may not make them: those that would change something are in the audit."""

from __future__ import annotations

from django.core.exceptions import PermissionDenied as NotAllowed
from rest_framework.exceptions import AuthenticationFailed, NotAuthenticated, PermissionDenied
from rest_framework.permissions import SAFE_METHODS
from rest_framework.request import Request

from api.auth import CsrfFailed, ScopeMissing, TenantPrincipal
from controller.services.actors import Actor
from controller.services.refusals import NOBODY, access_refused

# The first that fits is the reason.
REASONS: tuple[tuple[type[Exception], str], ...] = (
    (CsrfFailed, "csrf_failed"),
    (ScopeMissing, "scope_missing"),
    (NotAuthenticated, "not_signed_in"),
    (AuthenticationFailed, "invalid_api_key"),
    (PermissionDenied, "role_too_low"),
    (NotAllowed, "role_too_low"),
)


def refusal_record(request: Request, error: Exception) -> None:
    """Nothing for a read, or for an error that refuses nobody. Never an error itself."""
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
    """Who it was as far as is known, and whose share of the audit that takes."""
    if isinstance(error, CsrfFailed):
        return Actor.person(error.username), "people"
    if isinstance(request.user, TenantPrincipal):
        return Actor.person(f"{request.user.tenant}/{request.user.pk}"), "keys"
    if request.user.is_authenticated:
        return Actor.person(request.user.get_username()), "people"
    return NOBODY, "strangers"
