"""Kairos against the worked examples K1 to K7."""

import math
import random

import pytest

from controller.core.errors import ConfigError
from controller.core.steps import Chunk, Seq, Step, StepRan
from controller.core.types import LatencyCoefficients
from controller.policies.batching.kairos_decode import KairosDecode, KairosDecodeConfig
from controller.policies.batching.kairos_slack import Prompt, finish_times, relative_slack
from controller.policies.batching.kairos_step_table import StepTable
from controller.policies.batching.kairos_urgency import KairosUrgency, KairosUrgencyConfig
from controller.policies.batching.kairos_urgency_printed import KairosUrgencyPrinted
from controller.predict.latency import LatencyModel
from tests.controller.policies.batching.kairos_oracle import Active, choose, slack
from tests.controller.policies.batching.view import FakeView, decoding

MU = 20_000.0
K1 = [
    Prompt(0.0, "r1", 40_000, 40_000, 8.0),
    Prompt(0.5, "r2", 8_000, 8_000, 8.0),
    Prompt(0.8, "r3", 2_000, 2_000, 8.0),
]


def prompt_seq(name, tokens, arrival=0.0, ttft=8.0, **fields):
    return Seq(name, arrival, tokens, 10, due=arrival + ttft, ttft_s=ttft, **fields)


def test_k1_finish_times():
    assert finish_times(K1, MU, 1.0) == pytest.approx({"r1": 3.0, "r2": 3.4, "r3": 3.5})
    cached = [K1[0]._replace(remaining=10_000), K1[1]._replace(remaining=2_000)]
    assert finish_times(cached, MU, 1.0) == pytest.approx({"r1": 1.5, "r2": 1.6})
    equal = [Prompt(0.0, "a", 4000, 4000, 8.0), Prompt(0.0, "b", 2000, 2000, 8.0)]
    assert finish_times(equal, MU, 0.0) == pytest.approx({"a": 0.2, "b": 0.3})
    assert finish_times([], MU, 0.0) == {}


def test_k2_urgency_and_order():
    finish = finish_times(K1, MU, 1.0)
    assert [relative_slack(p, finish[p.id]) for p in K1] == pytest.approx([0.625, 0.6375, 0.6625])
    for policy in (KairosUrgency(), KairosUrgencyPrinted()):
        urgencies = [policy.urgency(p, finish[p.id], 1.0) for p in K1]
        assert urgencies == pytest.approx([1.5625e-5, 7.96875e-5, 3.3125e-4])
        assert [p.id for p in policy.order(K1, 1.0)] == ["r3", "r2", "r1"]


def test_k3_where_the_printed_order_fails():
    long, short = Prompt(0.0, "L", 131_072, 131_072, 8.0), Prompt(0.1, "S", 8_192, 8_192, 8.0)
    finish = {"L": 8.8, "S": 9.2004}
    printed, read = KairosUrgencyPrinted(), KairosUrgency()
    assert [printed.urgency(p, finish[p.id], 0.1) for p in (long, short)] == pytest.approx(
        [-7.629e-7, -1.679e-5], rel=1e-3
    )
    assert [read.urgency(p, finish[p.id], 0.1) for p in (long, short)] == pytest.approx([-13107.2, -1126.81], rel=1e-5)
    slow = 131_072 / 8.8
    printed = KairosUrgencyPrinted(printed.Config(tokens_per_s=slow))
    read = KairosUrgency(KairosUrgencyConfig(tokens_per_s=slow))
    assert [p.id for p in printed.order([long, short], 0.1)] == ["L", "S"]
    assert [p.id for p in read.order([long, short], 0.1)] == ["S", "L"]


