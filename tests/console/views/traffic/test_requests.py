"""Requests and audit: search by keyset pages, one request, one decision."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from django.db import connection

from controller.services.decisions import decision_record
from controller.services.records.requests import records_write
from tests import factories


def stored(rows):
    connection.ensure_connection()
    records_write(connection=connection.connection, records=rows)


@pytest.fixture
def records(db):
    rows = [
        factories.record(id="req-slow", arrived_at=factories.NOON + 1, attained=False, ttft_met=False, ttft_s=3.0),
        factories.record(
            id="req-none", arrived_at=factories.NOON + 2, slo_class="", tenant="other", prefill_instance="p-1"
        ),
        factories.record(id="req-dead", arrived_at=factories.NOON + 3, outcome="refused", attained=False, ttft_s=None),
    ]
    stored(rows)
    return rows


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("", ["req-dead", "req-none", "req-slow"]),
        ("?attained=no", ["req-dead", "req-slow"]),
        ("?tenant=other", ["req-none"]),
        ("?slo_class=(none)", ["req-none"]),
        ("?outcome=refused", ["req-dead"]),
        ("?id=req-slow", ["req-slow"]),
        ("?model=demo&tenant=other", ["req-none"]),
        ("?model=nobody", []),
        ("?instance=engine-1&attained=no", ["req-dead", "req-slow"]),
        ("?instance=p-1", ["req-none"]),
        ("?until=2026-10-21T12:00:02", ["req-slow"]),
        ("?since=2026-10-21T12:00:03", ["req-dead"]),
        ("?attained=perhaps", []),
    ],
)
def test_search(viewer, records, query, found):
    html = viewer.get(f"/requests/{query}").content.decode()
    assert [part.split("/")[0] for part in html.split('href="/requests/')[1:] if part.startswith("req-")] == found


@pytest.mark.parametrize("kind", ["latency", "deadline", "compound", "best_effort"])
def test_a_search_by_type_finds_what_asked_for_it(viewer, db, kind):
    by_default = [{"kind": "slo", "reason": "defaults"}]
    stored([
        factories.record(id="req-latency"),
        factories.record(id="req-deadline", target_deadline_s=5.0),
        factories.record(id="req-compound", target_deadline_s=5.0, workflow="w", slo_class="", decisions=by_default),
        factories.record(id="req-best_effort", slo_class="", decisions=by_default),
    ])  # fmt: skip
    html = viewer.get(f"/requests/?type={kind}").content.decode()
    ids = [part.split("/")[0] for part in html.split('href="/requests/')[1:] if part.startswith("req-")]
    assert ids == [f"req-{kind}"]
    name = kind.replace("_", " ").capitalize()
    assert f"<dt>Type</dt><dd>{name}</dd>" in viewer.get(f"/requests/req-{kind}/").content.decode()


def test_pages_follow_by_key_and_lose_no_request(viewer, db):
    stored([factories.record(id=f"req-{n:03}", arrived_at=factories.NOON + n // 2) for n in range(120)])
    seen, path = [], "/requests/"
    while path:
        html = viewer.get(path, headers={"hx-request": "true"}).content.decode()
        seen += [part.split("/")[0] for part in html.split('<a href="/requests/')[1:]]
        path = html.split('hx-get="')[1].split('"')[0].replace("&amp;", "&") if "hx-get=" in html else ""
    assert seen == [f"req-{n:03}" for n in reversed(range(120))]


@pytest.mark.parametrize("after", ["x", "bm9uc2Vuc2U", "WyJhIl0", "%00", "W251bGwsIG51bGxd"])
def test_a_made_up_page_is_refused_in_words(viewer, records, after):
    answer = viewer.get(f"/requests/?after={after}")
    assert answer.status_code == 400


def test_one_request_against_its_deadlines(viewer, records):
    decision_record(
        actor=factories.ACTOR, kind="queue_cancel", subject_type="request", subject="req-slow", reason="person_asked",
        request_id="req-slow", at=datetime.fromtimestamp(factories.NOON + 1.5, tz=UTC),
    )  # fmt: skip
    html = viewer.get("/requests/req-slow/").content.decode()
    assert "first token after 3.000 s" in html
    assert "due after 1 s" in html
    assert html.count('data-format="full"') >= 3, "arrival and end have their date and zone"
    assert "Dispatched" in html
    assert "olga cancelled req-slow" in html


def test_refusals_recorded_as_one_say_how_many_they_are(viewer, db):
    group = {"stands_for": 137, "last_arrived_at": factories.NOON + 4.7, "all_prompt_tokens": 13_700}
    refused = {"outcome": "refused", "attained": False, "attempts": 0, "instance": "", "arrived_at": factories.NOON + 4}
    stored([factories.record(id="req-many", **refused, **group), factories.record(id="req-one", **refused)])
    html = viewer.get("/requests/").content.decode()
    assert html.count("137 requests</span>") == 1
    assert "1 requests" not in html
    page = " ".join(viewer.get("/requests/req-many/").content.decode().split())
    assert "stands for 137 requests of acme" in page
    assert "13,700 prompt tokens together" in page
    assert "stands for" not in viewer.get("/requests/req-one/").content.decode()
    assert "recorded as one" in viewer.get("/requests/req-gone/").content.decode()
    compared = viewer.get("/requests/compare/?id=req-many&id=req-one").content.decode()
    assert "Requests it stands for" in compared


def test_an_unknown_request_is_a_page_not_found(viewer, records):
    page = viewer.get("/requests/req-nobody/")
    assert page.status_code == 404
    assert "Records are kept for 30 days." in page.content.decode()


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("queue_full", "refused: the queue was full (HTTP 429)"),
        ("cancelled_by_operator", "refused: cancelled in the queue by an operator (HTTP 429)"),
    ],
)
def test_a_refusal_says_once_that_it_was_one(viewer, db, code, shown):
    stored([factories.record(id="req-refused", outcome="refused", error_code=code, http_status=429)])
    html = viewer.get("/requests/req-refused/").content.decode()
    assert shown in " ".join(html.split())


def test_the_audit_finds_by_text_and_shows_what_was_decided(viewer, db):
    decision = decision_record(
        actor=factories.ACTOR, kind="slo_class_updated", subject_type="slo_class", subject="chat",
        reason="person_updated", inputs={"before": {"ttft_s": 0.5}, "after": {"ttft_s": 0.4}},
        at=datetime(2026, 11, 21, tzinfo=UTC),
    )  # fmt: skip
    html = viewer.get("/audit/?q=chat").content.decode()
    assert "olga changed SLO class chat: TTFT target 400 ms (was 500 ms)" in html
    assert "No decisions match" in viewer.get("/audit/?q=nobody").content.decode()
    detail = viewer.get(f"/audit/{decision.pk}/").content.decode()
    assert "<ins>400 ms</ins>" in detail


@pytest.mark.parametrize("path", ["/requests/", "/audit/"])
def test_lists_cost_a_fixed_number_of_queries(viewer, records, path, django_assert_max_num_queries):
    with django_assert_max_num_queries(5):
        assert viewer.get(path).status_code == 200


def test_two_requests_on_one_scale_with_their_differences(viewer, records):
    html = viewer.get("/requests/compare/?id=req-slow&id=req-none").content.decode()
    assert html.count('class="timeline"') == 2
    figures = {row["label"]: row for row in viewer.get("/requests/compare/?id=req-slow&id=req-none").context["figures"]}
    assert figures["TTFT"]["delta"] == pytest.approx(-2.8)
    assert figures["Tenant"]["differs"]
    assert not figures["Model"]["differs"]


def test_a_miss_is_compared_with_the_newest_of_its_class_that_made_it(viewer, records):
    stored([factories.record(id=f"req-made-{n}", arrived_at=factories.NOON - n) for n in range(3)])
    answer = viewer.get("/requests/compare/?id=req-slow&with=attained")
    assert [each["row"].id for each in answer.context["pair"]] == ["req-slow", "req-made-0"]
    alone = viewer.get("/requests/compare/?id=req-none&with=attained")
    assert alone.status_code == 422
    assert b"No other request of this class" in alone.content


def test_the_first_miss_of_a_class_is_compared_with_the_next_that_made_it(viewer, records):
    stored([factories.record(id=f"req-made-{n}", arrived_at=factories.NOON + 10 + n) for n in range(3)])
    answer = viewer.get("/requests/compare/?id=req-slow&with=attained")
    assert [each["row"].id for each in answer.context["pair"]] == ["req-slow", "req-made-0"]


@pytest.mark.parametrize(
    ("query", "status"), [("", 200), ("?id=req-slow", 422), ("?id=a&id=b&id=c", 422), ("?id=req-slow&id=nobody", 404)]
)
def test_a_comparison_needs_two_known_requests(viewer, records, query, status):
    assert viewer.get(f"/requests/compare/{query}").status_code == status


def test_rejected_alternatives_are_listed_and_escaped(viewer, db):
    step = {
        "kind": "dispatch", "reason": "fits_budget", "subject": "req-x", "at": 0.01, "figures": {"slack_s": 0.9},
        "rejected": {"engine-2": "<b>3 outstanding</b>"},
    }  # fmt: skip
    stored([factories.record(id="req-x", decisions=[step])])
    html = viewer.get("/requests/req-x/").content.decode()
    assert "engine-2" in html
    assert "&lt;b&gt;3 outstanding" in html
    assert "<b>3" not in html


def test_one_that_is_not_on_record_may_still_wait(viewer):
    answer = viewer.get("/requests/req-nobody/")
    assert answer.status_code == 404
    assert 'href="/queue/?text=req-nobody"' in answer.content.decode()


def test_a_command_on_many_is_found_from_each_of_them(viewer, records):
    """By its id where the record has it, by the command's where it does not; not what was said of others, or later."""
    arrived = datetime.fromtimestamp(factories.NOON, tz=UTC)
    cancelled = {"kind": "cancel", "reason": "cancelled_by_operator", "at": 1.0, "figures": {"command": "c-7"}}
    stored([factories.record(id="req-many", arrived_at=factories.NOON, e2e_s=1.0, decisions=[cancelled])])
    for seconds, kind, inputs, outcome in (
        (0.5, "queue_pause", {"request_ids": ["req-other", "req-many"]}, {}),
        (30, "queue_cancel", {"request_ids": ["req-other"], "matched": 5000}, {"commands": ["c-6", "c-7"]}),
        (0.5, "queue_resume", {"request_ids": ["req-other"]}, {"commands": ["c-8"]}),
        (3600, "queue_reprioritise", {"request_ids": ["req-many"]}, {}),
    ):
        decision_record(
            actor=factories.ACTOR, kind=kind, subject_type="request", subject="5000 requests", reason="person_asked",
            inputs=inputs, outcome=outcome, at=arrived + timedelta(seconds=seconds),
        )  # fmt: skip
    touched = viewer.get("/requests/req-many/").context["whole"]["audited"]
    assert [decision.kind for decision, _ in touched] == ["queue_cancel", "queue_pause"]
    assert touched[0][1] == "olga cancelled 5000 requests"


