"""Kairos' testbed keeps what it promises, and the reproduction runs."""

import math
from dataclasses import replace

import pytest

from benchmarks.reproduce.__main__ import STORE, stored
from benchmarks.reproduce.kairos.fitting import DECODE, TTFT, decoders, table_of_decoders, tails
from benchmarks.reproduce.kairos.gains import (
    GAINS,
    PAPER,
    claims,
    crossing,
    equal_loads,
    gains,
    knee,
    table_of_gains,
    times_knee,
)
from benchmarks.reproduce.kairos.section import reproduce, settings_text
from benchmarks.reproduce.kairos.setting import (
    ANCHORS,
    CONSTANTS,
    DISTSERVE,
    FCFS,
    KAIROS,
    LONGEST,
    LONGEST_OUTPUT,
    MEDIAN,
    OUTPUT_MEAN,
    OUTPUT_POWER,
    OUTPUT_SIGMA,
    PAIRS,
    PER_SEQUENCE_S,
    SIGMA,
    SLACK,
    TESTBED,
    URGENCY,
    Figures,
    TaskLengths,
    long_tail,
    work_s,
)
from benchmarks.reproduce.kairos.stages import StageCall, StageOutcome, Stages


def run(calls, prefill=FCFS, decode=FCFS, bed=TESTBED):
    return Stages(bed, prefill, decode).run(calls)


def test_one_request_alone_takes_what_the_anchors_say():
    (outcome,) = run([StageCall(0.0, 8_192, 101)])
    assert outcome.ttft_s == pytest.approx(0.4004, rel=1e-4)
    step = ANCHORS.decode_a + ANCHORS.decode_b * (8_192 + 51) + ANCHORS.decode_c
    moved = 8_193 / TESTBED.link_tokens_per_s
    assert outcome.tpot_s == pytest.approx(step + moved / 100, rel=1e-3)


def test_the_papers_motivating_example():
    """A 128K prompt, then an 8K one: first come, first served makes both late, urgency saves the short one."""
    calls = [StageCall(0.0, 131_072, 1), StageCall(0.1, 8_192, 1)]
    late = {o.prompt_tokens: o.ttft_s for o in run(calls)}
    saved = {o.prompt_tokens: o.ttft_s for o in run(calls, URGENCY)}
    assert late[8_192] == pytest.approx(8.8 + 0.4004 - 0.1, rel=1e-3)
    assert saved[8_192] < 8.0
    assert saved[131_072] == pytest.approx(8.8 + 0.4004, rel=1e-3)


@pytest.mark.parametrize("name", list(PAIRS))
def test_every_request_is_answered_once_with_all_its_tokens(name):
    calls = long_tail(4.0, 1, 60)
    outcomes = Stages(replace(TESTBED, kv_tokens=180_000, decode_slots=8), *PAIRS[name]).run(calls)
    assert sorted((o.prompt_tokens, o.output_tokens) for o in outcomes) == sorted((c[1], c[2]) for c in calls)
    assert all(o.ttft_s > 0 and (o.tpot_s > 0 or o.output_tokens == 1) for o in outcomes)


def test_the_longest_sequence_sets_the_pace():
    calls = [StageCall(0.0, 100_000, 200), StageCall(0.0, 1_000, 200)]
    paces = {by: max(o.tpot_s for o in run(calls, bed=replace(TESTBED, decode_by=by))) for by in ("longest", "sum")}
    assert paces["sum"] > paces["longest"]
    short = {decode.batching: min(o.tpot_s for o in run(calls, decode=decode)) for decode in (FCFS, SLACK)}
    assert short["kairos_decode"] < 0.6 * short["chunked_prefill"]


def test_the_workload_is_long_tailed_and_the_same_lengths_for_each_seed():
    one, other = long_tail(3.0, 1), long_tail(3.0, 2)
    assert sorted(c.prompt_tokens for c in one) == sorted(c.prompt_tokens for c in other)
    assert one == long_tail(3.0, 1)
    assert one != other
    assert max(c.prompt_tokens for c in one) == LONGEST
    assert 3.2 < 1 / work_s(one) < 3.9  # requests/s of one prefill engine: where the paper's curves fall


