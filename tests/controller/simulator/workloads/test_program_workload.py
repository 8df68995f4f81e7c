"""Programs asked for in an experiment file: read whole, the same for every policy, judged as programs."""

import copy
import json
import math
from pathlib import Path

import numpy as np
import pytest

from controller.core.errors import ConfigError
from controller.simulator.__main__ import main
from controller.simulator.report.summary import report
from controller.simulator.runner import run_once
from controller.simulator.workloads.concord_mix import calls_each
from controller.simulator.workloads.foresight import Blind, Noisy, Oracle
from controller.simulator.workloads.program_workload import OFFSET
from tests.controller.simulator.test_experiment import parsed

SHIPPED = Path(__file__).parents[4] / "controller/simulator/experiments/concord_mix.json"
GOOD = {
    "name": "programs",
    "instances": {
        "profile": {"prefill": {"a": 0.004, "b": 5e-5, "c": 1e-9}, "decode": {"a": 0.006, "b": 8e-8, "c": 4e-5}},
        "kv_tokens": 262_144,
        "max_num_seqs": 128,
        "max_num_batched_tokens": 512,
        "max_model_len": 16_384,
        "prefix_caching": False,
    },
    "workload": {"kind": "programs", "programs": 40, "rate": 2.0},
    "policies": ["round_robin", {"label": "calm", "name": "round_robin", "engine": {"batching": "calm"}}],
    "seeds": [1, 2],
    "settings": {"cutoff_s": 120, "progress_s": 5},
}


def with_workload(**changes):
    raw = copy.deepcopy(GOOD)
    raw["workload"] |= changes
    return raw


def test_kinds_and_targets_are_the_papers():
    """A third each of 2 s and 100 ms, of 20 s, and of 20 s a stage."""
    workload = parsed(with_workload(programs=900)).workload
    programs = workload.programs(None, 1, parsed(GOOD).settings.instances[0].latency).programs
    kinds = [program.kind for program in programs]
    assert {kind: 250 < kinds.count(kind) < 350 for kind in kinds} == dict.fromkeys(
        ("latency", "deadline", "compound"), True
    )
    for program in programs:
        if program.kind == "latency":
            assert program.targets[:3] == (2.0, 0.1, None)
        else:
            assert program.targets.deadline_s == 20.0 * len(program.stages)
    calls = sum(len(stage.calls) for program in programs for stage in program.stages)
    assert calls == pytest.approx(900 * calls_each((1, 1, 1)), rel=0.05)


def test_every_policy_gets_the_same_programs_and_every_call_ends_once():
    experiment = parsed(GOOD)
    runs = [run_once(experiment, each, None, 1) for each in experiment.contenders]
    first, second = ([(p.id, p.at, p.kind, p.tokens) for p in sorted(run.programs)] for run in runs)
    assert first == second
    assert len(first) == 40
    for run in runs:
        assert len({record.id for record in run.records}) == len(run.records) == sum(p.calls for p in run.programs)


def test_what_is_reported_is_of_programs():
    """A late stage of a program in time is no miss; the table and the JSON count programs."""
    experiment = parsed(with_workload(rate=6.0, programs=80))
    result = run_once(experiment, experiment.contenders[0], None, 1)
    found = report(result)
    kept = [program for program in result.programs if program.attained]
    assert found["attainment"] == len(kept) / 80
    assert found["goodput_tokens"] == sum(program.earned for program in result.programs)
    assert found["attained_per_s"] == pytest.approx(len(kept) / result.ended_at)
    for kind, own in found["by_class"].items():
        of_kind = [program for program in result.programs if program.kind == kind]
        assert own["attainment"] == sum(p.attained for p in of_kind) / len(of_kind)
    assert sum(record.attained for record in result.records) / len(result.records) != found["attainment"]
    half = report(result, warmup_s=5.0)
    assert half["programs"]["latency"]["programs"] < found["programs"]["latency"]["programs"]


def test_the_rate_stretches_arrivals_and_leaves_programs_alone():
    workload, latency = parsed(GOOD).workload, parsed(GOOD).settings.instances[0].latency
    slow, fast = (workload.programs(rate, 3, latency).programs for rate in (1.0, 4.0))
    assert [program.stages for program in slow] == [program.stages for program in fast]
    assert [program.at for program in slow] == pytest.approx([4 * program.at for program in fast])


def test_gaps_of_a_trace_are_scaled_to_the_rate_and_begin_elsewhere_for_each_seed(tmp_path):
    path = tmp_path / "trace.csv"
    at = np.cumsum(np.random.default_rng(1).exponential(1.0, 50)) ** 1.5
    path.write_text("arrival_s,input_tokens,output_tokens\n" + "".join(f"{each:.6f},5,5\n" for each in at))
    workload, latency = parsed(with_workload(gaps=str(path))).workload, parsed(GOOD).settings.instances[0].latency
    times = {seed: [p.at for p in workload.programs(None, seed, latency).programs] for seed in (1, 2)}
    gaps = np.append(np.diff(at), (at[-1] - at[0]) / 49)  # behind the last request comes the first one again
    for seed, found in times.items():
        chosen = np.take(gaps, range(seed * OFFSET % 50, seed * OFFSET % 50 + 40), mode="wrap")
        assert found == pytest.approx((np.cumsum(chosen) * 20.0 / chosen.sum()).tolist())
    assert times[1] != times[2]


def test_bursts_are_as_asked():
    workload, latency = (
        parsed(with_workload(programs=4000, cv=3.0)).workload,
        parsed(GOOD).settings.instances[0].latency,
    )
    gaps = np.diff([program.at for program in workload.programs(None, 1, latency).programs])
    assert gaps.std() / gaps.mean() == pytest.approx(3.0, rel=0.15)


