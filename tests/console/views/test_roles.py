"""Every page by role: anonymous, nobody, viewer, operator; and the headers that every answer carries."""

from __future__ import annotations

import pytest
from django.test import Client

from console.middleware import CONTENT_SECURITY_POLICY
from controller.models import Decision
from tests import factories

PAGES = [
    "/", "/overview/history/", "/queue/", "/requests/", "/classes/", "/mappings/", "/fleet/", "/audit/",
    "/experiments/", "/traces/", "/tenants/", "/scaling/", "/patterns/", "/requests/compare/", "/fleet/live/",
    "/scaling/live/", "/sessions/", "/service-accounts/",
]  # fmt: skip
EDITS = ["/classes/new/", "/classes/{row}/", "/classes/{row}/remove/", "/mappings/{mapping}/"]


@pytest.fixture
def edits(db):
    row, mapping = factories.slo_class(), factories.priority_mapping()
    return [path.format(row=row.pk, mapping=mapping.pk) for path in EDITS]


@pytest.mark.django_db
@pytest.mark.parametrize("path", PAGES)
def test_anonymous_people_are_sent_to_the_login(path):
    answer = Client().get(path)
    assert (answer.status_code, answer["location"]) == (302, f"/login/?next={path}")


@pytest.mark.parametrize("path", PAGES)
def test_a_viewer_reads_every_page(viewer, live_store, path):
    assert viewer.get(path).status_code == 200


@pytest.mark.parametrize("path", PAGES)
def test_an_account_without_a_role_sees_nothing(signed_in, live_store, path):
    answer = signed_in("").get(path)
    assert answer.status_code == 403
    assert b"This requires the viewer role" in answer.content


def test_a_viewer_is_refused_every_edit_and_that_is_audited(viewer, edits):
    assert {viewer.get(path).status_code for path in edits} == {403}
    assert not Decision.objects.filter(kind="access_refused").exists()
    answers = {path: viewer.post(path, {"ttft_s": "9"}).status_code for path in edits}
    assert set(answers.values()) == {403}
    refused = Decision.objects.filter(kind="access_refused").order_by("id")
    assert [each.subject for each in refused] == edits
    assert refused[0].inputs == {"method": "POST", "role": "viewer", "needed": "operator", "not_written_before": 0}


def test_an_operator_may_edit(operator, edits):
    assert {operator.get(path).status_code for path in edits} == {200}


@pytest.mark.parametrize(("role", "shown"), [("viewer", False), ("operator", True)])
def test_only_those_who_may_act_see_the_controls(signed_in, live_store, edits, role, shown):
    client = signed_in(role)
    for path, control in (("/classes/", b"New class"), ("/mappings/", b">Edit<"), ("/queue/", b"Cancel requests")):
        assert (control in client.get(path).content) is shown


@pytest.mark.django_db
def test_every_answer_carries_the_security_headers():
    for path in ("/login/", "/", "/nowhere/"):
        answer = Client().get(path)
        assert answer["content-security-policy"] == CONTENT_SECURITY_POLICY
        assert answer["x-content-type-options"] == "nosniff"
        assert answer["x-frame-options"] == "DENY"
        assert answer["server-timing"].startswith("app;dur=")


@pytest.mark.parametrize("path", PAGES)
def test_pages_hold_no_inline_script_or_style(viewer, live_store, path):
    html = viewer.get(path).content.decode()
    for part in html.split("<script")[1:]:
        head = part.split(">", 1)[0]
        assert "src=" in head or 'type="application/json"' in head
    assert "<style" not in html
    assert " style=" not in html
    assert " onclick=" not in html
    assert "//cdn" not in html


@pytest.mark.django_db
def test_a_forged_form_is_refused_in_words():
    client = Client(enforce_csrf_checks=True)
    client.force_login(factories.user("operator"))
    answer = client.post("/classes/new/", {"name": "x"})
    assert answer.status_code == 403
    assert b"The form could not be verified" in answer.content


@pytest.mark.django_db
def test_the_login_asks_for_both_and_says_when_they_do_not_match():
    factories.user("viewer", username="vera")
    client = Client()
    refused = client.post("/login/", {"username": "vera", "password": "wrong"})
    assert b"Incorrect username or password" in refused.content
    answer = client.post("/login/?next=/queue/", {"username": "vera", "password": "secret", "next": "/queue/"})
    assert (answer.status_code, answer["location"]) == (302, "/queue/")


@pytest.mark.django_db
def test_the_login_does_not_send_people_to_other_sites():
    factories.user("viewer", username="vera")
    form = {"username": "vera", "password": "secret", "next": "https://elsewhere.example/"}
    assert Client().post("/login/", form)["location"] == "/"
