"""Signing in: how often, from where, with Redis unavailable, and the admin site's form, which is the same."""

from __future__ import annotations

import time
from uuid import uuid4

import pytest
from django.contrib.auth import hashers
from django.contrib.auth.password_validation import validate_password
from django.core.exceptions import ValidationError
from django.test import Client

from controller.models import Decision
from controller.services.records import refusals as refusal_log
from tests import factories
from tests.api.openai.test_process import stopped

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def limits(settings, monkeypatch):
    settings.SIGN_INS_PER_ACCOUNT, settings.SIGN_INS_PER_ADDRESS = 3, 5
    monkeypatch.setattr(refusal_log, "LOG", refusal_log.Bounded())


@pytest.fixture
def person():
    return factories.user("admin", username=f"olga-{uuid4()}", is_staff=True)


@pytest.fixture
def address():
    return f"host-{uuid4()}"


def sign_in(name, password, address, path="/login/"):
    return Client(REMOTE_ADDR=address).post(path, {"username": name, "password": password})


def test_an_account_is_refused_after_a_few_failures_even_with_the_password(person, address):
    for _ in range(3):
        answer = sign_in(person.username, "wrong", f"host-{uuid4()}")
        assert (answer.status_code, b"Incorrect username or password" in answer.content) == (200, True)
    answer = sign_in(person.username, "secret", address)
    assert answer.status_code == 429
    assert 0 < int(answer["retry-after"]) <= 900
    assert b"Too many failed attempts for this account. Try again in 15 minutes." in answer.content
    (decision,) = Decision.objects.filter(kind="access_refused")
    assert (decision.reason, decision.inputs["by"]) == ("too_many_sign_ins", "account")
    assert person.username not in str(decision.inputs)


def test_an_address_is_refused_after_a_few_failures_for_any_account(person, address):
    for _ in range(5):
        sign_in(f"nobody-{uuid4()}", "wrong", address)
    answer = sign_in(person.username, "secret", address)
    assert answer.status_code == 429
    assert b"Too many failed attempts for your address" in answer.content
    assert sign_in(person.username, "secret", f"host-{uuid4()}").status_code == 302


def test_a_refused_attempt_costs_no_password_check(person, address, monkeypatch):
    for _ in range(3):
        sign_in(person.username, "wrong", address)
    checked = []
    monkeypatch.setattr(hashers, "verify_password", lambda *rest: checked.append(rest) or (False, False))
    assert sign_in(person.username, "wrong", address).status_code == 429
    assert checked == []


def test_signing_in_often_is_no_failure(person, address):
    for _ in range(12):
        assert sign_in(person.username, "secret", address).status_code == 302


def test_an_unfinished_form_is_not_counted(person, address):
    for _ in range(6):
        assert sign_in(person.username, "", address).status_code == 200
    assert sign_in(person.username, "secret", address).status_code == 302


def test_without_redis_nobody_signs_in_and_the_page_says_why(person, address, settings):
    signed_in = Client()
    signed_in.force_login(person)
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    answer = sign_in(person.username, "secret", address)
    assert (answer.status_code, answer["retry-after"]) == (503, "5")
    assert b"Signing in is not possible right now: Redis is unavailable" in answer.content
    assert "sessionid" not in str(answer.cookies)
    assert signed_in.get("/classes/").status_code == 200


def test_while_redis_hangs_nobody_signs_in_and_the_counts_go_on_afterwards(person, address, redis_server):
    """Nobody waits long, no guess is free, and who is signed in goes on working."""
    signed_in = Client()
    signed_in.force_login(person)
    assert [sign_in(person.username, "wrong", address).status_code for _ in range(2)] == [200, 200]
    with stopped(redis_server.pid):
        began = time.monotonic()
        answers = [sign_in(person.username, password, address) for password in ("wrong", "secret")]
        assert time.monotonic() - began < 10
        assert {answer.status_code for answer in answers} == {503}
        assert signed_in.get("/classes/").status_code == 200
    # What was sent to the hanging Redis may be counted there once it goes on, so at most one more guess is free.
    assert [sign_in(person.username, "wrong", address).status_code for _ in range(2)] in ([200, 429], [429, 429])


def test_the_admin_site_has_no_form_of_its_own(person, address):
    client = Client(REMOTE_ADDR=address)
    answer = client.get("/admin/login/?next=/admin/controller/tenant/")
    assert (answer.status_code, answer["location"]) == (302, "/login/?next=/admin/controller/tenant/")
    answer = client.post("/admin/login/", {"username": person.username, "password": "secret"})
    assert (answer.status_code, answer["location"]) == (302, "/login/?next=/admin/")
    assert client.get("/admin/")["location"].startswith("/admin/login/")
    assert sign_in(person.username, "secret", address).status_code == 302


def test_an_account_that_may_not_use_the_admin_site_is_told(viewer):
    answer = viewer.get("/admin/login/")
    assert answer.status_code == 403
    assert b"The admin site requires a staff account with the viewer role." in answer.content


@pytest.mark.parametrize("password", ["short-1-aB", "password1234", "839201748291", "olga-the-great"])
def test_weak_passwords_are_refused(password):
    person = factories.user("viewer", username="olga-the-great-1")
    with pytest.raises(ValidationError):
        validate_password(password, person)
    validate_password("a horse and a staple", person)
