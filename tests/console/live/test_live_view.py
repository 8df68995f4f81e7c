"""What gateways publish, as rows, summary and fleet."""

from __future__ import annotations

import pytest

from console.live import live_view
from tests.console.live.live_data import fleet, instance, window


def row_of(**fields):
    return live_view.class_row(window(**fields))


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"attained": 98}, "ok"),
        ({"attained": 96}, "warn"),  # four of the five misses that 95 % of a hundred allow
        ({"attained": 95}, "warn"),
        ({"attained": 94}, "bad"),
        ({"attained": 100, "oldest_slack_s": -0.1, "queued": 1}, "warn"),
        ({"finished": 0, "attained": 0}, "idle"),
        ({"finished": 0, "attained": 0, "queued": 3, "oldest_slack_s": -1.0}, "warn"),
        ({"target": 1.0, "attained": 99}, "bad"),
        ({"target": 1.0, "attained": 100}, "ok"),
    ],
)
def test_a_class_is_judged_against_its_target(fields, status):
    assert row_of(**fields)["status"] == status


def test_a_row_says_why_in_words_only_when_something_missed():
    assert row_of(attained=90, miss_reason="slow_decode")["why"] == "decoding was slower than the TPOT target"
    assert row_of(attained=100, miss_reason="slow_decode")["why"] == ""


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"finished": 97, "sampled": 97, "first_tokens": 97, "in_one_piece": 0}, "all 97 requests"),
        ({"finished": 97, "sampled": 97, "first_tokens": 35, "in_one_piece": 0}, "35 of 97 requests; 62 not served"),
        (
            {"finished": 97, "sampled": 97, "first_tokens": 35, "in_one_piece": 22},
            "35 of 97 requests; 22 not streamed, 40 not served",
        ),
        (
            {"finished": 62, "sampled": 62, "first_tokens": 0, "in_one_piece": 62},
            "none of 62 requests: 62 not streamed",
        ),
        ({"finished": 9, "sampled": 9, "first_tokens": 0, "in_one_piece": 0}, "none of 9 requests: 9 not served"),
        (
            {"finished": 12_000, "sampled": 500, "first_tokens": 480, "in_one_piece": 0},
            "480 of the newest 500 requests; 20 not served",
        ),
        (
            {"finished": 12_000, "sampled": 500, "first_tokens": 500, "in_one_piece": 0},
            "all of the newest 500 requests",
        ),
        (
            {"finished": 0, "attained": 0, "sampled": 0, "first_tokens": 0, "in_one_piece": 0},
            "no requests in 60 s",
        ),
        ({}, "requests with a first token"),
    ],
)
def test_a_row_says_whose_first_tokens_its_times_are_of(fields, said):
    """The last is of a gateway that does not tell them yet."""
    assert row_of(**fields)["ttft_counted"] == said


def test_an_unknown_reason_reads_as_its_own_words():
    assert row_of(attained=90, miss_reason="moon_phase")["why"] == "moon phase"


def test_the_headline_names_the_worst_class_first_and_why():
    rows = [row_of(slo_class="a", attained=90), row_of(slo_class="b", attained=50, miss_reason="expired"), row_of()]
    said = live_view.summary(rows)
    assert (said["status"], said["headline"]) == ("bad", "2 of 3 classes are missing their SLO")
    assert [line["name"] for line in said["lines"]] == ["b · acme", "a · acme"]
    assert "50 % attained, target 95 % (50 of 100 missed)" in said["lines"][0]["text"]
    assert "timed out in the queue" in said["lines"][0]["text"]


def test_one_miss_among_several_is_singular():
    assert live_view.summary([row_of(attained=10), row_of()])["headline"] == "1 of 2 classes is missing its SLO"


def test_classes_without_traffic_do_not_count():
    said = live_view.summary([row_of(finished=0, attained=0)])
    assert (said["status"], said["lines"]) == ("idle", [])


def test_all_that_are_close_share_one_line():
    said = live_view.summary([row_of(slo_class=name, attained=96) for name in ("a", "b")])
    assert said["status"] == "warn"
    assert len(said["lines"]) == 1
    assert "a · acme (4 of 100 missed), b · acme" in said["lines"][0]["text"]