def test_k4_filling_the_chunk_and_counting_its_tokens():
    policy = KairosUrgency(KairosUrgencyConfig(tokens_per_s=MU))
    seqs = [prompt_seq("r1", 40_000), prompt_seq("r2", 8_000, 0.5), prompt_seq("r3", 2_000, 0.8)]
    view = FakeView([], seqs, token_budget=8192)
    assert [(seq.id, tokens) for seq, tokens in policy.compose(view, 1.0)] == [("r3", 2000), ("r2", 6192)]
    seqs[1].computed = 6192
    step = Step(1, (Chunk(seqs[2], 0, 2000, True), Chunk(seqs[1], 0, 6192, False)), (), 0)
    policy.observe(StepRan(step, 1, 0.5), 1.5)
    assert policy.tokens_per_s == pytest.approx(8192 / 0.5)
    view = FakeView([seqs[1]], [seqs[0]], token_budget=8192)
    assert [(seq.id, tokens) for seq, tokens in policy.compose(view, 1.5)] == [("r2", 1808), ("r1", 6384)]


def test_an_old_prompt_goes_first_in_the_end():
    """Without the bound a long prompt with negative slack waits as long as short ones keep coming."""
    long = Prompt(0.0, "L", 100_000, 100_000, 1.0)
    short = Prompt(10.5, "S", 100, 100, 1.0)
    unbounded = KairosUrgency(KairosUrgencyConfig(age_bound=1e9))
    assert [p.id for p in unbounded.order([long, short], 10.6)] == ["S", "L"]
    assert [p.id for p in KairosUrgency().order([long, short], 10.6)] == ["L", "S"]


def test_decodes_come_first_and_empty_engines_get_nothing():
    policy = KairosUrgency()
    assert policy.compose(FakeView(), 0.0) == []
    view = FakeView([decoding("d")], [prompt_seq("p", 50)], token_budget=20)
    assert [(seq.id, tokens) for seq, tokens in policy.compose(view, 0.0)] == [("d", 1), ("p", 19)]


def test_k5_slack_of_a_decode():
    active = Active(131_072, "L", 0.0, 3, 0.05)
    assert slack(active, 0.0403, 0.12) == pytest.approx(0.0397)
    assert slack(active._replace(generated=4), 0.0403, 0.12) == pytest.approx(0.0897)


def table_of(steps):
    return StepTable(lambda batch, length: steps[batch, length])


def test_k6_which_join():
    table = table_of({(1, 1): 0.010, (2, 1): 0.011, (1, 2): 0.024, (2, 2): 0.025})
    short, longer = Active(1, "short", 0.0, 0, 0.0), Active(2, "longer", 0.0, 0, 0.0)

    def joining(least):
        return [a.id for a in choose([a._replace(tpot_s=least + 0.025) for a in (longer, short)], table, 0.0)]

    assert joining(0.030) == ["short"]
    assert joining(0.005) == ["short", "longer"]  # even the shortest step exceeds the slack: all decode
    assert choose([], table, 0.0) == []


def test_k6_the_table_learns():
    table = table_of({(1, 7): 11.0})
    table.observe(1, 7, 12.0)
    assert table.seconds(1, 7) == pytest.approx(11.0099, abs=1e-4)


SHORT_MS, LONG_MS = (11.0, 12.0, 13.0), (40.3, 40.8, 41.3)


def run_k7(reserve, steps):
    """In milliseconds, as the example counts them: printed, some choices are ties that binary floats decide."""
    table = StepTable(lambda batch, length: (LONG_MS if length > 100_000 else SHORT_MS)[batch - 1])
    lengths = {"s1": 8_192, "s2": 8_200, "L": 131_072}
    tokens, now, batches, late = dict.fromkeys(lengths, 0), 0.0, [], 0
    for _ in range(steps):
        actives = [Active(lengths[n], n, 0.0, tokens[n], 50.0) for n in lengths]
        chosen = [a.id for a in choose(actives, table, now, reserve)]
        batches.append((" ".join(chosen) if len(chosen) < 3 else "all", round(now, 1)))
        now += table.seconds(len(chosen), max(lengths[n] for n in chosen))
        for name in chosen:
            tokens[name] += 1
            late += now > tokens[name] * 50.0 + 1e-9
    return batches, tokens, now, late


