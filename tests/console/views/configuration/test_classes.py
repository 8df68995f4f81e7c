"""SLO classes: create, change, conflict, remove, undo."""

from __future__ import annotations

import pytest
from django.core.exceptions import ValidationError

from console.views.configuration import classes as views
from controller.models import Decision, SLOClass
from tests import factories
from workers import live

FORM = {
    "name": "chat", "tenant": "", "title": "Chat", "ttft_s": "0.5", "tpot_s": "0.05", "deadline_s": "",
    "waiting_time_s": "5", "target": "97.5", "value": "2",
}  # fmt: skip


@pytest.fixture
def row(db):
    return factories.slo_class(name="chat", ttft_s=0.7, tpot_s=0.05, target=0.95)


def changed(row, **fields):
    return {**FORM, "version": row.version, **fields}


def test_a_class_is_made_and_audited(operator):
    answer = operator.post("/classes/new/", FORM, follow=True)
    row = SLOClass.objects.get(name="chat")
    assert (row.ttft_s, row.target, row.deadline_s, row.tenant) == (0.5, 0.975, None, None)
    assert "Class chat created" in answer.content.decode()
    decision = Decision.objects.get(kind="slo_class_created")
    assert decision.inputs["after"]["ttft_s"] == 0.5


def test_a_class_of_one_tenant(operator):
    owner = factories.tenant(name="acme")
    operator.post("/classes/new/", {**FORM, "tenant": owner.pk})
    assert SLOClass.objects.get(name="chat").tenant == owner


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ttft_s": "0"}, "greater than or equal to 0.0001"),
        ({"ttft_s": "soon"}, "Enter a number"),
        ({"ttft_s": "nan"}, "Enter a number"),
        ({"tpot_s": ""}, "This field is required"),
        ({"target": "101"}, "less than or equal to 100"),
        ({"deadline_s": "0.1"}, "must not be before the TTFT"),
        ({"name": "no spaces"}, "Letters, digits"),
        ({"tenant": "99999"}, "Select a valid choice"),
    ],
)
def test_what_makes_no_sense_is_refused_beside_its_field(operator, fields, message):
    answer = operator.post("/classes/new/", {**FORM, **fields})
    assert answer.status_code == 422
    field = next(iter(fields))
    html = answer.content.decode()
    assert message in html.split(f'id="id_{field}_error"')[1].split("</ul>")[0]
    assert not SLOClass.objects.exists()


def test_a_taken_name_is_marked_in_the_words_of_the_form(operator, row):
    answer = operator.post("/classes/new/", FORM)
    assert answer.status_code == 422
    html = answer.content.decode()
    at_name = html.split('id="id_name_error"')[1].split("</ul>")[0]
    assert "A class with this name already exists for all tenants." in at_name
    assert "Correct the marked fields" in html
    assert "with this Tenant" not in html
    assert SLOClass.objects.count() == 1


def test_a_name_that_is_taken_in_the_same_moment_is_marked_so_too(operator, monkeypatch):
    factories.rival_class(monkeypatch, name="chat")
    answer = operator.post("/classes/new/", FORM)
    assert answer.status_code == 422
    html = answer.content.decode()
    assert "A class with this name already exists for all tenants." in html.split('id="id_name_error"')[1]
    assert "slo_class_unique" not in html


def test_a_name_is_taken_only_for_whom_it_is_taken(operator, row):
    owner = factories.tenant(name="acme")
    assert operator.post("/classes/new/", {**FORM, "tenant": owner.pk}).status_code == 302
    answer = operator.post("/classes/new/", {**FORM, "tenant": owner.pk})
    assert "A class with this name already exists for acme." in answer.content.decode()


def test_a_complaint_about_no_field_does_not_send_people_to_a_marked_one(operator, monkeypatch):
    def refuse(**fields):
        raise ValidationError("Two of you at once.")

    monkeypatch.setattr(views, "slo_class_create", refuse)
    answer = operator.post("/classes/new/", FORM)
    assert answer.status_code == 422
    html = answer.content.decode()
    assert "Two of you at once." in html
    assert "Not saved." in html
    assert "Correct the marked fields" not in html


def test_a_change_raises_the_version_and_offers_to_undo(operator, row):
    answer = operator.post(f"/classes/{row.pk}/", changed(row, ttft_s="0.4"), follow=True)
    row.refresh_from_db()
    assert (row.ttft_s, row.version) == (0.4, 2)
    decision = Decision.objects.get(kind="slo_class_updated")
    assert f'href="/classes/{row.pk}/?restore={decision.pk}"' in answer.content.decode()


def test_undo_shows_the_values_before_and_saves_nothing_by_itself(operator, row):
    operator.post(f"/classes/{row.pk}/", changed(row, ttft_s="0.4"))
    decision = Decision.objects.get(kind="slo_class_updated")
    html = operator.get(f"/classes/{row.pk}/?restore={decision.pk}").content.decode()
    assert 'name="ttft_s" value="0.7"' in html
    row.refresh_from_db()
    assert row.ttft_s == 0.4