@pytest.mark.parametrize(
    ("asked", "kind"), [({}, Noisy), ({"kind": "oracle"}, Oracle), ({"kind": "blind", "mean_output": 50}, Blind)]
)
def test_what_engines_are_told_is_chosen(asked, kind):
    latency = parsed(GOOD).settings.instances[0].latency
    driver = parsed(with_workload(foresight=asked)).workload.programs(None, 7, latency)
    assert isinstance(driver.foresight, kind)
    if kind is Noisy:
        assert driver.foresight.seed == 7


def test_a_policy_may_be_told_more_than_the_others(tmp_path, capsys):
    """Concord beside its oracle, on the same programs; a changed setting keeps what it is told."""
    raw = with_workload(programs=60, rate=4.0)
    calm = {"name": "round_robin", "engine": {"batching": "calm", "batching_settings": {"slots": 8}}}
    raw["policies"] = [{"label": "noisy", **calm}, {"label": "oracle", **calm, "foresight": {"kind": "oracle"}}]
    experiment = parsed(raw)
    assert [type(each.foresight) for each in experiment.contenders] == [type(None), Oracle]
    noisy, oracle = (run_once(experiment, each, None, 1) for each in experiment.contenders)
    assert sorted((p.id, p.at, p.tokens) for p in noisy.programs) == sorted(
        (p.id, p.at, p.tokens) for p in oracle.programs
    )
    assert [r.e2e_s for r in noisy.records] != [r.e2e_s for r in oracle.records]
    path = tmp_path / "both.json"
    path.write_text(json.dumps(raw))
    options = ["--seeds", "1", "--set", "oracle.pacing.name=unlimited"]
    assert main(["compare", str(path), *options]) == 0
    found = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    entries = {entry["policy"]: entry["first_seed"] for entry in found["entries"]}
    assert entries["oracle"] == json.loads(json.dumps(report(oracle)))


def test_foresight_without_programs_is_refused():
    raw = {**GOOD, "workload": {"kind": "mix", "mix": "2-task", "per_task": 5, "rate": 1.0}}
    raw["policies"] = [{"name": "slackline", "foresight": {"kind": "oracle"}}]
    with pytest.raises(ConfigError) as caught:
        parsed(raw)
    assert caught.value.field == "policies[0].foresight"


def test_the_rule_of_stage_deadlines_and_the_unit_of_goodput_reach_the_run():
    latency = parsed(GOOD).settings.instances[0].latency
    asked = with_workload(stage_deadlines="share_of_rest", goodput_in="requests")
    driver = parsed(asked).workload.programs(None, 1, latency)
    assert (driver.stage_deadlines, driver.count) == ("share_of_rest", "requests")
    assert all(demand.estimate.goodput == 1.0 for demand in driver.first() if demand.slo_class == "compound")


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"programs": 0}, "workload.programs", "at least 1"),
        ({"programs": None}, "workload.programs", "integer"),
        ({"shares": [1, 1]}, "workload.shares", "three numbers"),
        ({"shares": [1, -1, 1]}, "workload.shares", "above"),
        ({"shares": [0, 0, 0]}, "workload.shares", "not all 0"),
        ({"slo_scale": 0}, "workload.slo_scale", "above 0"),
        ({"foresight": {"kind": "tarot"}}, "workload.foresight.kind", "valid: noisy, oracle, blind"),
        ({"foresight": {"kind": "oracle", "length_error": 1}}, "workload.foresight.length_error", "valid: kind"),
        ({"foresight": {"length_error": -1}}, "workload.foresight.length_error", "above"),
        ({"stage_deadlines": "late"}, "workload.stage_deadlines", "valid: accumulated"),
        ({"goodput_in": "euros"}, "workload.goodput_in", "valid: tokens, requests"),
        ({"gaps": "nowhere.csv"}, "workload.gaps", "No such file"),
        ({"per_task": 3}, "workload.per_task", "valid: "),
    ],
)
def test_what_is_wrong_is_named(changes, field, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parsed(with_workload(**changes))
    assert caught.value.field == field


def test_an_engine_too_small_for_the_longest_call_is_refused():
    raw = copy.deepcopy(GOOD)
    raw["instances"]["max_model_len"] = 8192
    with pytest.raises(ConfigError, match="up to 14048 tokens") as caught:
        parsed(raw)
    assert caught.value.field == "instances.max_model_len"


def test_without_a_rate_it_says_so():
    raw = copy.deepcopy(GOOD)
    del raw["workload"]["rate"]
    with pytest.raises(ConfigError) as caught:
        run_once(parsed(raw), parsed(raw).contenders[0], None, 1)
    assert caught.value.field == "workload.rate"


def test_the_shipped_mix_is_of_the_papers_size():
    raw = json.loads(SHIPPED.read_text())
    assert len(raw["seeds"]) == 5
    assert raw["workload"]["programs"] * calls_each(raw["workload"]["shares"]) > 10_000


def test_goodput_by_the_command_line(tmp_path, capsys):
    """The rate that nine programs of ten bear, and its page."""
    path = tmp_path / "programs.json"
    path.write_text(json.dumps(with_workload(programs=30)))
    page = tmp_path / "page.html"
    options = ["--policies", "round_robin", "--seeds", "1", "--html", str(page)]
    assert main(["goodput", str(path), *options]) == 0
    found = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    rate = found["goodput"]["round_robin"]
    assert 0.01 < rate < math.inf
    assert "compound" in page.read_text()
