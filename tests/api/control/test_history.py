"""Decisions and requests: read-only, filtered, newest first, page by page."""

import datetime as dt

import pytest
from django.db import connection

from controller.models import Decision
from controller.services.decisions import decision_record
from controller.services.records.requests import records_write
from tests import factories
from tests.factories import ACTOR, NOON

pytestmark = [pytest.mark.db, pytest.mark.usefixtures("db")]

AT = dt.datetime(2026, 11, 20, 12, tzinfo=dt.UTC)


def decide(minute=0, **fields):
    defaults = {"kind": "scale_out", "subject_type": "instance", "subject": "engine-1", "reason": "load_above_upper"}
    return decision_record(actor=ACTOR, at=AT + dt.timedelta(minutes=minute), **{**defaults, **fields})


def pages(caller, path, **query):
    """All rows, page by page."""
    rows, cursor = [], {}
    while True:
        answer = caller.get(path, **query, **cursor)
        assert answer.status_code == 200, answer.data
        rows += answer.data["items"]
        if answer.data["next_cursor"] is None:
            return rows
        cursor = {"cursor": answer.data["next_cursor"]}


def test_decisions_come_newest_first_page_by_page(viewer):
    made = [decide(minute // 3) for minute in range(10)]  # three share each time
    expected = [row.pk for row in sorted(made, key=lambda row: (row.at, row.pk), reverse=True)]
    for limit in (1, 3, 4, 10, 50):
        assert [row["id"] for row in pages(viewer, "/decisions", limit=limit)] == expected


def test_a_page_does_not_shift_when_something_is_decided_meanwhile(viewer):
    made = [decide(minute) for minute in range(4)]
    first = viewer.get("/decisions", limit=2).data
    decide(99)
    second = viewer.get("/decisions", limit=2, cursor=first["next_cursor"]).data
    assert [row["id"] for row in first["items"] + second["items"]] == [row.pk for row in reversed(made)]


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({"kind": "scale_in"}, {"in"}),
        ({"actor": "olga"}, {"in", "out"}),
        ({"actor": "nobody"}, set()),
        ({"actor_type": "person"}, {"in", "out"}),
        ({"subject_type": "instance", "subject": "engine-2"}, {"in"}),
        ({"since": "2026-11-20T12:05:00Z"}, {"in"}),
        ({"until": "2026-11-20T13:05:00+01:00"}, {"out"}),
        ({"q": "BELOW"}, {"in"}),
        ({"q": "%"}, set()),
    ],
)
def test_decisions_are_filtered(viewer, query, found):
    rows = {"out": decide().pk, "in": decide(5, kind="scale_in", subject="engine-2", reason="load_below_lower").pk}
    assert {row["id"] for row in viewer.get("/decisions", **query).data["items"]} == {rows[name] for name in found}


def test_a_decision_shows_its_figures(viewer):
    row = decide(inputs={"load": 0.9}, outcome={"instances": 3}, rejected={"wait": "cooldown over"})
    shown = viewer.get(f"/decisions/{row.pk}").data
    assert (shown["inputs"], shown["outcome"]) == ({"load": 0.9}, {"instances": 3})
    assert shown["rejected"] == {"wait": "cooldown over"}


@pytest.mark.parametrize("method", ["post", "patch", "delete"])
def test_no_one_changes_the_audit(admin, method):
    row = decide()
    assert getattr(admin, method)(f"/decisions/{row.pk}").status_code == 405
    assert Decision.objects.filter(pk=row.pk).exists()


@pytest.mark.parametrize(
    "cursor",
    [
        "x",
        "!!!!",
        "W10",
        "WyIxIl0",
        "WyJhIiwiYiJd",
        "bnVsbA",
        "WzEsMl0",
        "IiI",
        "\x00",
        "é",
        "a" * 1001,
        "W1tbW1tbW1tb" * 80,
    ],
)
def test_a_cursor_of_somebody_elses_making_is_refused(viewer, cursor):
    answer = viewer.get("/decisions", cursor=cursor)
    assert answer.status_code == 400, answer.data
    assert "cursor" in answer.data["error"]["fields"]


def test_a_cursor_of_another_list_is_refused(viewer):
    for _ in range(2):
        factories.slo_class()
    cursor = viewer.get("/slo-classes", limit=1).data["next_cursor"]
    assert viewer.get("/decisions", cursor=cursor).data["error"]["code"] == "invalid_cursor"


