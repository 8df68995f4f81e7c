"""Sign-in, with a notice about a form whose session had ended; sign-out, which closes the live connections of that
session immediately; and a check whether the session is still valid."""

from __future__ import annotations

import logging
from typing import Any

from django.contrib.auth import user_logged_out
from django.contrib.auth.views import LoginView, redirect_to_login
from django.core.exceptions import PermissionDenied
from django.dispatch import receiver
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.views.decorators.http import require_GET

from console.access import allows
from console.consumers.base import session_group
from console.forms.sign_in import SignInForm
from console.forms.unsaved_forms import kept
from controller.selectors.roles import UserRole
from workers import live

log = logging.getLogger(__name__)


@receiver(user_logged_out)
def end_sockets(sender: Any, request: HttpRequest, **rest: Any) -> None:
    """On every sign-out. Without Redis the sockets close at their next session check (console/consumers/base.py)."""
    key = getattr(getattr(request, "session", None), "session_key", None)
    if key is None:
        return
    try:
        live.send_to_group(session_group(key), {"type": "session.ended"})
    except live.LiveUnavailable as error:
        log.info("signed out while Redis was unavailable: %s", error, extra={"action": "sign_out_untold"})


class SignIn(LoginView):
    authentication_form = SignInForm

    def form_invalid(self, form: Any) -> HttpResponse:
        response = super().form_invalid(form)
        response.status_code = form.status
        if form.retry_after_s:
            response.headers["Retry-After"] = str(form.retry_after_s)
        return response

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        return super().get_context_data(refused=kept(self.request), **kwargs)


def admin_sign_in(request: HttpRequest) -> HttpResponse:
    """Instead of the admin site's own form, so that there is one form with one set of limits."""
    if request.user.is_authenticated:
        raise PermissionDenied("The admin site requires a staff account with the viewer role.")
    return redirect_to_login(request.GET.get("next") or reverse("admin:index"))


@require_GET
@allows(UserRole.VIEWER)
def session(request: HttpRequest) -> HttpResponse:
    """For a page that lost its connection: 204, or a redirect to the login page."""
    return HttpResponse(status=204)
