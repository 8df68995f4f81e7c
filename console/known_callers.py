"""Whether a request shows a session or a service token that is valid, before its body is read.

The views decide what a caller may do. This only decides how much may be held for it until then
(`workers.http.bodies`)."""

from __future__ import annotations

from asgiref.sync import sync_to_async
from django.conf import settings
from django.db.models.functions import Now
from django.http import parse_cookie

from console.session_keys import digest_of
from controller.models import PersonSession
from controller.selectors.service_accounts import token_of_secret
from controller.services.access.service_accounts import MARK
from workers.http.bodies import Scope


async def is_known(scope: Scope) -> bool:
    headers = dict(scope["headers"])
    word, _, secret = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
    if word.lower() == "bearer" and secret.strip().startswith(MARK):
        return await sync_to_async(token_of_secret)(secret.strip()) is not None
    key = parse_cookie(headers.get(b"cookie", b"").decode("latin-1")).get(settings.SESSION_COOKIE_NAME)
    if not key:
        return False
    rows = PersonSession.objects.filter(digest=digest_of(key), expire_date__gt=Now())
    return await rows.filter(person__is_active=True).aexists()
