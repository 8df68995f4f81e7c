"""Sessions: where somebody is signed in, and signing out there. Admins see and end those of all people."""

from __future__ import annotations

import logging

from django.contrib import messages
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.utils import timezone
from django.views.decorators.http import require_GET, require_POST

from console.access import actor_of, allows
from console.session_keys import digest_of, group_of
from console.wording.browser import browser_words
from controller.models import PersonSession
from controller.selectors.roles import UserRole, role_of
from controller.selectors.sessions import open_sessions
from controller.services.access.sessions import sessions_end
from workers import live

log = logging.getLogger(__name__)

SHOWN = 200
OTHERS = "others"  # instead of one session: all of mine but this one


@require_GET
@allows(UserRole.VIEWER)
def session_list(request: HttpRequest) -> HttpResponse:
    here = _here(request)
    rows = [
        {"row": row, "here": row.digest == here, "browser": browser_words(row.browser)}
        for row in _visible(request)[:SHOWN]
    ]
    others = open_sessions(timezone.now(), request.user).exclude(digest=here).exists()
    context = {"sessions": rows, "all_people": _is_admin(request), "others": others, "other_value": OTHERS}
    return render(request, "console/accounts/sessions.html", context)


@require_POST
@allows(UserRole.VIEWER)
def session_end(request: HttpRequest) -> HttpResponse:
    """`session` in the form: a digest as listed, or "others". What is not listed for this person is not ended."""
    asked, here = request.POST.get("session", ""), _here(request)
    if asked == OTHERS:
        found = list(open_sessions(timezone.now(), request.user).exclude(digest=here).values_list("digest", flat=True))
    else:
        found = list(_visible(request).filter(digest=asked).values_list("digest", flat=True))
    ended = sessions_end(actor=actor_of(request), digests=found)
    for digest in ended:
        _close_sockets(digest)
    if here in ended:
        return redirect("login")
    if ended:
        messages.success(request, f"{len(ended)} session{'' if len(ended) == 1 else 's'} ended.")
    else:
        messages.info(request, "Nothing to end: the session had ended already.")
    return redirect("sessions")


def _visible(request: HttpRequest) -> QuerySet[PersonSession]:
    return open_sessions(timezone.now(), None if _is_admin(request) else request.user)


def _is_admin(request: HttpRequest) -> bool:
    return role_of(request.user) >= UserRole.ADMIN


def _here(request: HttpRequest) -> str:
    return digest_of(request.session.session_key or "")


def _close_sockets(digest: str) -> None:
    try:
        live.send_to_group(group_of(digest), {"type": "session.ended"})
    except live.LiveUnavailable as error:  # they close at their next session check, within half a minute
        log.info("session ended while Redis was unavailable: %s", error, extra={"action": "session_end_untold"})