def test_k7_as_printed():
    batches, tokens, now, _ = run_k7("solo", 14)
    expected = ["all", "s1 s2", "all", "s1 s2", "all", "s1", "all", "all", "s1 s2", "all", "s1 s2", "all", "s1", "all"]
    starts = [0, 41.3, 53.3, 94.6, 106.6, 147.9, 158.9, 200.2, 241.5, 253.5, 294.8, 306.8, 348.1, 359.1]
    assert batches == list(zip(expected, starts, strict=True))
    assert tokens == {"s1": 14, "s2": 12, "L": 8}
    assert now == pytest.approx(400.4)
    assert run_k7("solo", 1000)[3] == 112


def test_k7_reserving_for_the_active_set():
    batches, tokens, now, late = run_k7("active", 14)
    expected = [
        "all",
        "s1 s2",
        "all",
        "s1 s2",
        "all",
        "all",
        "s1 s2",
        "all",
        "s1 s2",
        "all",
        "s1 s2",
        "all",
        "all",
        "s1 s2",
    ]
    assert [batch for batch, _ in batches] == expected
    assert tokens == {"s1": 14, "s2": 14, "L": 8}
    assert now == pytest.approx(402.4)
    assert late == 0
    assert run_k7("active", 1000)[3] == 0


def test_k7_reserving_the_longest():
    """All three step by the pace of the longest, so the choices are those of the example's reading."""
    assert run_k7("longest", 14)[:3] == run_k7("active", 14)[:3]
    assert run_k7("longest", 1000)[3] == 0


def test_one_that_cannot_be_in_time_any_more_limits_no_other():
    """s1 and s2 have 20 ms of slack, less than a step of all. L is late by 2 s, and 20 tokens cannot gain that."""
    table = StepTable(lambda batch, length: 0.04 if length > 1000 else 0.01)
    short = [Active(10, "s1", 0.0, 5, 0.05, 50), Active(11, "s2", 0.0, 5, 0.05, 50)]
    lost, saved = Active(2000, "L", -2.0, 5, 0.05, 20), Active(2000, "L", -2.0, 5, 0.05, 900)
    assert [a.id for a in choose([*short, lost], table, 0.24, "longest")] == ["s1", "s2"]
    assert [a.id for a in choose([*short, saved], table, 0.24, "longest")] == ["s1", "s2", "L"]
    assert [a.id for a in choose([*short, lost], table, 0.24, "active")] == ["s1", "s2", "L"]


def test_k8_the_papers_anchors_as_profiles():
    """Prefill of 8K and 128K tokens, decode at batch 1, and what they say of 32K."""
    model = LatencyModel(LatencyCoefficients(0.0, 4.76595e-5, 1.48614e-10, 9.04667e-3, 2.38444e-7, 0.0))
    prefills = [model.prefill([tokens]) for tokens in (8_192, 131_072, 32_768)]
    assert prefills == pytest.approx([0.4004, 8.8, 1.72128], rel=1e-4)
    for profile in ("equal", "longest"):
        config = KairosDecodeConfig(9.04667e-3, 2.38444e-7, 0.0, profile=profile)
        steps = [config.step_s(1, length) for length in (8_192, 131_072, 32_768)]
        assert steps == pytest.approx([0.0110, 0.0403, 0.01686], rel=1e-4)
        assert [model.decode(1, length) for length in (8_192, 131_072, 32_768)] == pytest.approx(steps)
    assert 8_192 / prefills[0] == pytest.approx(20_460, rel=1e-3)
    assert 131_072 / prefills[1] == pytest.approx(14_895, rel=1e-3)


def test_what_sets_the_pace_of_a_batch():
    equal, longest = (KairosDecodeConfig(0.01, 1e-6, 0.001, profile=profile) for profile in ("equal", "longest"))
    assert equal.step_s(4, 1000) == pytest.approx(0.01 + 4 * 0.001 + 4 * 0.001)
    assert longest.step_s(4, 1000) == pytest.approx(0.01 + 0.001 + 4 * 0.001)


