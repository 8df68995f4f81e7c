"""Decisions as sentences, whatever their record holds."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from controller.dispatch.policy_sets import ordering_options
from controller.models import Decision
from controller.wording.changes import changes
from controller.wording.request_steps import step
from controller.wording.sentences import figures_line, message_of, say
from controller.wording.values import ORDERING_WORDS

SCALER = {"load": 1.131, "upper": 0.8, "lower": 0.3, "ready": 2, "low_for_s": 15.2, "instance": "engine-2", "tick": 9}


@pytest.mark.parametrize(
    ("kind", "reason", "text"),
    [
        ("scale_out", "load_above_upper", "scaler scaled out demo: load 113 % is above 80 % with 2 ready"),
        (
            "scale_in",
            "load_below_lower",
            "scaler scaled in demo: load 113 % was below 30 % for 15 s, so it removed engine-2",
        ),
        ("scale_out", "moon_phase", "scaler scaled out demo: moon phase"),
        ("warm_up", "", "scaler warm up demo"),
    ],
)
def test_scaling_reads_with_its_figures(kind, reason, text):
    assert say(kind, "scaler", "scaling_policy", "demo", reason, SCALER) == text


def test_a_figure_that_was_renamed_since_reads_as_before():
    stored = Decision(pk=1, at=datetime.now(UTC), actor="reconciler", kind="instance_ready", reason="healthy")
    stored.subject, stored.inputs, stored.outcome = "engine-2", {"since_wish_s": 8.0}, {}
    message = message_of(stored)
    assert message["sentence"] == "engine-2 is ready, 8.0 s after it was requested"
    assert message["figures_text"] == ""


def test_a_large_load_has_its_thousands_set_apart():
    said = say("scale_hold", "scaler", "scaling_policy", "demo", "settling", {**SCALER, "load": 129.21})
    assert "load 12,921 %, but" in said


def test_every_ordering_says_what_it_considers_first():
    assert set(ORDERING_WORDS) == set(ordering_options())


def test_a_record_without_its_figures_still_reads():
    said = say("scale_out", "scaler", "scaling_policy", "demo", "load_above_upper", {"load": None})
    assert said == "scaler scaled out demo: load is above the upper threshold"


def test_a_load_without_bound_is_said_in_words():
    """Requests come and none is finished: the ratio is infinite, and the record has no number for it."""
    endless = {**SCALER, "load": None, "max_instances": 1}
    said = say("scale_hold", "scaler", "scaling_policy", "demo", "at_max", endless)
    assert said == (
        "scaler cannot scale out demo: unbounded load (requests arrive and none finish), but the maximum of 1 is "
        "reached"
    )


def test_a_scale_out_from_none_says_that_no_instance_was_up():
    none = {**SCALER, "load": None, "ready": 0}
    said = say("scale_out", "scaler", "scaling_policy", "demo", "load_above_upper", none)
    assert said == (
        "scaler scaled out demo: unbounded load (requests arrive and no instance is up) is above 80 % with 0 ready"
    )


def test_why_an_instance_is_kept_is_also_true_of_the_last_one():
    """Of a fleet that may go down to none: there is no rest whose load could rise."""
    said = say("scale_hold", "scaler", "scaling_policy", "demo", "rest_would_exceed_upper", {**SCALER, "load": 0.02})
    assert said == (
        "scaler keeps every instance of demo at load 2 %: with one fewer, the arriving requests would exceed a load "
        "of 80 %"
    )
    lax = {**SCALER, "load": 0.55, "upper": 2.0}
    said = say("scale_hold", "scaler", "scaling_policy", "demo", "rest_would_exceed_upper", lax)
    assert said.endswith("would exceed a load of 100 %")


def test_a_change_tells_what_changed():
    known = {"before": {"ttft_s": 0.5, "version": 1}, "after": {"ttft_s": 0.4, "version": 2}, "version": 2}
    said = say("slo_class_updated", "olga", "slo_class", "chat", "person_updated", known)
    assert said == "olga changed SLO class chat: TTFT target 400 ms (was 500 ms)"
    assert changes({"before": "x"}) == []
    names = {"default_class": {"6": "chat", "7": "batch"}}
    assert changes({"before": {"default_class": 6}, "after": {"default_class": 7}, "names": names}) == [
        "default class batch (was chat)"
    ]
    assert changes({"before": {"default_class": 6}, "after": {"default_class": None}, "names": "old"}) == [
        "default class none (was 6)"
    ]


LEVEL = {"ttft_s": 0.7, "tpot_s": 0.5, "ttft_min_s": 0.6, "ttft_max_s": 0.9, "tpot_min_s": 0.4, "tpot_max_s": 0.6}


def remapped(before, after):
    """What is said of a mapping whose levels were changed."""
    known = {"before": {"levels": before}, "after": {"levels": after}}
    said = say("priority_mapping_updated", "admin", "priority_mapping", "priorities of all tenants", "", known)
    assert said.startswith("admin changed the priority mapping of all tenants: ")
    return said.removeprefix("admin changed the priority mapping of all tenants: ")


def test_a_changed_mapping_names_the_level_that_changed_and_what_of_it():
    slower = {**LEVEL, "ttft_s": 0.8, "tpot_max_s": 0.7}
    assert remapped([LEVEL, LEVEL, LEVEL], [LEVEL, slower, LEVEL]) == (
        "level 1 TTFT target 800 ms (was 700 ms), maximum TPOT 700 ms (was 600 ms)"
    )
    assert remapped([LEVEL, LEVEL], [{**LEVEL, "ttft_s": 0.65}, {**LEVEL, "tpot_s": 0.55}]) == (
        "level 0 TTFT target 650 ms (was 700 ms); level 1 TPOT target 550 ms (was 500 ms)"
    )


def test_a_level_that_came_or_went_is_named():
    assert remapped([LEVEL], [LEVEL, LEVEL]) == "level 1 added"
    assert remapped([LEVEL, LEVEL, LEVEL], [{**LEVEL, "ttft_s": 0.8}]) == (
        "level 0 TTFT target 800 ms (was 700 ms); level 1 removed; level 2 removed"
    )


def test_a_records_levels_of_another_shape_still_read():
    assert changes({"before": {"levels": []}, "after": {"levels": [LEVEL]}}) == ["level 0 added"]
    assert changes({"before": {"levels": None}, "after": {"levels": "none"}}) == ["level changed"]
    assert changes({"before": {"levels": [{"ttft_s": 1.0}]}, "after": {"levels": [{"tpot_s": 0.5}]}}) == [
        "level 0 TTFT target none (was 1 s), TPOT target 500 ms (was none)"
    ]


def test_values_cut_before_they_differ_are_not_shown_as_the_same():
    same = "one beginning that is longer than a line shows, "
    assert changes({"before": {"title": f"{same}old"}, "after": {"title": f"{same}new"}}) == ["title changed"]


def test_refusals_are_counted_by_code():
    known = {"requests": 5, "seconds": 10.0, "by_code": {"no_capacity": 3, "rate_limit_exceeded": 2}}
    said = say("refusals", "gateway-1", "gateway", "gateway-1", "no_capacity", known)
    assert said == (
        "gateway-1 did not serve 5 requests in 10 s: no instance was up (3); the tenant's quota was exceeded (2)"
    )


def test_one_refusal_is_one_request():
    known = {"requests": 1, "seconds": 10.1, "by_code": {"slo_infeasible": 1}}
    said = say("refusals", "gateway-1", "gateway", "gateway-1", "slo_infeasible", known)
    assert said == "gateway-1 did not serve 1 request in 10.1 s: no instance could meet its targets"
    told = Decision(kind="refusals", actor="gateway-1", subject="gateway-1", reason="slo_infeasible", inputs=known)
    told.at = datetime(2026, 11, 22, tzinfo=UTC)
    assert message_of(told)["figures_text"] == "", "its sentence has said it all"


@pytest.mark.parametrize(
    ("kind", "inputs", "said"),
    [
        ("instance_sleep_ordered", {"level": 2, "action": 7}, "requested sleep level 2 for instance d2"),
        ("instance_sleep_ordered", {}, "requested sleep for instance d2"),
        ("instance_wake_ordered", {"level": 1, "action": 7}, "requested a wake-up for instance d2"),
        ("instance_load_ordered", {"sources": "chosen at the call"}, "requested a weight load for instance d2"),
        ("instance_role_set", {"before": {"role": "collocated"}, "after": {"role": "decode"}},
         "changed instance d2: role decode (was collocated)"),
        ("instance_role_switch_ordered", {"before": {"role": "prefill"}, "after": {"role": "decode"}},
         "requested a role change for instance d2: role decode (was prefill)"),
    ],
)  # fmt: skip
@pytest.mark.parametrize(("actor", "by"), [("olga", "person"), ("scaler", "job")])
def test_orders_to_an_instance_are_sentences(kind, inputs, said, actor, by):
    reason = f"{by}_{kind.removeprefix('instance_')}"
    assert say(kind, actor, "instance", "d2", reason, inputs) == f"{actor} {said}"


def test_an_orders_line_does_not_say_its_level_twice():
    row = Decision(kind="instance_sleep_ordered", actor="olga", subject="d2", reason="person_sleep_ordered")
    row.inputs, row.at = {"level": 2}, datetime(2026, 11, 22, tzinfo=UTC)
    assert message_of(row)["figures_text"] == ""


def test_a_line_shows_the_telling_figures_first_and_few_of_them():
    assert figures_line(SCALER) == "load 113.1 % · ready 2 instances"
    assert figures_line({"id": 3, "was": "starting", "deep": {"a": 1}, "error": ""}) == "was: starting"


def test_a_live_line_shows_what_its_sentence_does_not_say():
    inputs = {**SCALER, "utilisation": 0.875, "arrival_rate": 6.4}
    at = datetime(2026, 11, 22, tzinfo=UTC)
    row = Decision(kind="scale_out", actor="scaler", subject="demo", reason="load_above_upper", inputs=inputs, at=at)
    item = message_of(row)
    assert item["sentence"] == "scaler scaled out demo: load 113 % is above 80 % with 2 ready"
    assert item["figures_text"] == "mean instance utilisation 87.5 % · arrival rate 6.4 requests/s"


@pytest.mark.parametrize(
    ("kind", "reason", "what", "why"),
    [
        ("dispatch", "fits_budget", "Dispatched", "fits within the instance's token budget"),
        ("slo", "class", "Targets set", "from its SLO class"),
        ("expire", "waiting_time", "Timed out", "timed out in the queue"),
        ("transfer", "kv_landed", "KV cache transferred", "its KV cache arrived at the decode instance"),
        (
            "prefix",
            "prefix_copied",
            "Prefix copied from another instance",
            "the other instance had computed the beginning of its prompt",
        ),
        ("warm_up", "moon_phase", "warm up", "moon phase"),
    ],
)
def test_a_requests_own_steps_read_in_words(kind, reason, what, why):
    said = step({"kind": kind, "reason": reason, "figures": {"slack_s": 0.2}})
    assert (said["what"], said["why"], said["figures"]) == (what, why, {"slack_s": 0.2})


def test_a_kv_cache_that_did_not_arrive_is_not_said_to_have_moved():
    said = step({"kind": "transfer", "reason": "no_room", "figures": {"outcome": "failed"}})
    assert (said["what"], said["why"]) == (
        "KV transfer failed",
        "the decode instance had no room for its KV cache",
    )


def test_a_prefix_that_was_lost_on_the_way_is_not_said_to_have_been_copied():
    said = step({"kind": "prefix", "reason": "timeout", "figures": {"outcome": "failed"}})
    assert (said["what"], said["why"]) == ("Prefix lost on the way", "it timed out")


def test_a_link_that_is_lost_and_found_reads_as_both_ends():
    known = {"source": "prefill-1", "target": "decode-1", "error": "reset", "down_s": 12.3}
    subject = "prefill-1 to decode-1"
    said = say("link_down", "links", "link", subject, "no_answer", known)
    assert said == "the link from prefill-1 to decode-1 is down, so KV transfers use other links"
    said = say("link_up", "links", "link", subject, "answers_again", known)
    assert said == "the link from prefill-1 to decode-1 is up again after 12 s"