@pytest.fixture
def rejected(records):
    refused = {"outcome": "refused", "error_code": "engine_rejected", "http_status": 400, "attained": False}
    stored([
        factories.record(id="req-asks", arrived_at=factories.NOON + 4, ttft_met=False, ttft_s=None, **refused),
        factories.record(id="req-left", arrived_at=factories.NOON + 5, outcome="cancelled", attained=False),
    ])  # fmt: skip


def test_what_an_engine_refused_is_no_miss(viewer, rejected):
    """As the roll-up counts: apart, like one that its client gave up."""
    html = viewer.get("/requests/?id=req-asks").content.decode()
    assert '<span class="badge ">refused, not counted</span><span class="sub">by the engine, HTTP 400</span>' in html
    assert "missed</span>" not in html
    page = viewer.get("/requests/req-asks/").content.decode()
    assert "Why it was refused" in page
    assert "not count as a miss of its class" in page
    assert "Why it missed" not in page
    assert 'class="badge bad"' not in page
    pair = viewer.get("/requests/compare/?id=req-asks&id=req-dead").content.decode()
    assert [pair.count(word) for word in ("refused, not counted", ">missed<")] == [1, 1]


def test_the_misses_are_those_that_are_counted(viewer, rejected):
    html = viewer.get("/requests/?attained=no").content.decode()
    assert [name in html for name in ("req-slow", "req-dead", "req-asks", "req-left")] == [True, True, False, False]


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("client_closed", "cancelled by its client"),
        ("client_stalled", "cancelled: its client stopped reading"),
        ("response_cancelled", "cancelled: its client cancelled the response"),
        ("response_deleted", "cancelled: the response was deleted"),
        ("response_lost", "cancelled: its lease had ended, so that the response counts as failed"),
    ],
)
def test_a_cancelled_request_says_how(viewer, db, code, told):
    stored([factories.record(id="req-gone", outcome="cancelled", error_code=code, attained=False)])
    assert f">{told}</span>" in viewer.get("/requests/req-gone/").content.decode()