def test_the_second_of_two_who_save_sees_both_values_and_loses_nothing(operator, row):
    first, second = changed(row, ttft_s="0.4"), changed(row, ttft_s="0.9")
    operator.post(f"/classes/{row.pk}/", first)
    answer = operator.post(f"/classes/{row.pk}/", second)
    assert answer.status_code == 412
    html = answer.content.decode()
    assert "<td>0.4 s</td><td>0.9 s</td>" in html
    assert 'name="version" value="2"' in html
    row.refresh_from_db()
    assert row.ttft_s == 0.4
    operator.post(f"/classes/{row.pk}/", {**second, "version": 2})
    row.refresh_from_db()
    assert (row.ttft_s, row.version) == (0.9, 3)


def test_saving_without_a_change_leaves_no_trace(operator, row):
    form = changed(row, title="", ttft_s="0.7", target="95", value="1")
    answer = operator.post(f"/classes/{row.pk}/", form, follow=True)
    assert "No changes." in answer.content.decode()
    assert not Decision.objects.exists()


def test_saving_again_keeps_what_only_the_other_person_changed(operator, row):
    same = {"title": "", "ttft_s": "0.7", "waiting_time_s": "5", "target": "95", "value": "1"}
    operator.post(f"/classes/{row.pk}/", changed(row, **{**same, "ttft_s": "0.4", "target": "90", "may_defer": "on"}))
    answer = operator.post(f"/classes/{row.pk}/", changed(row, **{**same, "title": "Mine", "target": "99"}))
    assert answer.status_code == 412
    html = answer.content.decode()
    assert "<td>0.4 s</td><td>not changed by you</td>" in html
    assert "<td>90 %</td><td>99 %</td>" in html
    assert '<th scope="row">Title</th><td>none</td><td>Mine</td>' in html
    entered = answer.context["form"].data
    assert (entered["ttft_s"], entered["target"], entered["may_defer"], entered["version"]) == (0.4, "99", True, 2)
    operator.post(f"/classes/{row.pk}/", entered)
    row.refresh_from_db()
    assert (row.ttft_s, row.target, row.title, row.may_defer, row.version) == (0.4, 0.99, "Mine", True, 3)


def test_several_changes_in_the_meantime_are_compared_with_what_was_seen(operator, row):
    same = {"title": "", "ttft_s": "0.7", "waiting_time_s": "5", "target": "95", "value": "1"}
    for version, ttft in enumerate(("0.4", "0.3", "0.2"), start=1):
        operator.post(f"/classes/{row.pk}/", changed(row, **{**same, "ttft_s": ttft, "version": version}))
    answer = operator.post(f"/classes/{row.pk}/", changed(row, **{**same, "title": "Mine"}))
    assert "<td>0.2 s</td><td>not changed by you</td>" in answer.content.decode()
    answer = operator.post(f"/classes/{row.pk}/", changed(row, **{**same, "ttft_s": "0.4"}))
    assert "<td>0.2 s</td><td>0.4 s</td>" in answer.content.decode()


def test_a_class_is_removed_by_the_version_that_was_seen(operator, row):
    SLOClass.objects.filter(pk=row.pk).update(version=4)
    stale = operator.post(f"/classes/{row.pk}/remove/", {"version": 1})
    assert stale.status_code == 412
    answer = operator.post(f"/classes/{row.pk}/remove/", {"version": 4}, follow=True)
    assert not SLOClass.objects.exists()
    decision = Decision.objects.get(kind="slo_class_removed")
    assert f"/classes/new/?restore={decision.pk}" in answer.content.decode()
    assert 'name="ttft_s" value="0.7"' in operator.get(f"/classes/new/?restore={decision.pk}").content.decode()


def test_markup_in_a_title_is_text(operator, viewer, row):
    operator.post(f"/classes/{row.pk}/", changed(row, title="<script>alert(1)</script>"))
    html = viewer.get("/classes/").content.decode()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "<script>alert" not in html


def test_the_list_costs_the_same_however_many_classes(viewer, django_assert_max_num_queries):
    for number in range(30):
        factories.slo_class(name=f"class-{number}", tenant=factories.tenant())
    with django_assert_max_num_queries(4):
        assert viewer.get("/classes/").status_code == 200


def test_gateways_are_told_of_a_saved_form(operator, monkeypatch, django_capture_on_commit_callbacks):
    told = []
    monkeypatch.setattr(live, "notify_config", told.append)
    row = factories.slo_class()
    with django_capture_on_commit_callbacks(execute=True):
        assert operator.post(f"/classes/{row.pk}/remove/", {"version": row.version + 1}).status_code == 412
    assert told == []
    with django_capture_on_commit_callbacks(execute=True):
        assert operator.post(f"/classes/{row.pk}/remove/", {"version": row.version}).status_code == 302
    assert len(told) == 1
