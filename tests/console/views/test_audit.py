"""Audit: filters, keyset pages, export with the same filters, and what a change changed."""

from __future__ import annotations

import asyncio
import csv
import gc
import io
import json
from datetime import UTC, datetime, timedelta

import pytest
from django.urls import reverse

from controller.services.actors import Actor
from controller.services.decisions import decision_record
from controller.wording.changes import changed_fields
from tests import factories

NOON = datetime(2026, 10, 21, 12, tzinfo=UTC)


def decide(kind="slo_class_updated", actor="olga", at=NOON, subject="chat", **fields):
    person = Actor.person(actor)
    given = {"subject_type": "slo_class", "reason": "person_updated", **fields}
    return decision_record(actor=person, kind=kind, subject=subject, at=at, **given)


def body(answer):
    async def whole():
        return b"".join([part async for part in answer.streaming_content])

    return asyncio.run(whole()).decode()


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({"actor": "olga"}, {"chat", "batch"}),
        ({"kind": "slo_class_removed"}, {"batch"}),
        ({"subject": "chat"}, {"chat"}),
        ({"subject_type": "tenant"}, {"acme"}),
        ({"actor_type": "job"}, set()),
        ({"since": "2026-10-21T12:30"}, {"acme"}),
        ({"until": "2026-10-21T12:00"}, {"batch"}),
        ({"q": "cha"}, {"chat"}),
    ],
)
def test_filters_narrow(viewer, query, found):
    decide()
    decide("slo_class_removed", subject="batch", at=NOON - timedelta(hours=1))
    decide("tenant_updated", "otto", NOON + timedelta(hours=1), "acme", subject_type="tenant")
    rows = viewer.get(reverse("audit"), query).context["rows"]
    assert {decision.subject for decision, _ in rows} == found


def test_a_wrong_time_finds_nothing_and_says_why(viewer):
    decide()
    answer = viewer.get(reverse("audit"), {"since": "yesterday"})
    assert answer.context["rows"] == []
    assert "Enter a valid date/time" in answer.content.decode()
    assert viewer.get(reverse("audit-export"), {"since": "yesterday"}).status_code == 400


