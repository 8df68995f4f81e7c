"""The waterfall: stages follow each other, tokens know when they were due, two requests share a scale."""

from __future__ import annotations

import pytest

from console.panels.timeline import axis, due_s, span_s, timeline, token_numbers
from controller.models import RequestRecord
from tests import factories


def row(**fields):
    record = factories.record(**fields)
    names = {field.name for field in RequestRecord._meta.concrete_fields}
    return RequestRecord(**{name: getattr(record, name) for name in names})


def tracks(record, whole=None):
    return {track.label: track for track in timeline(record, whole).tracks}


def test_stages_follow_each_other_without_gap():
    shown = tracks(row(queue_s=0.1, ttft_s=0.4, e2e_s=1.9, decisions=[]), whole=2.0)
    ends = [
        (bar.start, bar.start + bar.share) for bar in (shown[name].bars[0] for name in ("Queue", "Prefill", "Decode"))
    ]
    assert ends == [pytest.approx((0.0, 0.05)), pytest.approx((0.05, 0.2)), pytest.approx((0.2, 0.95))]
    assert shown["Prefill"].value_s == pytest.approx(0.3)
    assert "Decisions" not in shown


def test_each_kept_token_knows_its_number_and_whether_it_was_late():
    record = row(output_tokens=20, target_ttft_s=0.2, target_tpot_s=0.05, token_times=[0.2, 0.25, 0.5, 0.55, 0.9, 1.3])
    marks = [bar for bar in tracks(record)["Decode"].bars if bar.title.startswith("token ")]
    assert [(bar.title.split()[1], bar.kind) for bar in marks] == [
        ("1", "tick"), ("2", "tick"), ("4", "late"), ("8", "tick"), ("16", "tick"), ("20", "late"),
    ]  # fmt: skip
    assert due_s(record, 4) == pytest.approx(0.35)


@pytest.mark.parametrize(
    ("kept", "tokens", "numbers"), [(0, 5, []), (2, 1, [1, 1]), (4, 4, [1, 2, 4, 4]), (4, 7, [1, 2, 4, 7])]
)
def test_numbers_of_kept_tokens(kept, tokens, numbers):
    assert token_numbers(kept, tokens) == numbers


def test_a_request_never_sent_shows_its_wait_and_no_engine():
    shown = tracks(row(queue_s=None, ttft_s=None, tpot_s=None, e2e_s=2.0, attained=False, instance=""))
    assert shown["Queue"].note.startswith("never sent")
    assert any(bar.title == "first token due after 1 s" for bar in shown["Queue"].bars)
    assert not {"Prefill", "Decode", "Engine"} & set(shown)


def test_what_is_not_streamed_is_one_bar_in_the_engine():
    shown = tracks(row(streamed=False, ttft_s=None, token_times=[], judged_by="e2e", queue_s=0.5, e2e_s=1.5))
    assert shown["Engine"].value_s == pytest.approx(1.0)
    assert "Prefill" not in shown


def test_decisions_stand_where_they_were_taken():
    steps = [{"kind": "slo", "at": 0.0}, {"kind": "dispatch", "at": 0.5}, {"kind": "old record"}]
    bars = tracks(row(decisions=steps), whole=2.0)["Decisions"].bars
    assert [(bar.start, bar.title) for bar in bars] == [
        (0.0, "1 Targets set after 0.000 s"),
        (0.25, "2 Dispatched after 0.500 s"),
    ]


@pytest.mark.parametrize("whole", [0.004, 0.09, 1.0, 1.03, 7.3, 59.0, 61.0, 3600.0])
def test_the_axis_has_round_times_inside_the_picture(whole):
    marks = axis(whole)
    assert 2 <= len(marks) <= 7
    assert all(0 <= at <= 1 for at, _ in marks)


def test_what_was_measured_is_never_a_sliver_beside_loose_targets():
    loose = row(e2e_s=1.0, target_deadline_s=2.9)
    assert span_s(loose) > 2.9
    looser = row(e2e_s=1.0, ttft_s=0.4, target_ttft_s=0.5, target_deadline_s=90.0, token_times=[0.4, 1.0])
    assert span_s(looser) == pytest.approx(3.09)
    answer = tracks(looser)["End to end"]
    assert answer.note == "deadline after 90 s"
    assert all(bar.start <= 1 for track in timeline(looser).tracks for bar in track.bars)


def test_a_request_without_any_time_is_a_picture_all_the_same():
    assert span_s(row(e2e_s=None, ttft_s=None, queue_s=None, target_ttft_s=0.0, output_tokens=0)) == 1.0


def test_the_kv_caches_way_stands_between_prefill_and_decode():
    steps = [
        {"kind": "place", "at": 0.3, "figures": {}},
        {"kind": "transfer", "reason": "kv_landed", "at": 0.4, "figures": {"instance": "decode-1", "after_s": 0.1}},
    ]
    shown = tracks(row(queue_s=0.1, ttft_s=0.4, e2e_s=1.4, decisions=steps), whole=2.0)
    assert list(shown) == ["Decisions", "Queue", "Prefill", "KV transfer", "Decode", "End to end"]
    ends = [
        (bar.start, bar.start + bar.share) for bar in (shown[n].bars[0] for n in ("Prefill", "KV transfer", "Decode"))
    ]
    assert ends == [pytest.approx((0.05, 0.15)), pytest.approx((0.15, 0.2)), pytest.approx((0.2, 0.7))]
    assert (shown["KV transfer"].note, shown["KV transfer"].value_s) == ("to decode-1", pytest.approx(0.1))


