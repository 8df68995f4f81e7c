"""Sessions in PostgreSQL: who is signed in, since when, from where; they end when they are not used, and by age.

Django loads a session only until its `expire_date`, so the server ends it whatever the browser keeps. The key in the
cookie is not stored, only its digest.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from django.conf import settings
from django.contrib.auth import SESSION_KEY as PERSON_KEY
from django.contrib.auth import user_logged_in
from django.contrib.sessions.backends.db import SessionStore as DatabaseStore
from django.db import InterfaceError, OperationalError
from django.db.models.functions import Now
from django.dispatch import receiver
from django.http import HttpRequest, HttpResponse
from psycopg_pool import PoolTimeout

from console.middleware import Hooks
from console.session_keys import digest_of
from controller.models import PersonSession

STARTED, USED, ADDRESS, BROWSER = "started_at", "used_at", "address", "browser"  # keys in the session's data
NOTED_EVERY_S = 300.0  # use is stored at most this often
# Addresses that an open page asks by itself: that is no use by a person.
BY_ITSELF = frozenset(
    {"session", "overview-history", "fleet-live", "instance-live", "scaling-live", "preview", "queue-command-ended"}
)


class SessionStore(DatabaseStore):
    """Django's store over our table. `exists` and the like take the key of the cookie, the table has its digest. By the
    database's clock: one that steps on a console's host revives no session."""

    @classmethod
    def get_model_class(cls) -> Any:
        return PersonSession

    def load(self) -> dict[str, Any]:
        row = PersonSession.objects.filter(digest=self._digest(), expire_date__gt=Now()).first()
        if row is None:
            self._session_key = None
        return self.decode(row.session_data) if row is not None else {}

    async def aload(self) -> dict[str, Any]:
        row = await PersonSession.objects.filter(digest=self._digest(), expire_date__gt=Now()).afirst()
        if row is None:
            self._session_key = None
        return self.decode(row.session_data) if row is not None else {}

    def exists(self, session_key: str) -> bool:
        return PersonSession.objects.filter(digest=digest_of(session_key)).exists()

    async def aexists(self, session_key: str) -> bool:
        return await PersonSession.objects.filter(digest=digest_of(session_key)).aexists()

    def delete(self, session_key: str | None = None) -> None:
        key = session_key or self.session_key
        if key is not None:
            PersonSession.objects.filter(digest=digest_of(key)).delete()

    async def adelete(self, session_key: str | None = None) -> None:
        key = session_key or self.session_key
        if key is not None:
            await PersonSession.objects.filter(digest=digest_of(key)).adelete()

    def create_model_instance(self, data: Mapping[str, Any]) -> Any:
        return self._row(self._get_or_create_session_key(), data)  # type: ignore[attr-defined]

    async def acreate_model_instance(self, data: Mapping[str, Any]) -> Any:
        return self._row(await self._aget_or_create_session_key(), data)  # type: ignore[attr-defined]

    def _digest(self) -> str:
        return digest_of(self.session_key or "")

    def _row(self, key: str, data: Mapping[str, Any]) -> PersonSession:
        now = time.time()
        started, used = (min(now, float(data.get(name, now))) for name in (STARTED, USED))
        ends = min(used + settings.SESSION_IDLE_HOURS * 3600.0, started + settings.SESSION_DAYS * 86400.0)
        return PersonSession(
            digest=digest_of(key),
            person_id=data.get(PERSON_KEY),
            session_data=self.encode(dict(data)),
            expire_date=_moment(ends),
            started_at=_moment(started),
            used_at=_moment(used),
            address=str(data.get(ADDRESS, ""))[:64],
            browser=str(data.get(BROWSER, ""))[:200],
        )


@receiver(user_logged_in)
def begin(sender: Any, request: HttpRequest, **rest: Any) -> None:
    """On every sign-in. A key that was used before signing in has been replaced by then."""
    session = getattr(request, "session", None)
    if session is not None:
        session[STARTED] = time.time()
        _note_use(request)


class SessionUse(Hooks):
    """Notes that a person uses the session, at most once every five minutes, so that it does not end as idle."""

    def process_view(
        self, request: HttpRequest, view: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> HttpResponse | None:
        name = request.resolver_match.url_name if request.resolver_match else None
        if name in BY_ITSELF or settings.SESSION_COOKIE_NAME not in request.COOKIES:
            return None
        try:
            session = request.session
            if PERSON_KEY in session and not 0 <= time.time() - session.get(USED, 0.0) < NOTED_EVERY_S:
                _note_use(request)
        except (OperationalError, InterfaceError, PoolTimeout):
            pass  # without PostgreSQL the view says what is missing
        return None


def _note_use(request: HttpRequest) -> None:
    request.session[USED] = time.time()
    request.session[ADDRESS] = request.META.get("REMOTE_ADDR", "")
    request.session[BROWSER] = request.META.get("HTTP_USER_AGENT", "")[:200].replace("\x00", "")


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, tz=UTC)