def thinking(**fields):
    told = {"target_thinking_s": 4.0, "first_answer_s": 5.5, "reasoning_tokens": 12, "ttft_met": False}
    return factories.record(**{"id": "req-thinks", "target_ttft_s": 4.0, "attained": False, **told, **fields})


def test_a_request_with_a_thinking_deadline_shows_when_its_answer_began(viewer, db):
    stored([thinking()])
    html = " ".join(viewer.get("/requests/req-thinks/").content.decode().split())
    assert "First token of the answer, thinking deadline" in html
    assert "12 tokens of reasoning before it" in html
    assert "The first token of its answer came after 5.50 s; its thinking deadline was 4.00 s." in html


def test_reasoning_without_an_answer_is_said(viewer, db):
    stored([thinking(first_answer_s=None)])
    assert "No token of its answer came, only reasoning" in viewer.get("/requests/req-thinks/").content.decode()


def test_other_requests_show_no_thinking_deadline(viewer, records):
    assert "thinking deadline" not in viewer.get("/requests/req-slow/").content.decode()


def test_the_page_of_a_request_shows_how_its_transfer_was_held(viewer, db):
    figures = {
        "instance": "d", "source": "p", "attempt": 1, "outcome": "done", "state": "released", "after_s": 8.0,
        "seconds": 7.5, "measured_by": "engine", "bytes": 2_000_000, "flow": "scheduled", "held_s": 6.5,
        "flow_level": 2, "promotions": 1,
    }  # fmt: skip
    step = {"kind": "transfer", "reason": "kv_landed", "subject": "req-held", "at": 9.0, "figures": figures}
    stored([factories.record(id="req-held", prefill_instance="p", instance="d", decisions=[step])])
    html = viewer.get("/requests/req-held/").content.decode()
    for shown in ("held for more urgent transfers", "level on the shared link", "promotions on the shared link"):
        assert shown in html
    assert "held for 6.500 s for more urgent transfers" in html, "on the timeline"


def test_the_page_and_the_api_of_a_request_show_how_its_prefix_was_held(viewer, db):
    figures = {
        "instance": "q", "source": "p", "outcome": "done", "seconds": 3.5, "bytes": 2_000_000, "layers": 4,
        "tokens": 304, "cached": 0, "flow": "silent", "held_s": 3.25, "flow_level": 2, "promotions": 0,
    }  # fmt: skip
    step = {"kind": "prefix", "reason": "prefix_copied", "subject": "req-reuse", "at": 4.0, "figures": figures}
    stored([factories.record(id="req-reuse", instance="q", decisions=[step])])
    html = viewer.get("/requests/req-reuse/").content.decode()
    for shown in ("Prefix copied from another instance", "held for more urgent transfers", "3.25 s", "silent"):
        assert shown in html
    row = viewer.get("/api/v1/requests/req-reuse").json()
    assert row["decisions"][0]["figures"]["held_s"] == 3.25