def test_the_constants_in_use_stand_beside_the_candidates(monkeypatch):
    monkeypatch.setattr("benchmarks.reproduce.kairos.fitting.DECODE_RATES", ())
    monkeypatch.setattr("benchmarks.reproduce.kairos.fitting.DECODE", {"tpot": {}})
    monkeypatch.setattr("benchmarks.reproduce.kairos.fitting._error", lambda ours, theirs: 7.0)
    table = table_of_decoders(decoders(tails(), lambda line: None))
    used = next(row for row in table.rows if row[0] == "in use")
    constants = [LONGEST, OUTPUT_MEAN, OUTPUT_POWER, round(1000 * PER_SEQUENCE_S, 2), TESTBED.kv_tokens]
    assert used[1:6] == constants
    assert [row[0] for row in table.rows] == [*map(str, range(1, 9)), "in use", "paper"]


def test_no_stored_candidate_is_nearer_to_distserve_than_the_constants_in_use():
    tables = [table for section in stored(STORE) for table in section.tables]
    rows = next(table for table in tables if table.title.startswith("Decode fitted to DistServe's points")).rows
    errors = {row[0]: row[-1] for row in rows}
    used = next(row for row in rows if row[0] == "in use")
    assert used[1:6] == [LONGEST, OUTPUT_MEAN, OUTPUT_POWER, round(1000 * PER_SEQUENCE_S, 2), TESTBED.kv_tokens]
    assert errors["in use"] <= errors["1"]


def test_prompts_are_fitted_to_distserves_ttft():
    found = tails()
    assert [tail.error for tail in found] == sorted(tail.error for tail in found)
    used = next(tail for tail in found if (tail.sigma, tail.longest) == (SIGMA, LONGEST))
    assert used.error < found[0].error + 2.0
    assert used.median == pytest.approx(MEDIAN, rel=0.05)


def test_the_page_says_where_each_constant_of_the_testbed_is_from():
    """None is fitted to what the paper publishes of Kairos."""
    text = settings_text()
    numbers = [
        f"{MEDIAN:,}", f"{SIGMA:g}", f"{LONGEST:,}", str(OUTPUT_MEAN), f"{OUTPUT_POWER:g}", f"{OUTPUT_SIGMA:g}",
        f"{LONGEST_OUTPUT:,}", f"{1000 * PER_SEQUENCE_S:.2f} ms", f"{TESTBED.kv_tokens:,}", f"{TESTBED.ttft_s:g} s",
        f"{1000 * TESTBED.tpot_s:g} ms", f"{TESTBED.link_tokens_per_s:,.0f}", f"{ANCHORS.prefill_b:g} s",
        f"{ANCHORS.prefill_c:g} s", f"{1000 * ANCHORS.decode_a:.2f} ms", f"{1e6 * ANCHORS.decode_b:.3f} us",
    ]  # fmt: skip
    values = " ".join(constant.value for constant in CONSTANTS)
    assert [number for number in numbers if number not in values] == []
    for constant in CONSTANTS:
        assert f"| {constant.name} | {constant.value} | {constant.source} |" in text
        assert constant.source.startswith(
            ("the paper, section", "fitted to DistServe's", "ours", "the best of a sweep")
        )


def test_the_fit_uses_what_is_published_of_distserve():
    published = {(key, qps) for key in ("ttft", "tpot", "e2e", "throughput") for qps in PAPER[key][DISTSERVE]}
    fitted = {(key, qps) for key, points in {"ttft": TTFT, **DECODE}.items() for qps in points}
    assert published - fitted == {("e2e", 4.0)}  # beyond the loads of the second stage
    assert all(value == PAPER["ttft"][DISTSERVE][qps] for qps, value in TTFT.items() if qps > 2.0)


def test_the_recursion_of_the_fit_agrees_with_the_engine():
    lengths = TaskLengths(1_000.0, 1.45, 65_536)
    calls = long_tail(3.0, 4, lengths=lengths)
    outcomes = run([StageCall(call.at, call.prompt_tokens, 1) for call in calls])
    engine = 100 * sum(outcome.ttft_s <= 8.0 for outcome in outcomes) / len(outcomes)
    service = [ANCHORS.prefill_b * c.prompt_tokens + ANCHORS.prefill_c * c.prompt_tokens**2 for c in calls]
    free, late = 0.0, 0
    for call, seconds in zip(calls, service, strict=True):
        free = max(free, call.at) + seconds
        late += free - call.at > 8.0
    assert engine == pytest.approx(100 - late / 10, abs=2.0)