@pytest.mark.parametrize(
    ("query", "field"), [({"limit": 0}, "limit"), ({"limit": 501}, "limit"), ({"offset": 5}, "offset")]
)
def test_wrong_pages_are_named(viewer, query, field):
    answer = viewer.get("/tenants", **query)
    assert field in answer.data["error"]["fields"]


def stored(**fields):
    row = factories.record(**fields)
    records_write(connection=connection.connection, records=[row])
    return row.id


def test_requests_come_newest_first_page_by_page(viewer):
    ids = [stored(arrived_at=NOON + serial // 2) for serial in range(7)]
    expected = sorted(ids, key=lambda each: (NOON + ids.index(each) // 2, each), reverse=True)
    for limit in (1, 2, 3, 7):
        assert [row["id"] for row in pages(viewer, "/requests", limit=limit)] == expected


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ({"tenant": "acme"}, {"good"}),
        ({"slo_class": ""}, {"late"}),
        ({"slo_class": "interactive"}, {"good"}),
        ({"model": "other"}, {"late"}),
        ({"instance": "engine-2"}, {"late"}),
        ({"outcome": "failed"}, {"late"}),
        ({"attained": "false"}, {"late"}),
        ({"attained": "true"}, {"good"}),
        ({"since": "2026-10-21T12:00:05Z"}, {"late"}),
        ({"until": "2026-10-21T12:00:05Z"}, {"good"}),
        ({"outcome": "ok", "attained": "false"}, set()),
    ],
)
def test_requests_are_filtered(viewer, query, found):
    late = {"tenant": "other", "slo_class": "", "model": "other", "instance": "engine-2", "outcome": "failed"}
    rows = {"good": stored(), "late": stored(arrived_at=NOON + 9, attained=False, **late)}
    assert {row["id"] for row in viewer.get("/requests", **query).data["items"]} == {rows[name] for name in found}


def test_one_request_shows_its_decisions_and_token_times(viewer):
    name = stored(length_bounds=[5, 90], refined_bounds=[50, 60, 80])
    shown = viewer.get(f"/requests/{name}").data
    assert (shown["length_bounds"], shown["refined_bounds"]) == ([5, 90], [50, 60, 80])
    assert viewer.get(f"/requests/{stored()}").data["refined_bounds"] is None
    assert shown["decisions"] == [{"kind": "dispatch", "reason": "fits"}]
    assert shown["token_times"][0] == 0.2
    assert "decisions" not in viewer.get("/requests", id=name).data["items"][0]


def test_one_with_a_thinking_deadline_shows_when_its_answer_began(viewer):
    name = stored(target_thinking_s=4.0, first_answer_s=3.5, reasoning_tokens=12)
    told = {"target_thinking_s": 4.0, "first_answer_s": 3.5, "reasoning_tokens": 12}
    for row in (viewer.get(f"/requests/{name}").data, viewer.get("/requests", id=name).data["items"][0]):
        assert {field: row[field] for field in told} == told


def test_refusals_recorded_as_one_say_how_many_they_are(viewer):
    group = {"stands_for": 9, "last_arrived_at": factories.NOON + 0.5, "all_prompt_tokens": 90}
    factories.records_stored(factories.record(id="req-nine", outcome="refused", attained=False, **group))
    (row,) = viewer.get("/requests", id="req-nine").data["items"]
    assert (row["stands_for"], row["all_prompt_tokens"]) == (9, 90)
    assert row["last_arrived_at"] == "2026-10-21T12:00:00.500000Z"
    assert viewer.get("/requests/req-nine").data["stands_for"] == 9


def test_a_key_sees_its_own_requests_alone(tenant, tenant_key, other_key):
    own, theirs = stored(tenant=tenant.name), stored(tenant="somebody-else")
    assert [row["id"] for row in tenant_key.get("/requests").data["items"]] == [own]
    assert tenant_key.get("/requests", tenant="somebody-else").data["items"] == []
    assert tenant_key.get(f"/requests/{own}").status_code == 200
    assert tenant_key.get(f"/requests/{theirs}").status_code == 404
    assert other_key.get(f"/requests/{own}").status_code == 404


@pytest.mark.parametrize(
    "query", [{"outcome": "fine"}, {"attained": "often"}, {"since": "yesterday"}, {"id": "x" * 65}]
)
def test_a_wrong_filter_is_named(viewer, query):
    answer = viewer.get("/requests", **query)
    assert answer.status_code == 400
    assert set(answer.data["error"]["fields"]) == set(query)
