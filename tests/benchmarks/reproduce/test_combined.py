"""What the section on the combined set measures is the set, and what it says is what was measured."""

import json
from dataclasses import replace

import pytest

from benchmarks.reproduce.claims import Claim, Section, Table
from benchmarks.reproduce.combined import kairos as combined_kairos
from benchmarks.reproduce.combined import section as combined
from benchmarks.reproduce.combined import stored as combined_stored
from benchmarks.reproduce.combined.pairs import WITHIN, compare
from benchmarks.reproduce.concord.lab import CONCORD, WHOLE_SLOTS
from benchmarks.reproduce.concord.sweep import choices
from benchmarks.reproduce.hyperflexis.setting import OURS
from benchmarks.reproduce.kairos import setting as kairos_setting
from benchmarks.reproduce.kairos.stages import Stages
from controller.core.types import LatencyCoefficients
from controller.engine import PreemptivePrefill
from controller.simulator import InstanceSettings, SimulationSettings
from workers.engine.config import parse

BELIEVED = LatencyCoefficients(0.001, 5e-5, 2e-10, 0.013, 4e-8, 1e-5)
SLACKLINE, HYPERFLEXIS = OURS


# ---- what is measured -----------------------------------------------------------------------------------------------


def test_concords_engine_is_one_that_can_be_started():
    engine = combined.collocated().build_engine()
    options = ["--max-num-seqs", str(engine.config.max_num_seqs), "--max-num-batched-tokens", "512"]
    live = parse(["--port", "1", "--scheduler", "slackline", "--deadlines", *options])
    assert engine.batching.config == live.batching.config
    assert (engine.config.max_num_seqs, engine.token_budget) == (live.engine.max_num_seqs, 512)


def test_kairos_engines_are_the_sets():
    prefill, decode = (each.build_engine() for each in combined_kairos.engines(combined_kairos.SET, BELIEVED))
    assert isinstance(prefill, PreemptivePrefill)
    assert (prefill.batching.config.prefill_b, prefill.preemption.boundary) == (BELIEVED.prefill_b, "operator")
    assert decode.batching.name == "kairos_decode"
    assert (decode.batching.config.decode_b, decode.batching.config.profile) == (BELIEVED.decode_b, "equal")


def test_stages_apart_become_the_sets():
    engine = InstanceSettings(BELIEVED, batching="vllm_v1")
    apart = SimulationSettings((replace(engine, role="prefill"), replace(engine, role="decode")))
    names = [each.part.batching for each in combined.by_stage(apart).instances]
    assert names == ["slo_aware_batching", "kairos_decode"]


@pytest.mark.parametrize("rate", [2.0, 5.0])
def test_kairos_simulated_whole_agrees_with_its_testbed(rate):
    calls = kairos_setting.long_tail(rate, 1, 150)
    own = kairos_setting.PAIRS[kairos_setting.KAIROS]
    apart = kairos_setting.Figures(Stages(kairos_setting.TESTBED, *own).run(calls))
    whole = combined_kairos.simulation(combined_kairos.Pair(own), calls).run()
    assert combined_kairos.attained(whole) == pytest.approx(apart.e2e, abs=2.0)
    assert max(record.ttft_s for record in whole.records) == pytest.approx(apart.longest_ttft_s, rel=0.05)


def test_the_profile_believed_is_fitted_to_the_device():
    believed, truth = combined_kairos.calibrated(120), kairos_setting.ANCHORS
    assert believed.prefill_b == pytest.approx(truth.prefill_b, rel=0.01)
    assert believed.decode_b < truth.decode_b  # its steps grow with one sequence, not with all