def test_the_policy_learns_from_decode_only_steps():
    policy = KairosDecode(KairosDecodeConfig(decode_a=0.01, decode_b=0.0, decode_c=0.0, length_bucket=1))
    seq = decoding("d")
    length = seq.tokens
    seq.output_tokens += 1
    policy.observe(StepRan(Step(1, (), (seq,), length), 1, 0.02), 1.0)
    assert policy.table.seconds(1, length) == pytest.approx(0.01 + 0.01 / 101)
    policy.observe(StepRan(Step(2, (Chunk(seq, 0, 5, False),), (seq,), length), 1, 5.0), 2.0)
    assert policy.table.seconds(1, length) == pytest.approx(0.01 + 0.01 / 101)


def test_a_sequence_without_targets_limits_no_other():
    table = StepTable(lambda batch, length: 0.01)
    actives = [Active(10, "a", 0.0, 0, 0.05), Active(20, "b", 0.0, 0, math.inf)]
    assert [a.id for a in choose(actives, table, 0.0)] == ["a", "b"]


def test_what_is_kept_between_steps_changes_no_choice():
    """Hundreds of steps with comings, goings and overtakings: each choice is Alg. 3's on what is there."""
    settings = ((1, "active", "equal"), (2, "solo", "longest"), (3, "active", "longest"))
    for seed, reserve, profile in (*settings, (4, "longest", "longest"), (5, "longest", "equal")):
        rng = random.Random(seed)
        config = KairosDecodeConfig(0.01, 4e-6, 2e-4, reserve, 16, profile)
        policy, table = KairosDecode(config), StepTable(config.step_s, config.length_bucket)
        engine, now, partial = FakeView(token_budget=64, max_num_seqs=64), 0.0, 0
        for number in range(600):
            if rng.random() < 0.2 and len(engine.running) < 24:
                engine.running.insert(
                    rng.randint(0, len(engine.running)),
                    Seq(
                        f"{rng.randint(0, 9)}-{number}", 0.0, rng.choice((5, 40, 41, 2_000)), rng.choice((300, 10_000)),
                        tpot_s=rng.choice((0.2, 0.5, math.inf)), output_tokens=1, first_token_at=now,
                    ),
                )  # fmt: skip
            for seq in engine.running:
                seq.computed = seq.tokens - 1
            if engine.running and rng.random() < 0.1:
                engine.running.remove(rng.choice(engine.running))
            actives = [
                Active(
                    *(seq.tokens, seq.id, seq.first_token_at, seq.output_tokens - 1),
                    *(seq.tpot_s, seq.max_tokens - seq.output_tokens),
                )
                for seq in engine.running
            ]
            expected = [each.id for each in choose(actives, table, now, reserve)]
            grants = policy.compose(engine, now)
            assert [grant.seq.id for grant in grants] == expected
            partial += 0 < len(grants) < len(actives)
            decodes = tuple(grant.seq for grant in grants)
            seconds = config.step_s(len(decodes), max((seq.tokens for seq in decodes), default=0)) * rng.uniform(
                0.8, 1.2
            )
            if decodes:
                table.observe(len(decodes), decodes[-1].tokens, seconds)
            for seq in decodes:
                seq.output_tokens += 1
            policy.observe(StepRan(Step(number, (), decodes, 0), 1, seconds), now + seconds)
            now += seconds
        assert partial > 50


@pytest.mark.parametrize("bad", [{"reserve": "none"}, {"length_bucket": 0}, {"decode_a": -1.0}, {"profile": "sum"}])
def test_bad_settings_are_refused(bad):
    with pytest.raises(ConfigError) as caught:
        KairosDecodeConfig(**bad)
    assert caught.value.field == next(iter(bad))
