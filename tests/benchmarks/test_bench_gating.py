"""What bench-gating makes of its runs, and that it runs as a whole in a small form."""

import argparse
import json

import pytest

from benchmarks import bench_gating
from benchmarks.bench_gating import LOADS, METRIC, Loaded, cost_pct, measured, result, table, tasks
from benchmarks.gating import engines
from benchmarks.load.scoring import Score
from benchmarks.machine.network import network_missing


def score_of(attainment):
    by_class = {"question": attainment, "document": attainment}
    return Score(attainment, by_class, 1.0, 1.0, {"question": 0.2, "document": 2.0}, {}, {"ok": 80}, 0.01)


def loaded(attained, texts, **moved):
    return Loaded([score_of(each) for each in attained], texts, ["a", "b"], moved, 0)


TOOK = {"off": [0.100, 0.120, 0.200], "on": [0.103, 0.121, 0.150]}


def found(texts=("a", "b")):
    on = loaded([0.9, 0.8, 0.7], list(texts), kv_received_bytes=5.0, kv_promotions=3.0, kv_held_seconds=1.5)
    return result({"off": loaded([0.5, 0.6, 0.7], ["a", "b"], kv_received_bytes=5.0), "on": on}, TOOK)


def test_the_figures_that_are_asked_for():
    told = json.loads(json.dumps(found()))
    assert told["attainment"] == {"off": 0.6, "on": 0.8}
    assert (told["gain"], told["promotions"], told["tokens_equal"]) == (1.333, 3.0, True)
    assert told["kv_bytes"] == {"off": 5.0, "on": 5.0}
    assert told["uncontended_cost_pct"] == pytest.approx(100 * 0.001 / 0.12, abs=0.01)


def test_an_answer_that_differs_is_told():
    assert not found(texts=("a", "c"))["tokens_equal"]


def test_the_cost_is_that_of_the_median_pair_and_may_be_negative():
    assert cost_pct({"off": [1.0, 2.0, 4.0], "on": [0.9, 1.9, 5.0]}) == pytest.approx(-5.0)


def test_the_table_has_a_row_for_each_run():
    rows = table(found()).splitlines()
    assert len(rows) == 1 + 3 + 3 + 1
    assert "3 promotions" in rows[-1]


def test_the_story_of_a_promoted_transfer_follows_the_table():
    on = loaded([0.9], ["a", "b"])._replace(story=["It was held."])
    told = result({"off": loaded([0.5], ["a", "b"]), "on": on}, TOOK)
    assert table(told).splitlines()[-2:] == ["A transfer that was promoted in time:", "  It was held."]
    assert json.loads(json.dumps(told))["story"] == ["It was held."]


def test_documents_move_more_and_are_due_later():
    question, document = tasks(0.25, 3.0)
    assert document.prompt.mean > 5 * question.prompt.mean
    assert document.targets.ttft_s > question.targets.ttft_s


def test_prompts_may_be_shorter():
    for whole, half in zip(tasks(0.25, 3.0), tasks(0.25, 3.0, 0.5), strict=True):
        assert (half.prompt.mean, half.prompt.high) == (whole.prompt.mean / 2, whole.prompt.high / 2)


def test_figures_are_found_in_the_metrics_of_both_kinds():
    reference = "# TYPE slackline_kv_promotions gauge\nslackline_kv_promotions 3.0\n"
    vllm = '# HELP slackline:kv_promotions_total x\nslackline:kv_promotions_total{engine="0",model_name="m"} 3.0\n'
    created = 'slackline:kv_promotions_created{engine="0"} 1.7e+09\n'
    assert METRIC.findall(reference) == METRIC.findall(vllm) == [("kv_promotions", "3.0")]
    assert METRIC.findall(created) == [("kv_promotions_created", "1.7e+09")]


def given(**options):
    names = ("rate", "per_task", "gbit", "question", "document", "share", "pairs", "seeds")
    return argparse.Namespace(**{**dict.fromkeys(names), "tries": 1, "off_policy": "", **options})