# ---- what is said ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("theirs", "ours", "reached"),
    [
        ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), True),
        ((0.5, 0.6, 0.7), (0.6, 0.7, 0.8), True),
        ((0.6, 0.7, 0.8), (0.5, 0.6, 0.7), False),
        ((0.5, 0.5, 0.5), (0.6, 0.3, 0.5), True),  # behind on the whole, by less than the error of it
        ((0.5,), (0.4,), False),
    ],
)
def test_noise_is_judged_by_pairs(theirs, ours, reached):
    seeds = tuple(range(len(ours)))
    claim = compare("Home", "attainment", "here", theirs, ours, seeds, "because")
    assert claim.reached is reached
    behind = sum(ours) < sum(theirs)
    assert claim.reason == ((WITHIN if behind else "") if reached else "because")
    assert claim.verdict == "set"
    assert (claim.theirs, claim.ours) == pytest.approx((sum(theirs) / len(theirs), sum(ours) / len(ours)), rel=1e-3)


def keep(folder, name, claims=(), tables=()):
    (folder / f"{name}.json").write_text(json.dumps(Section(name, "", list(claims), list(tables)).to_json()))


def test_figures_of_the_report_are_taken_as_they_are(tmp_path):
    columns = ["mix", "model", "load, x", "scheduler", "attainment", "attainment of Table 1's targets"]
    fifth = [["2-task", "M", load, name, met, 0.1] for load, name, met in (
        (1.0, SLACKLINE, 0.9), (1.0, HYPERFLEXIS, 0.8), (2.0, SLACKLINE, 0.5), (2.0, HYPERFLEXIS, 0.6),
    )]  # fmt: skip
    totals = [
        [SLACKLINE, "P0 qa", 0.99], [SLACKLINE, "all", 0.85], [HYPERFLEXIS, "P0 qa", 1.0], [HYPERFLEXIS, "all", 0.8],
    ]  # fmt: skip
    knees = [[SLACKLINE, 48.0], [HYPERFLEXIS, 39.0]]
    tables = [
        Table("Fig. 5: priorities mapped to targets", columns, fifth),
        Table("Fig. 6: clients; 32 sequences", ["scheduler", "priority", "attained"], totals),
        Table("Fig. 7, M: alone; 1 x = 3", ["scheduler", "90 % point, requests/s"], knees),
        Table("Fig. 7, M: parts exchanged; 1 x = 3", ["scheduler", "1 x: attainment"], knees),
    ]
    sixth = [
        Claim("HyperFlexis", "Fig. 6", f"{name}: share", 1.0, share, False, f"M, 1 worker of {slots} sequences", (1,))
        for slots in (32, 64)
        for name, share in ((SLACKLINE, 0.6), (HYPERFLEXIS, 0.7))
    ]
    keep(tmp_path, "hyperflexis", sixth, tables)
    found = list(combined_stored.from_the_report(lambda line: None, tmp_path))
    assert [(claim.theirs, claim.ours, claim.reached) for claim in found] == [
        (0.8, 0.9, True), (0.6, 0.5, False), (39.0, 48.0, True), (0.7, 0.6, False),
    ]  # fmt: skip
    assert found[1].reason == combined_stored.SINGLE
    assert "P0 0.990 and 1.000; of all requests 0.850 and 0.800" in found[3].reason


def test_figure_3_of_the_report_is_taken_load_by_load(tmp_path):
    rows = [
        ["round robin", "0.1 ± 0.0, 2.0 s, 99", "0.1 ± 0.0, 2.0 s, 99"],
        [HYPERFLEXIS, "0.990 ± 0.001, 2.8 s, 758", "0.600 ± 0.030, 4.0 s, 803"],
        [SLACKLINE, "0.980 ± 0.002, 2.8 s, 758", "0.700 ± 0.016, 4.0 s, 803"],
        [f"{SLACKLINE} on 2 to 4", "1.000 ± 0.000, 1.0 s, 900", "0.880 ± 0.040, 2.0 s, 900"],
        [f"{HYPERFLEXIS} on 2 to 4", "1.000 ± 0.000, 1.0 s, 900", "0.890 ± 0.030, 2.0 s, 900"],
    ]
    titles = ("Fig. 3, M7, 2-task; 1 x = 3.0 requests/s", "Scaler's thresholds")
    keep(tmp_path, "hyperflexis", tables=[Table(title, ["", "1 x", "4.5 x"], rows) for title in titles])
    found = list(combined_stored.figure_3(lambda line: None, tmp_path))
    assert [(claim.theirs, claim.ours, claim.reached) for claim in found] == [
        (0.99, 0.98, False), (0.6, 0.7, True), (1.0, 1.0, True), (0.89, 0.88, False),
    ]  # fmt: skip
    assert found[0].setting == "M7, 2-task mix, 2 workers, 1 x round robin's 90 % point"
    assert found[3].setting == "M7, 2-task mix, 2 to 4 workers, 4.5 x round robin's 90 % point"
    assert found[0].reason == combined_stored.BEYOND.format(0.01, 5**0.5 / 1000 / 3**0.5)
    assert found[3].reason == combined_stored.UNPAIRED.format(0.01, 0.05 / 3**0.5)
    assert found[1].reason == found[2].reason == ""