def test_pages_follow_each_other_without_gap_or_repeat(viewer):
    expected = [decide(subject=f"class-{serial}", at=NOON + timedelta(seconds=serial // 3)) for serial in range(120)]
    url, seen = reverse("audit"), []
    while url:
        page = viewer.get(url)
        seen += [decision.pk for decision, _ in page.context["rows"]]
        url = page.context["next_url"]
    assert seen == [decision.pk for decision in sorted(expected, key=lambda row: (row.at, row.pk), reverse=True)]
    assert viewer.get(reverse("audit"), {"after": "nonsense"}).status_code == 400


@pytest.mark.django_db(transaction=True)
def test_the_export_holds_all_that_the_filters_find(viewer, monkeypatch):
    monkeypatch.setattr("controller.selectors.exports.CHUNK", 7)
    for serial in range(20):
        decide(subject=f"class-{serial}", at=NOON + timedelta(seconds=serial // 3), inputs={"serial": serial})
    decide(actor="otto", subject="=1+1")
    answer = viewer.get(reverse("audit-export"), {"actor": "olga", "format": "csv"})
    assert "attachment" in answer["content-disposition"]
    rows = list(csv.DictReader(io.StringIO(body(answer))))
    assert len({row["id"] for row in rows}) == len(rows) == 20
    assert json.loads(rows[0]["inputs"])["serial"] in (18, 19)
    as_json = json.loads(body(viewer.get(reverse("audit-export"), {"actor": "olga", "format": "json"})))
    assert [str(row["id"]) for row in as_json] == [row["id"] for row in rows]
    assert as_json[0]["at"].startswith("2026-10-21T12:00:06")
    formula = list(csv.DictReader(io.StringIO(body(viewer.get(reverse("audit-export"), {"actor": "otto"})))))
    assert formula[0]["subject"] == "'=1+1"
    assert json.loads(body(viewer.get(reverse("audit-export"), {"actor": "nobody", "format": "json"}))) == []
    assert viewer.get(reverse("audit-export"), {"format": "xml"}).status_code == 400


def test_a_person_downloads_two_exports_at_once(viewer, operator):
    loop = asyncio.new_event_loop()
    streams = [aiter(viewer.get(reverse("audit-export")).streaming_content) for _ in range(2)]
    for stream in streams:
        assert loop.run_until_complete(anext(stream)).startswith(b"id,at")
    refused = viewer.get(reverse("audit-export"))
    assert (refused.status_code, "Wait until one of them has ended." in refused.content.decode()) == (429, True)
    assert operator.get(reverse("audit-export")).status_code == 200  # another person's are counted apart
    loop.run_until_complete(streams.pop().aclose())  # its client left
    gc.collect()  # the test client's responses refer to themselves
    loop.run_until_complete(asyncio.sleep(0.01))
    assert viewer.get(reverse("audit-export")).status_code == 200
    loop.run_until_complete(streams.pop().aclose())
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()


def test_the_page_of_a_decision_shows_what_changed(viewer):
    inputs = {"before": {"ttft_s": 0.5, "title": "<i>old</i>"}, "after": {"ttft_s": 0.4, "title": "<i>old</i>"}}
    row = decide(inputs=inputs, outcome={"id": 3, "version": 2}, rejected={"other": 1.5})
    html = viewer.get(reverse("decision", args=[row.pk])).content.decode()
    assert "Changes" in html
    assert "<del>500 ms</del>" in html
    assert "<ins>400 ms</ins>" in html
    assert "<i>old" not in html
    assert "1.5" in html


def test_fields_that_differ_come_first():
    rows = changed_fields({"before": {"a": 1, "b": None, "gone": 2}, "after": {"a": 1, "b": "x", "new": [1]}})
    kinds = {row.name: (row.kind, row.before, row.after) for row in rows}
    assert kinds["b"] == ("changed", "none", "x")
    assert kinds["new"] == ("added", "", "1")
    assert kinds["gone"] == ("removed", "2", "")
    assert rows[-1].name == "a"
    assert changed_fields({"load": 1.0}) == []


@pytest.mark.parametrize("page", ["class-edit", "mapping-edit", "scaling-edit"])
def test_a_way_back_that_names_no_change_is_the_form_as_it_is(operator, page):
    row = {"class-edit": factories.slo_class, "mapping-edit": factories.priority_mapping}.get(
        page, factories.scaling_policy
    )()
    for name in ("\u00b2", "9" * 40, "-1", "x", "0"):
        assert operator.get(reverse(page, args=[row.pk]), {"restore": name}).status_code == 200


def test_limits_of_another_scaling_policy_are_no_way_back(operator):
    mine, other = factories.scaling_policy(max_instances=7), factories.scaling_policy()
    before = {"before": {"max_instances": 77}, "after": {}}
    theirs = decide("scaling_policy_updated", subject_type="scaling_policy", outcome={"id": other.pk}, inputs=before)
    page = operator.get(reverse("scaling-edit", args=[mine.pk]), {"restore": theirs.pk}).content.decode()
    assert ('value="77"' in page, 'value="7"' in page) == (False, True)


def test_a_change_leads_to_the_form_that_takes_it_back(operator, viewer):
    row, mapping, policy = factories.slo_class(name="chat"), factories.priority_mapping(), factories.scaling_policy()
    for kind, page, pk in (
        ("slo_class", "class-edit", row.pk),
        ("priority_mapping", "mapping-edit", mapping.pk),
        ("scaling_policy", "scaling-edit", policy.pk),
    ):
        decision = decide(f"{kind}_updated", subject_type=kind, outcome={"id": pk}, inputs={"before": {}, "after": {}})
        address = f"{reverse(page, args=[pk])}?restore={decision.pk}"
        assert address in operator.get(reverse("decision", args=[decision.pk])).content.decode()
        assert address not in viewer.get(reverse("decision", args=[decision.pk])).content.decode()
    removed = decide("slo_class_removed", outcome={"id": 10_000})
    assert f"{reverse('class-new')}?restore={removed.pk}" in operator.get(f"/audit/{removed.pk}/").content.decode()


@pytest.mark.parametrize("kind", ["slo_class_updated", "slo_class_created", "queue_cancel"])
def test_what_cannot_be_taken_back_offers_nothing(operator, kind):
    decision = decide(kind, outcome={"id": 10_000})
    assert "?restore=" not in operator.get(reverse("decision", args=[decision.pk])).content.decode()


def test_the_page_names_what_it_lists_so_that_others_are_counted(viewer):
    older = decide()
    newest = decide(subject="batch", at=NOON + timedelta(hours=1))
    assert f'data-newer data-listed="{newest.pk} {older.pk} "' in viewer.get(reverse("audit")).content.decode()
    assert "data-newer" not in viewer.get(reverse("audit"), {"subject": "chat"}).content.decode()


def scaled_in(name="engine-9", at=NOON):
    """The six records of one scale-in, as they are stored."""
    scaler, reconciler = Actor.job("scaler"), Actor.job("reconciler")
    figures = {"load": 0.1, "lower": 0.3, "low_for_s": 15.0, "instance": name}
    common = {"subject_type": "instance", "subject": name}
    decision_record(
        actor=scaler, kind="scale_in", subject_type="scaling_policy", subject="demo/collocated",
        reason="load_below_lower", inputs=figures, at=at,
    )  # fmt: skip
    for number, (actor, kind) in enumerate(
        [
            (scaler, "instance_drained"), (reconciler, "instance_draining"), (reconciler, "instance_drained"),
            (reconciler, "instance_stopped"), (reconciler, "instance_gone"),
        ], 1,
    ):  # fmt: skip
        decision_record(actor=actor, kind=kind, reason="healthy", at=at + timedelta(seconds=number), **common)


def test_one_scale_in_is_one_entry_that_opens(viewer):
    scaled_in()
    decide("instance_stopped", subject="engine-1", subject_type="instance", at=NOON + timedelta(seconds=2))
    answer = viewer.get(reverse("audit"))
    entries = answer.context["entries"]
    assert [(each.decision.kind, len(each.followed)) for each in entries] == [("instance_stopped", 0), ("scale_in", 5)]
    times = [decision.at for decision, _ in entries[1].followed]
    assert times == sorted(times)
    html = answer.content.decode()
    assert "5 records followed from it" in html
    assert len(answer.context["rows"]) == 7, "each is still known to the page"


def test_what_a_person_does_to_the_instance_stands_alone(viewer):
    scaled_in()
    later = NOON + timedelta(minutes=1)
    decide("instance_removed", subject="engine-9", subject_type="instance", at=later)
    entries = viewer.get(reverse("audit")).context["entries"]
    assert [each.decision.kind for each in entries] == ["instance_removed", "scale_in"]