def test_what_is_not_given_is_as_the_kind_of_engine_has_it(monkeypatch):
    asked = []
    monkeypatch.setattr(bench_gating, "vllm_missing", lambda: None)
    monkeypatch.setattr(bench_gating, "vllm_measured", lambda args, seeds, host: asked.append((args, seeds)) or {})
    monkeypatch.setattr(bench_gating, "second_host", lambda gbit: pytest.MonkeyPatch.context())
    found = measured("vllm", given(rate=0.3), quick=True)
    [(args, seeds)] = asked
    load = LOADS["vllm"]
    assert (args.rate, args.per_task, args.gbit, args.share, seeds) == (0.3, load.quick, load.gbit, load.share, [700])
    assert (found["rate"], found["seeds"]) == (0.3, [700])


@pytest.mark.parametrize("policy", ["", "fair_sharing"])
def test_the_mode_off_may_have_a_daemon_that_lets_all_go(monkeypatch, policy):
    """Its transfers then have as few unsent bytes in their sockets as those of the other mode."""
    ran = []
    monkeypatch.setattr(bench_gating, "second_host", lambda gbit: pytest.MonkeyPatch.context())
    monkeypatch.setattr(
        bench_gating, "loaded", lambda args, policy, seeds, host: ran.append(policy) or loaded([0.5], ["a", "b"])
    )
    monkeypatch.setattr(bench_gating, "uncontended", lambda pairs, gbit, host, modes: ran.append(modes) or TOOK)
    told = measured("reference", given(off_policy=policy), quick=True)
    assert ran == [policy, "mfs", {"off": policy, "on": "mfs"}]
    assert told["policies"] == {"off": policy or "off", "on": "mfs"}
    assert table(told).splitlines()[1].split()[0] == (policy or "off")


def test_without_vllm_its_row_says_so(monkeypatch):
    monkeypatch.setattr(bench_gating, "vllm_missing", lambda: "no real vLLM")
    assert measured("vllm", given(), quick=True) == {"skipped": "no real vLLM"}


@pytest.mark.slow
@pytest.mark.skipif(network_missing() is not None, reason=network_missing() or "")
def test_the_whole_command_runs_in_a_small_form(monkeypatch, capsys):
    monkeypatch.setenv("QUICK", "1")
    for name in ("FLEET_TOKEN", "ENGINE_NETWORKS"):  # the command sets them
        monkeypatch.setenv(name, "")
    monkeypatch.delenv("BENCH_NICE", raising=False)
    monkeypatch.setattr(bench_gating, "WITNESSES", 2)
    monkeypatch.setattr(engines, "EACH", 1)
    monkeypatch.setattr(bench_gating, "stop_on_sigterm", lambda: None)
    wanted = ["--engines", "reference", "--per-task", "4", "--pairs", "1", "--tries", "1"]
    monkeypatch.setattr("sys.argv", ["bench_gating", *wanted])
    bench_gating.main()
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(told) == {"reference"}
    figures = told["reference"]
    assert set(figures["attainment"]) == {"off", "on"}
    assert all(0.0 <= attained <= 1.0 for attained in figures["attainment"].values())
    assert figures["kv_bytes"]["off"] == figures["kv_bytes"]["on"] > 0, "the same requests in both modes"
    assert figures["tokens_equal"]
    assert {"promotions", "uncontended_cost_pct", "gain", "story"} <= set(figures)
    link_ms = 1e3 * 1000 * 28 * 128 / 25e6
    assert all(took_ms > link_ms for took_ms in figures["uncontended_ms"].values()), "bytes go over the link"
    assert (figures["per_task"], figures["seeds"]) == (4, [bench_gating.FIRST_SEED])
    for runs in figures["runs"].values():
        assert sum(runs[0]["outcomes"].values()) == 8, "all requests count"