def test_where_two_engines_share_a_request_each_stage_names_its_own_and_ends_when_it_ended():
    steps = [
        {"kind": "prefill", "at": 0.25, "figures": {"instance": "prefill-1"}},
        {"kind": "place", "at": 0.3, "figures": {}},
        {"kind": "transfer", "reason": "kv_landed", "at": 0.4, "figures": {"instance": "decode-1", "after_s": 0.1}},
    ]
    shared = {"instance": "decode-1", "prefill_instance": "prefill-1", "queue_s": 0.1, "e2e_s": 1.4}
    shown = tracks(row(ttft_s=0.4, decisions=steps, **shared), whole=2.0)
    assert shown["Prefill"].value_s == pytest.approx(0.15)
    assert shown["Prefill"].note.startswith("on prefill-1")
    assert shown["Decode"].note.startswith("20 tokens on decode-1")


def test_a_prefill_apart_is_seen_without_a_first_token():
    steps = [{"kind": "prefill", "at": 0.25, "figures": {"instance": "prefill-1"}}]
    shared = {"instance": "decode-1", "prefill_instance": "prefill-1", "queue_s": 0.1, "e2e_s": 1.4}
    shown = tracks(row(streamed=False, ttft_s=None, token_times=[], judged_by="e2e", decisions=steps, **shared))
    assert shown["Prefill"].value_s == pytest.approx(0.15)
    assert shown["Engine"].value_s == pytest.approx(1.15)
    assert shown["Engine"].note.startswith("KV transfer and decode on decode-1")


def test_every_attempt_to_move_the_kv_cache_is_a_bar_with_what_came_of_it():
    def attempt(number, at, **fields):
        figures = {"instance": f"decode-{number}", "source": "prefill-1", "after_s": 0.1, "attempt": number, **fields}
        reason = "kv_landed" if fields["outcome"] == "done" else "link_down"
        return {"kind": "transfer", "reason": reason, "at": at, "figures": figures}

    steps = [
        {"kind": "prefill", "reason": "prefilled", "at": 0.2, "figures": {}},
        attempt(1, 0.3, outcome="failed"),
        attempt(2, 0.45, outcome="done", bytes=12_000_000, seconds=0.05, undo="left_to_lease"),
    ]
    kv = tracks(row(decisions=steps, prefill_instance="prefill-1", ttft_s=0.5, e2e_s=1.0))["KV transfer"]
    assert [bar.kind for bar in kv.bars if bar.kind != "due"] == ["bad", "kv"]
    assert "the link between the two instances was down" in kv.bars[0].title
    assert "12 MB in 0.0500 s, 240 MB/s" in kv.bars[1].title
    assert kv.bars[1].title.endswith("did not confirm that it freed the KV cache, so its lease will free it")
    assert kv.note == "prefill-1 to decode-2, 2 attempts"


def test_a_transfer_that_was_held_says_so_and_its_holding_is_no_bandwidth():
    figures = {"after_s": 0.3, "outcome": "done", "attempt": 1, "bytes": 12_000_000, "seconds": 0.25, "held_s": 0.2}
    step = {"kind": "transfer", "reason": "kv_landed", "at": 0.45, "figures": figures}
    kv = tracks(row(decisions=[step], prefill_instance="prefill-1", ttft_s=0.5, e2e_s=1.0))["KV transfer"]
    title = kv.bars[0].title
    assert "12 MB in 0.2500 s, 240 MB/s, held for 0.200 s for more urgent transfers" in title


def test_what_is_counted_as_no_miss_has_no_bar_of_a_fault():
    unseen = {"ttft_s": None, "token_times": [], "attained": False, "ttft_met": False, "e2e_s": 0.5, "queue_s": 0.1}
    refused = {"outcome": "refused", "error_code": "engine_rejected"}
    for fields, kinds in ((refused, ["", "engine"]), ({"outcome": "cancelled"}, ["", "engine"]), ({}, ["bad", "bad"])):
        shown = tracks(row(**unseen, **fields))
        assert [shown[name].bars[0].kind for name in ("Engine", "End to end")] == kinds


def shared(prefilled, placed, moved, first, **fields):
    """A request on two instances that missed its TTFT; seconds after arrival."""
    steps = [
        {"kind": "prefill", "at": prefilled, "figures": {"instance": "prefill-1"}},
        {"kind": "transfer", "at": moved, "figures": {"instance": "decode-1", "after_s": moved - placed}},
    ]
    given = {"instance": "decode-1", "prefill_instance": "prefill-1", "queue_s": 0.1, "e2e_s": 9.0, "ttft_met": False}
    return row(decisions=steps, ttft_s=first, **given, **fields)


@pytest.mark.parametrize(
    ("times", "late"),
    [
        ((5.0, 5.0, 5.1, 5.2), "Prefill"),
        ((0.2, 5.0, 5.1, 5.2), "Wait for decode"),
        ((0.2, 0.3, 5.1, 5.2), "KV transfer"),
        ((5.0, 1.0, 5.1, 5.2), "Prefill"),  # the KV moved during the prefill
    ],
)
def test_only_the_stage_that_took_longest_is_blamed_for_a_late_first_token(times, late):
    shown = tracks(shared(*times), whole=10.0)
    stages = ("Queue", "Prefill", "Wait for decode", "KV transfer")
    assert [name for name in stages if name in shown and shown[name].bars[0].kind == "bad"] == [late]
    assert any(bar.title == "first token due after 1 s" for bar in shown["KV transfer"].bars)


def test_a_long_wait_in_the_queue_is_not_blamed_on_the_engine():
    shown = tracks(row(queue_s=2.6, ttft_s=3.0, e2e_s=4.0, ttft_met=False, decisions=[]))
    assert (shown["Queue"].bars[0].kind, shown["Prefill"].bars[0].kind) == ("bad", "")
