"""Judging (H12, C1) and sliding windows."""

import pytest

from controller.core.types import Outcome, RequestRecord, Targets
from controller.slo.attainment import AttainmentWindows, deadline_goodput, judge, quantile, token_goodput

TARGETS = Targets(0.7, 0.5)


def judged(ttft, tpot, tokens=2, **more):
    times = [ttft] if tokens == 1 else [ttft + i * tpot for i in range(tokens)]
    return judge(
        more.pop("targets", TARGETS),
        more.pop("outcome", Outcome.OK),
        ttft_s=ttft,
        tpot_s=None if tokens == 1 else tpot,
        e2e_s=times[-1],
        prompt_tokens=10,
        output_tokens=tokens,
        token_times=times,
    )


def test_h12_attainment_is_half():
    cases = [judged(0.6, 0.4), judged(0.8, 0.1), judged(0.5, 0.0, tokens=1), judged(0.6, 0.6)]
    assert [c.attained for c in cases] == [True, False, True, False]
    assert [c.ttft_met for c in cases] == [True, False, True, True]


@pytest.mark.parametrize("outcome", [o for o in Outcome if o is not Outcome.OK])
def test_only_ok_attains(outcome):
    assert judged(0.1, 0.1, outcome=outcome).attained is False


def test_without_token_times_the_end_decides():
    def whole(e2e):
        return judge(
            TARGETS, Outcome.OK, ttft_s=None, tpot_s=None, e2e_s=e2e, prompt_tokens=1, output_tokens=5, token_times=None
        )

    assert whole(2.7).attained
    assert not whole(2.71).attained


def test_a_deadline_is_a_third_target():
    targets = Targets(0.7, 0.5, 1.0)
    assert judged(0.6, 0.3, targets=targets).attained
    late = judged(0.6, 0.45, targets=targets)
    assert (late.ttft_met, late.tpot_met, late.deadline_met, late.attained) == (True, True, False, False)


def test_c1_token_goodput():
    assert token_goodput([1.5, 2.05, 2.25, 2.28, 2.6], 2.0, 0.1) == 3
    assert deadline_goodput(20.0, 20.0, 93, 318) == 411
    assert deadline_goodput(20.01, 20.0, 93, 318) == 0


def record(outcome="ok", attained=True, ttft=0.1, tenant="acme", slo_class="chat"):
    values = dict.fromkeys(RequestRecord.__dataclass_fields__)
    values.update(
        id="r", tenant=tenant, slo_class=slo_class, outcome=outcome, attained=attained, ttft_met=attained,
        tpot_met=True, ttft_s=ttft, tpot_s=0.01, goodput_tokens=5,
    )  # fmt: skip
    return RequestRecord(**values)


def test_window_counts_and_forgets():
    windows = AttainmentWindows(window_s=60)
    windows.observe(record(), "", 0.0)
    windows.observe(record(attained=False, ttft=2.0), "queue", 10.0)
    windows.observe(record("cancelled", False), "", 20.0)
    windows.observe(record("expired", False, None), "queue", 30.0)
    (row,) = windows.view(40.0, {("acme", "chat"): (3, -0.5)}, {("acme", "chat"): 0.99})
    assert (row["finished"], row["attained"], row["cancelled"], row["refused"]) == (3, 1, 1, 1)
    assert (row["miss_reason"], row["queued"], row["oldest_slack_s"], row["target"]) == ("queue", 3, -0.5, 0.99)
    (later,) = windows.view(75.0, {}, {})
    assert (later["finished"], later["cancelled"]) == (1, 1)
    assert windows.view(500.0, {}, {}) == []


def test_a_window_says_whose_its_latencies_are():
    """A cancelled one is nobody's; of those without a first token some were answered in one piece."""
    windows = AttainmentWindows()
    for given in (
        record(),
        record(ttft=None),
        record("expired", False, None),
        record("cut", False),
        record("cancelled"),
    ):
        windows.observe(given, "", 0.0)
    (row,) = windows.view(1.0, {}, {})
    assert (row["finished"], row["sampled"], row["first_tokens"], row["in_one_piece"]) == (4, 4, 2, 1)
    for _ in range(700):
        windows.observe(record("refused", False, None), "", 2.0)
    (row,) = windows.view(3.0, {}, {})
    assert (row["finished"], row["sampled"], row["first_tokens"], row["ttft_p50_s"]) == (704, 500, 0, None)


def test_a_cut_window_says_what_it_covers():
    windows = AttainmentWindows(window_s=60, limit=10)
    for i in range(40):
        windows.observe(record(), "", float(i))
    (row,) = windows.view(40.0, {}, {})
    assert (row["finished"], row["window_s"]) == (10, 10.0)


def test_a_class_with_only_a_queue_is_shown():
    (row,) = AttainmentWindows().view(0.0, {("a", "b"): (2, 0.1)}, {})
    assert (row["finished"], row["queued"]) == (0, 2)


def test_quantile_is_nearest_rank():
    values = [float(i) for i in range(1, 101)]
    assert (quantile(values, 0.5), quantile(values, 0.95), quantile([], 0.5)) == (50.0, 95.0, None)


def test_with_a_thinking_deadline_the_answer_is_judged_and_the_reasoning_counts_with_it():
    """Three tokens of reasoning, then three of the answer, half a second apart: the answer begins after 2 s."""
    times = [0.5, 1.0, 1.5, 2.0, 2.5, 3.0]

    def thought(due, pace=0.5, at=2.0, token_times=times):
        targets = Targets(due, pace, None, 5.0, due)
        return judge(
            targets, Outcome.OK, ttft_s=at, tpot_s=0.5, e2e_s=3.0, prompt_tokens=10, output_tokens=len(token_times),
            token_times=token_times, reasoning=3,
        )  # fmt: skip

    assert thought(2.0) == (True, True, True, True, 6)
    assert thought(1.9) == (False, True, True, False, 0), "each token of the answer is late too"
    assert thought(1.9, pace=0.6) == (False, True, True, False, 2), "the later ones catch up"
    assert thought(2.0, pace=0.4) == (True, False, True, False, 4), "pace counts from the first token of the answer"
    assert thought(2.0, at=None, token_times=times[:3]) == (False, True, True, False, 0), "no answer came"


@pytest.mark.parametrize(("pace", "met"), [(0.05, False), (0.1, True)])
def test_tokens_of_an_event_do_not_hide_a_slow_answer(pace, met):
    """100 events of reasoning and 20 of the answer, of 4 tokens each: engines say only that there were 480."""
    times = [*(0.01 * at for at in range(100)), *(1.0 + 0.4 * at for at in range(20))]
    targets = Targets(2.0, pace, None, 5.0, 2.0)
    found = judge(
        targets, Outcome.OK, ttft_s=1.0, tpot_s=7.6 / 79, e2e_s=9.0, prompt_tokens=10, output_tokens=480,
        token_times=times, reasoning=100,
    )  # fmt: skip
    assert (found.ttft_met, found.tpot_met) == (True, met)
    few = judge(
        targets, Outcome.OK, ttft_s=1.0, tpot_s=7.6 / 79, e2e_s=9.0, prompt_tokens=10, output_tokens=60,
        token_times=times, reasoning=100,
    )  # fmt: skip
    assert few.tpot_met is met, "it counted fewer tokens than there were events"
