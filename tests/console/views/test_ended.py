"""A session that ended, a form that cannot be trusted: recorded, bounded in rate, and what was typed is not lost."""

from __future__ import annotations

from html import unescape

import pytest
from django.db import OperationalError
from django.test import Client
from django.urls import reverse

from controller.models import Decision, PersonSession, SLOClass
from controller.services.records import refusals as refusal_log
from tests import factories

CLASS = {
    "title": "typed by hand", "ttft_s": "0.91", "tpot_s": "0.2", "waiting_time_s": "5", "target": "95", "value": "1",
    "version": "1",
}  # fmt: skip


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture(autouse=True)
def _new_log(monkeypatch, clock):
    monkeypatch.setattr(refusal_log, "LOG", refusal_log.Bounded(clock))


@pytest.fixture
def row(db):
    return factories.slo_class(ttft_s=0.7)


def refusals():
    return Decision.objects.filter(kind="access_refused").order_by("id")


def sign_in(client, path):
    person = factories.user("admin")
    answer = client.post("/login/", {"username": person.username, "password": "secret", "next": path})
    assert (answer.status_code, answer["location"]) == (302, path)
    return person


# ---- recorded, and no more often than is worth it --------------------------------------------------------------------


def test_a_form_without_its_token_is_recorded_with_who_was_signed_in(row):
    client, person = Client(enforce_csrf_checks=True), factories.user("admin")
    client.force_login(person)
    assert client.post(reverse("class-edit", args=[row.pk]), CLASS).status_code == 403
    (decision,) = refusals()
    assert (decision.actor, decision.reason) == (person.username, "csrf_failed")
    assert (decision.subject, decision.inputs["method"]) == (reverse("class-edit", args=[row.pk]), "POST")


def test_an_anonymous_post_is_recorded(db, client):
    assert client.post(reverse("instance-act"), {"instance": "x", "action": "stop"}).status_code == 302
    (decision,) = refusals()
    assert (decision.actor, decision.reason) == (refusal_log.NOBODY.name, "not_signed_in")
    assert decision.subject == "/fleet/act/"


def test_looking_at_a_page_without_signing_in_is_not(db, client):
    client.get("/classes/")
    assert not refusals().exists()


def test_anonymous_requests_cannot_fill_the_audit_and_what_is_left_out_is_counted(db, client, clock):
    for _ in range(refusal_log.BURST + 7):
        client.post(reverse("instance-act"))
    assert refusals().count() == refusal_log.BURST
    clock.now += refusal_log.EVERY_S
    client.post(reverse("instance-act"))
    client.post(reverse("instance-act"))
    assert refusals().count() == refusal_log.BURST + 1
    assert refusals().last().inputs["not_written_before"] == 7


def test_anonymous_requests_do_not_hide_what_a_signed_in_user_does(row, client):
    for _ in range(refusal_log.BURST + 1):
        client.post(reverse("instance-act"))
    insider = Client(enforce_csrf_checks=True)
    insider.force_login(factories.user("admin"))
    insider.post(reverse("class-edit", args=[row.pk]), CLASS)
    assert refusals().last().reason == "csrf_failed"


def test_without_the_database_it_is_refused_all_the_same(db, monkeypatch):
    def away(**fields):
        raise OperationalError("gone")

    monkeypatch.setattr(refusal_log, "decision_record", away)
    assert Client(enforce_csrf_checks=True).post("/classes/new/", CLASS).status_code == 403
    assert Client().post("/classes/new/", CLASS).status_code == 302


def test_nul_in_a_refused_address_is_no_defect(db):
    client = Client(enforce_csrf_checks=True, raise_request_exception=False)
    assert client.post("/requests/%00/").status_code == 403
    assert "\x00" not in refusals().get().subject


# ---- not lost --------------------------------------------------------------------------------------------------------


def typed(html, name):
    """The value that the form's field shows."""
    field = next(part for part in html.split("<input")[1:] if f'name="{name}"' in part.split(">")[0])
    return unescape(field.split('value="')[1].split('"')[0])


def test_what_was_typed_is_in_the_form_again_after_signing_in_and_is_not_saved(row):
    client, path = Client(), reverse("class-edit", args=[row.pk])
    client.force_login(factories.user("admin"))
    PersonSession.objects.all().delete()
    answer = client.post(path, CLASS, headers={"referer": f"http://testserver{path}"})
    assert answer["location"] == f"/login/?next={path}"
    assert b"input is kept for 15 minutes" in client.get(answer["location"]).content
    sign_in(client, path)
    page = client.get(path)
    html = page.content.decode()
    assert (typed(html, "ttft_s"), typed(html, "title")) == ("0.91", "typed by hand")
    assert "not saved yet" in html
    assert SLOClass.objects.get(pk=row.pk).ttft_s == 0.7
    assert client.post(path, CLASS).status_code == 302
    assert SLOClass.objects.get(pk=row.pk).ttft_s == 0.91


def test_it_is_shown_once(row):
    client, path = Client(), reverse("class-edit", args=[row.pk])
    client.post(path, CLASS)
    sign_in(client, path)
    client.get(path)
    assert typed(client.get(path).content.decode(), "ttft_s") == "0.7"