def test_the_newest_view_of_an_instance_wins_and_what_was_sent_adds_up():
    old = fleet(at=1.0, instances=[instance(state="up", sent_total=5)])
    new = fleet(at=2.0, gateway="gateway-2", instances=[instance(state="draining", sent_total=7)])
    (merged,) = live_view.merge_instances([new, old])
    assert (merged["state"], merged["sent_total"]) == ("draining", 12)


def test_totals_of_the_overview():
    totals = live_view.overview([fleet(), fleet(gateway="gateway-2", queued=4)])["totals"]
    assert (totals["finished"], totals["queued"], totals["arrival_rate"]) == (200, 4, 10.0)
    assert totals["attainment"] == pytest.approx(0.98)
    assert totals["goodput_tps"] == pytest.approx(200.0)


def test_an_overview_of_nothing_claims_nothing():
    shown = live_view.overview([])
    assert shown["totals"]["attainment"] is None
    assert shown["summary"]["headline"].startswith("No gateway is reporting")
    assert live_view.overview([fleet(classes=[])])["summary"]["headline"] == "No requests in the last minute"


@pytest.mark.parametrize(
    ("rows", "was"),
    [
        ([row_of(attained=10), row_of()], "1 of 2 classes was missing its SLO"),
        ([row_of(attained=10)], "1 of 1 class was missing its SLO"),
        ([row_of(slo_class="a", attained=1), row_of(attained=1)], "2 of 2 classes were missing their SLO"),
        ([row_of(attained=96)], "all SLOs were met, with little margin"),
        ([row_of()], "all SLOs were met"),
        ([], "there had been no requests for a minute"),
    ],
)
def test_a_headline_has_words_for_when_it_is_stale(rows, was):
    said = live_view.summary(rows)
    assert said["was"] == f"At the last update, {was}"
    assert " now" not in " ".join([said["was"], *(line["text"] for line in said["lines"])])


def test_data_is_stale_after_three_periods_and_never_before_three_seconds():
    assert live_view.stale_after_s([fleet(period_s=5.0)]) == 15.0
    assert live_view.stale_after_s([fleet(period_s=0.05)]) == 3.0


def test_the_fleet_is_counted_by_role_and_state():
    many = [instance(id=f"e{n}", role="decode" if n % 4 == 0 else "prefill") for n in range(8)]
    many.append(instance(id="gone", role="decode", state="down"))
    shown = live_view.overview([fleet(instances=many)])
    assert shown["roles"] == [
        {"role": "decode", "total": 3, "text": "2 up, 1 down"},
        {"role": "prefill", "total": 6, "text": "6 up"},
    ]
    assert [each["role"] for each in shown["instances"]] == ["decode"] * 3 + ["prefill"] * 6


def test_requests_at_once_of_a_tenant_add_up_over_gateways():
    fleets = [fleet(tenants={"acme": 3, "globex": 1}), fleet(gateway="gateway-2", tenants={"acme": 4})]
    assert live_view.overview(fleets)["tenants"] == {"acme": 7, "globex": 1}
    before = fleet()
    del before["tenants"]
    assert live_view.overview([before])["tenants"] == {}, "a gateway of before it was told"


def test_whether_engines_take_what_comes_is_what_the_best_placed_gateway_says():
    one = fleet(capacity={"a": "none", "b": "coming", "c": "none", "d": "moon", "e": "undecoded"})
    two = fleet(gateway="gateway-2", capacity={"a": "up", "b": "none", "c": "none", "e": "coming"})
    older = fleet(gateway="gateway-3")
    del older["capacity"]
    assert live_view.capacity([one, two, older]) == {"a": "up", "b": "coming", "c": "none", "e": "undecoded"}
    assert live_view.capacity([older]) == {}


def test_a_gateway_that_has_fallen_silent_is_not_fresh():
    told = [fleet(at=100.0), fleet(gateway="gateway-2", at=90.0)]
    assert [each["gateway"] for each in live_view.fresh(told, 101.0)] == ["gateway-1"]
