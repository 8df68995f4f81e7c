"""Signing in, which says what became of a form whose session had ended; and whether somebody still is signed in."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.views import LoginView
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_GET

from console.access import allows
from console.typed import kept
from controller.selectors.roles import Role


class SignIn(LoginView):
    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        return super().get_context_data(refused=kept(self.request), **kwargs)


@require_GET
@allows(Role.VIEWER)
def session(request: HttpRequest) -> HttpResponse:
    """For a page whose connection was lost: 204, or the way to the login."""
    return HttpResponse(status=204)