def test_more_sequences_are_compared_with_the_best_rival_of_each_load(tmp_path):
    columns = ["sequences", "mix", "load, x", "scheduler", "attainment", "± std", "attainment by class"]
    rows = [
        [slots, "4-task", load, name, met - (0.5 if slots == 8 else 0.0), 0.01, f"one {met:.3f}, other {met:.3f}"]
        for slots in (8, 64)
        for load, name, met in (
            (1.0, "a", 0.9), (1.0, "b", 0.8), (1.0, "no rival", 1.0), (1.0, SLACKLINE, 0.95),
            (2.0, "a", 0.5), (2.0, "b", 0.8), (2.0, "no rival", 1.0), (2.0, SLACKLINE, 0.7),
        )
    ]  # fmt: skip
    keep(tmp_path, "hyperflexis", tables=[Table(f"{combined_stored.BY_NUMBER}M", columns, rows)])
    found = list(combined_stored.by_sequences(lambda line: None, ("a", "b"), tmp_path))
    assert [(claim.theirs, claim.ours, claim.reached) for claim in found] == [(0.9, 0.95, True), (0.8, 0.7, False)]
    assert {claim.figure for claim in found} == {"HyperFlexis, 64 sequences"}
    assert [claim.setting.rpartition("; ")[2] for claim in found] == ["a", "b"]
    assert found[0].reason == ""
    assert found[1].reason.endswith("by class, one 0.700 and 0.800, other 0.700 and 0.800")


def test_the_report_has_what_is_taken_from_it():
    """The stored section's titles and columns are those that are read: 60 loads of Fig. 3, and twelve with more."""
    said = []
    assert len(list(combined_stored.figure_3(said.append))) == 60
    assert len(list(combined_stored.by_sequences(said.append, combined.RIVALS))) == 12
    assert said == []


def test_a_report_that_was_not_run_is_left_out(tmp_path):
    said = []
    assert list(combined_stored.from_the_report(said.append, tmp_path)) == []
    assert "left out" in said[0]


def test_calm_stands_at_the_best_of_its_sweep(tmp_path):
    with pytest.raises(RuntimeError, match="run --paper concord first"):
        combined_stored.calm_at_its_best(tmp_path)
    packed, whole = (choices()[name] for name in (CONCORD.name, WHOLE_SLOTS.name))
    rows = [[each.name, each.text, 100.0 + number, 10.0] for number, each in enumerate((*packed, *whole))]
    rows[2][3] = 500.0
    keep(tmp_path, "concord", tables=[Table("Concord: every system's own settings, swept", ["a", "b", "c", "d"], rows)])
    assert combined_stored.calm_at_its_best(tmp_path) == [packed[2], whole[-1]]


@pytest.mark.simulated
def test_the_section_is_made():
    section = combined.reproduce(lambda line: None, True)
    assert {claim.figure for claim in section.claims} == {"HyperFlexis", "FlowPrefill", "Kairos", "Concord"}
    assert all(claim.reason or claim.reached for claim in section.claims if claim.figure != "FlowPrefill")
    assert len(section.tables) == 3


@pytest.mark.simulated
def test_one_home_workload_can_be_run_alone():
    section = combined.reproduce(lambda line: None, True, ("kairos",))
    assert {claim.figure for claim in section.claims} == {"Kairos"}
    assert {each.part for each in (*section.claims, *section.tables)} == {"kairos"}