def test_it_is_in_no_other_form(row):
    client, path = Client(), reverse("class-edit", args=[row.pk])
    client.post(path, CLASS)
    sign_in(client, "/classes/new/")
    assert b"typed by hand" not in client.get("/classes/new/").content
    assert b"typed by hand" in client.get(path).content


def test_a_forged_one_is_nothing(row):
    client, path = Client(), reverse("class-edit", args=[row.pk])
    client.force_login(factories.user("admin"))
    client.cookies["slackline_typed_8000"] = "eyJwYXRoIjoiLyJ9:1abc:forged"
    assert typed(client.get(path).content.decode(), "ttft_s") == "0.7"


def test_what_is_too_long_to_keep_is_said(row):
    client, path = Client(), reverse("class-edit", args=[row.pk])
    noise = "".join(chr(0x4E00 + (i * 7919) % 20000) for i in range(6000))
    answer = client.post(path, {**CLASS, "title": noise})
    page = client.get(answer["location"]).content
    assert b"too long to keep" in page
    assert b"input is kept for 15 minutes" not in page


def test_a_command_leads_back_to_its_page(db, client):
    answer = client.post(reverse("instance-act"), {"action": "stop"}, headers={"referer": "http://testserver/fleet/"})
    assert answer["location"] == "/login/?next=/fleet/"
    assert b"was not carried out" in client.get(answer["location"]).content


def test_no_other_site_says_where_one_comes_to(db, client):
    answer = client.post(reverse("instance-act"), {}, headers={"referer": "https://evil.example/fleet/"})
    assert answer["location"] == "/login/?next=/fleet/act/"


FORMS = [
    ("class-new", (), {"name": "c1"}, "name"),
    ("mapping-edit", ("mapping",), {"window": "77", "levels-TOTAL_FORMS": "1", "levels-INITIAL_FORMS": "1"}, "window"),
    ("tenant-new", (), {"name": "t1"}, "name"),
    ("tenant-edit", ("tenant",), {"title": "t2"}, "title"),
    ("instance-new", (), {"id": "gpu-1"}, "id"),
    ("instance-start", (), {"folder": "/models/a"}, "folder"),
    ("instance-edit", ("instance",), {"device_kind": "h200"}, "device_kind"),
    ("scaling-new", (), {"upper": "0.77"}, "upper"),
    ("scaling-edit", ("policy",), {"upper": "0.77"}, "upper"),
    ("scaling-hold", ("policy",), {"instances": "3"}, "instances"),
    ("experiment-new", (), {"name": "e1", "contenders-TOTAL_FORMS": "4", "contenders-INITIAL_FORMS": "4"}, "name"),
]


@pytest.mark.parametrize(("name", "of", "data", "field"), FORMS)
def test_every_form_keeps_what_was_typed(db, live_store, name, of, data, field):
    made = {
        "mapping": factories.priority_mapping, "tenant": factories.tenant, "policy": factories.scaling_policy,
        "instance": factories.instance,
    }  # fmt: skip
    path = reverse(name, args=[made[each]().pk for each in of])
    client = Client()
    client.post(path, data)
    sign_in(client, path)
    page = client.get(path)
    assert page.status_code == 200
    assert typed(page.content.decode(), field) == data[field]
    assert b"not saved yet" in page.content


def test_a_new_key_s_name_is_in_the_tenants_page_again(db, live_store):
    tenant, client = factories.tenant(), Client()
    page = reverse("tenant", args=[tenant.pk])
    sent = client.post(reverse("key-new", args=[tenant.pk]), {"name": "k9", "scopes": ["read"]},
                       headers={"referer": f"http://testserver{page}"})  # fmt: skip
    assert sent["location"] == f"/login/?next={page}"
    sign_in(client, page)
    assert typed(client.get(page).content.decode(), "name") == "k9"


def test_a_form_from_before_another_sign_in_keeps_what_was_typed(row):
    """Its token is of the session before; the page is ours all the same, its origin says so."""
    client, path = Client(enforce_csrf_checks=True), reverse("class-edit", args=[row.pk])
    client.force_login(factories.user("admin"))
    refused_page = client.post(path, CLASS, headers={"origin": "http://testserver"})
    assert refused_page.status_code == 403
    assert b"input is kept for 15 minutes" in refused_page.content
    assert typed(client.get(path).content.decode(), "ttft_s") == "0.91"


@pytest.mark.parametrize("origin", ["https://evil.example", "null", ""])
def test_what_another_site_sent_is_not_kept(row, origin):
    client, path = Client(enforce_csrf_checks=True), reverse("class-edit", args=[row.pk])
    client.force_login(factories.user("admin"))
    client.post(path, CLASS, headers={"origin": origin} if origin else {})
    assert typed(client.get(path).content.decode(), "ttft_s") == "0.7"


# ---- for scripts -----------------------------------------------------------------------------------------------------


def test_a_script_learns_whether_its_person_is_still_signed_in(viewer, client):
    assert viewer.get("/session/").status_code == 204
    assert client.get("/session/").status_code == 302
