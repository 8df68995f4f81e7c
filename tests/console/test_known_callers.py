"""Who may upload a trace: callers with a session or a service token that is valid, as the console itself sees them."""

from __future__ import annotations

from datetime import timedelta

import pytest
from asgiref.sync import async_to_sync
from django.conf import settings
from django.utils import timezone

from console.known_callers import is_known
from console.session_keys import digest_of
from controller.models import PersonSession, ServiceAccount
from controller.services.access.service_accounts import service_token_create, service_token_revoke
from controller.services.actors import Actor

pytestmark = pytest.mark.django_db


def asks(*headers: tuple[bytes, bytes]) -> bool:
    return async_to_sync(is_known)({"type": "http", "headers": list(headers)})


def cookie(key: str) -> tuple[bytes, bytes]:
    return b"cookie", f"other=1; {settings.SESSION_COOKIE_NAME}={key}".encode()


def bearer(secret: str) -> tuple[bytes, bytes]:
    return b"authorization", f"Bearer {secret}".encode()


def test_a_stranger_is_not_known():
    assert not asks()
    assert not asks((b"cookie", b"\xff\xfe=;;"), (b"authorization", b"Bearer \xff"))
    assert not asks(cookie("0" * 32))
    assert not asks(bearer("slk-unknown"))


def test_a_session_is_known_until_it_ends(viewer):
    key = viewer.cookies[settings.SESSION_COOKIE_NAME].value
    assert asks(cookie(key))
    row = PersonSession.objects.filter(digest=digest_of(key))
    person = row.get().person
    person.is_active = False
    person.save()
    assert not asks(cookie(key))
    person.is_active = True
    person.save()
    row.update(expire_date=timezone.now() - timedelta(seconds=1))
    assert not asks(cookie(key))


def test_a_session_of_nobody_is_not_known(client):
    session = client.session
    session["anything"] = 1
    session.save()
    assert not asks(cookie(session.session_key))


def test_a_service_token_is_known_until_it_is_revoked(db):
    actor = Actor.person("test")
    account = ServiceAccount.objects.create(name="deployer", role="operator", scopes=["*"])
    issued = service_token_create(actor=actor, account=account, expires_at=timezone.now() + timedelta(days=1))
    assert asks(bearer(issued.secret))
    service_token_revoke(actor=actor, token_id=issued.token.pk)
    assert not asks(bearer(issued.secret))