def test_figures_of_a_run():
    found = Figures(
        [
            StageOutcome(10, 2, 7.0, 0.04),
            StageOutcome(10, 2, 9.0, 0.04),
            StageOutcome(10, 2, 1.0, 0.08),
            StageOutcome(1, 1, 1, 0),
        ]
    )
    assert (found.ttft, found.tpot, found.e2e) == (75.0, 75.0, 50.0)
    assert found.throughput == pytest.approx(25.0)
    assert found.longest_ttft_s == 9.0


def figures(ttft, throughput=20.0):
    made = Figures([StageOutcome(10, 2, 1.0, 1 / throughput)])
    made.ttft = ttft
    return made


def test_knee_and_gains():
    curves = {
        DISTSERVE: {2.0: [figures(100)], 3.0: [figures(80)], 4.0: [figures(10)]},
        KAIROS: {2.0: [figures(100, 25.0)], 3.0: [figures(100)], 4.0: [figures(50)]},
    }
    assert knee(curves[DISTSERVE]) == pytest.approx(2.5)
    assert knee({2.0: [figures(95)], 3.0: [figures(92)]}) is None
    assert gains(curves, "ttft") == {2.0: 0.0, 3.0: 20.0, 4.0: 40.0}
    assert gains(curves, "throughput")[2.0] == pytest.approx(25.0)


def made(ttft, throughput=20.0):
    """All four figures of a policy at one load."""
    of = figures(ttft, throughput)
    of.tpot = of.e2e = ttft
    return [of]


def test_loads_are_equal_multiples_of_each_distserves_own_ninety_per_cent_point():
    assert crossing({1.0: 95.0, 2.0: 100.0, 3.0: 80.0}) == pytest.approx(2.5)
    assert times_knee(3.0) == pytest.approx(1.04, abs=0.005)  # 100 % at QPS 2.8, 76.1 at 3.0
    assert times_knee(2.0) == pytest.approx(0.693, abs=0.001)
    curves = {DISTSERVE: {2.0: made(100), 3.0: made(80)}}
    at = equal_loads(curves)
    assert at["ttft"] == at["tpot"] == at["e2e"] == pytest.approx(2.5 * times_knee(3.0), abs=1e-3)
    assert at["throughput"] == pytest.approx(2.5 * times_knee(2.0), abs=1e-3)
    assert equal_loads({DISTSERVE: {2.0: made(100), 3.0: made(95)}}) == {}


def test_a_gain_is_judged_at_the_normalised_load_and_not_where_it_is_largest():
    at = dict.fromkeys(GAINS, 2.6)
    curves = {
        DISTSERVE: {2.0: made(100), 2.6: made(90), 4.0: made(10)},
        KAIROS: {2.0: made(100), 2.6: made(98, 30.0), 4.0: made(90)},
    }
    judged, largest = claims(curves, at, (1,))[:2]
    assert (judged.theirs, judged.ours, judged.reached) == (23.9, 8.0, False)
    assert "still at 90.0 %: 10.0 points are all that can be gained" in judged.reason
    assert (largest.ours, largest.reached, largest.setting.endswith("QPS 4")) == (80.0, None, True)
    speed = claims(curves, at, (1,))[6]
    assert (speed.figure, speed.ours, speed.reached) == ("Fig. 6", 50.0, True)
    assert table_of_gains(curves, at).rows[0][-5:] == [2.6, 8.0, None, 80.0, 4.0]
    assert all(claim.reached is None for claim in claims(curves, {}, (1,)))


@pytest.mark.simulated
def test_a_quick_reproduction_has_every_claim():
    section = reproduce(lambda line: None, True)
    figures = ["Fig. 4", "Fig. 5", "Fig. 3", "Fig. 6"]
    assert [claim.figure for claim in section.claims] == [each for each in figures for _ in ("judged", "largest")]
    assert all(math.isfinite(claim.ours) for claim in section.claims if claim.ours is not None)
    assert {claim.reached for claim in section.claims[1::2]} == {None}
    assert len(section.plots) == len(GAINS) == 4
