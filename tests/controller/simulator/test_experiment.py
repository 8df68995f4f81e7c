import copy
import json
from pathlib import Path

import pytest

from controller.core.errors import ConfigError
from controller.simulator.__main__ import main, read_profile, read_trace
from controller.simulator.experiment import parse_experiment
from controller.simulator.report.summary import attainment
from controller.simulator.runner import find_knee, run_once

EXPERIMENTS = sorted((Path(__file__).parents[3] / "controller/simulator/experiments").glob("*.json"))
GOOD = {
    "name": "test",
    "instances": {
        "count": 2,
        "profile": {"prefill": {"a": 0.004, "b": 5e-5, "c": 1e-9}, "decode": {"a": 0.006, "b": 1e-7, "c": 1e-4}},
        "kv_tokens": 16384,
        "max_model_len": 4096,
        "max_num_seqs": 16,
    },
    "workload": {"kind": "mix", "mix": "4-task", "per_task": 10, "rate": 20},
    "policies": ["round_robin", {"label": "edf_8", "name": "edf_window", "overrides": {"pacing": {"window": 8}}}],
    "seeds": [1, 2],
    "settings": {"cutoff_s": 25},
}


def parsed(raw):
    return parse_experiment(raw, read_profile, read_trace)


def changed(path, value):
    raw = copy.deepcopy(GOOD)
    *parents, last = path.split(".")
    place = raw
    for parent in parents:
        place = place[int(parent)] if isinstance(place, list) else place[parent]
    place[int(last) if isinstance(place, list) else last] = value
    return raw


def test_a_good_file_is_read_whole():
    experiment = parsed(GOOD)
    assert len(experiment.settings.instances) == 2
    assert experiment.settings.instances[0].latency.prefill_b == 5e-5
    assert experiment.settings.cutoff_s == 25.0
    assert [each.label for each in experiment.contenders] == ["round_robin", "edf_8"]
    assert len(experiment.workload.demands(None, 1)) == 40
    assert len(experiment.workload.demands(5.0, 1)) == 40


@pytest.mark.parametrize(
    ("path", "value", "field", "message"),
    [
        ("surprise", 1, "surprise", "valid: .*instances"),
        ("workload.kind", "mux", "workload.kind", "valid: mix, tasks, trace, programs"),
        ("workload.mix", "5-task", "workload.mix", "valid: 2-task, 4-task"),
        ("workload.rate", -1, "workload.rate", "above 0"),
        ("workload.duration_s", 10, "workload.per_task", "either"),
        ("workload.lenght", 10, "workload.lenght", "valid: "),
        ("policies", ["nobody"], "policies[0].name", "valid: .*slackline"),
        ("policies", ["slackline", "slackline"], "policies", "label"),
        ("policies.1.overrides.pacing.window", 0, "policies[1].overrides.window", "at least 1"),
        ("policies.1.overrides.pacing", {"windoww": 3}, "policies[1].overrides.pacing.windoww", "valid: window"),
        ("instances.max_num_seqs", 0, "instances.max_num_seqs", "at least 1"),
        ("instances.batching", "magic", "instances.batching", "valid: .*chunked_prefill"),
        ("instances.batching_settings", {"x": 1}, "instances.batching_settings.x", "valid: long_prefill_tokens"),
        ("instances.scheduling_policy", "lifo", "instances.scheduling_policy", "valid: fcfs, priority"),
        ("instances.max_model_len", 10**9, "instances.max_model_len", "fit"),
        ("instances.profile", {"prefill_a": 1}, "instances.profile.prefill_b", "lacks prefill_b"),
        ("instances.profile", "missing.json", "profile", "No such file"),
        ("instances.count", "two", "instances.count", "integer"),
        ("instances.operators", {"rows": []}, "instances.operators.rows", "not empty"),
        ("instances.operators", 3, "instances.operators", "object or a path"),
        ("instances.operators", "missing.csv", "instances.operators", "No such file"),
        ("instances.operators", {"rows": [{"tokens": 1}]}, "instances.operators.rows[0].qkv_proj", "missing"),
        ("settings.progress_s", 0, "settings.progress_s", "above 0"),
        ("settings.leaps", "yes", "settings.leaps", "true or false"),
        ("settings.failures", [{"instance": 7, "at": 1}], "settings.failures.instance", "no instance 7"),
        (
            "policies",
            [{"name": "slackline", "engine": {"bathing": 1}}],
            "policies[0].engine.bathing",
            "valid: .*batching",
        ),
        (
            "policies",
            [{"name": "slackline", "engine": {"batching": "x"}}],
            "policies[0].engine.batching",
            "valid: .*calm",
        ),
        ("workload.stagger_s", -1, "workload.stagger_s", "above"),
        ("instances.role", "both", "instances.role", "valid: collocated, decode, prefill"),
        ("instances.role", "prefill", "instances.role", "need decode"),
        ("instances.tensor_parallel", 0, "instances.tensor_parallel", "at least 1"),
        ("settings.links", {"bandwidth_gb_s": 0}, "settings.links.bandwidth_gb_s", "above 0"),
        ("settings.links", {"scope": "moon"}, "settings.links.scope", "valid: port, pair, fabric"),
        ("settings.links", {"speed": 1}, "settings.links.speed", "valid: bandwidth_gb_s"),
        ("settings.links", {"failures": [{"at": 1}]}, "settings.links.failures[0].instance", "missing"),
        ("policies.1.overrides", {"migration": {"name": "x"}}, "policies[1].overrides.migration", "valid: .*tpot_budg"),
        ("policies.1.overrides", {"migrator": {"hold": 1}}, "policies[1].overrides.migrator.hold", "valid: .*hold_s"),
        ("seeds", [], "seeds", "empty"),
        ("seeds", [1.5], "seeds", "integer"),
        ("rates", ["fast"], "rates", "number"),
    ],
)
def test_a_bad_file_is_refused_with_the_field(path, value, field, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parsed(changed(path, value))
    assert caught.value.field == field


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_shipped_experiments_are_good(path):
    experiment = parsed(json.loads(path.read_text()))
    assert experiment.workload.demands(10.0, 1)


OPERATORS = Path(__file__).parents[3] / "controller/simulator/samples/operators_thin_cpu.json"


def test_measured_operators_are_read_from_json_and_csv(tmp_path):
    """The sample as it is and as a table; layers of a table are those of the model's shape."""
    raw = json.loads(OPERATORS.read_text())
    whole = parsed(changed("instances.operators", str(OPERATORS))).settings.instances[0].operators
    assert whole.layers == raw["layers"] == 6
    assert whole == parsed(changed("instances.operators", raw)).settings.instances[0].operators
    columns = list(raw["rows"][0])
    lines = [",".join(columns), *(",".join(str(row[name]) for name in columns) for row in raw["rows"])]
    table = tmp_path / "operators.csv"
    table.write_text("\n".join(lines) + "\n")
    found = parsed(changed("instances.operators", str(table))).settings.instances[0].operators
    assert (found.layers, found.curves) == (32, whole.curves)


def test_no_policy_changes_what_was_measured():
    with pytest.raises(ConfigError) as caught:
        parsed(changed("policies", [{"name": "slackline", "engine": {"operators": {}}}]))
    assert caught.value.field == "policies[0].engine.operators"


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "experiment.json"
    path.write_text(json.dumps(GOOD))
    return str(path)


def last_line(capsys):
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_compare_prints_a_table_and_ends_with_one_json_line(config, capsys):
    assert (
        main(["compare", config, "--rates", "10,400", "--variant", 'tight=slackline:{"pacing": {"share": 0.2}}']) == 0
    )
    found = last_line(capsys)
    assert [(e["rate"], e["policy"]) for e in found["entries"]] == [
        (rate, policy) for rate in (10.0, 400.0) for policy in ("round_robin", "edf_8", "tight")
    ]
    assert all(e["attainment"] == 1.0 for e in found["entries"] if e["rate"] == 10.0)
    assert found["seeds"] == [1, 2]


def test_run_reports_classes_and_the_queue(config, capsys):
    assert main(["run", config, "--policies", "slackline"]) == 0
    found = last_line(capsys)
    assert sum(each["requests"] for each in found["by_class"].values()) == found["requests"] == 40
    assert set(found["queue"]) == {"at_s", "queued", "waiting", "running", "instances"}


def test_goodput_lies_where_attainment_falls(config, capsys, tmp_path):
    raw = changed("workload.per_task", 60)
    Path(config).write_text(json.dumps(raw))
    assert main(["goodput", config, "--policies", "round_robin", "--seeds", "1"]) == 0
    rate = last_line(capsys)["goodput"]["round_robin"]
    assert main(["sweep", config, "--policies", "round_robin", "--seeds", "1", "--rates", f"{rate},{rate * 1.1}"]) == 0
    at, above = (entry["attainment"] for entry in last_line(capsys)["entries"])
    assert at >= 0.9 > above


def test_settings_are_changed_by_name(config, capsys):
    assert main(["compare", config, "--set", "edf_8.pacing.window=1", "--rates", "400", "--seeds", "1"]) == 0
    entries = {entry["policy"]: entry for entry in last_line(capsys)["entries"]}
    assert max(entries["edf_8"]["first_seed"]["queue"]["running"]) <= 2
    assert main(["compare", config, "--set", "nobody.pacing.window=1"]) == 2
    assert "valid: round_robin, edf_8" in capsys.readouterr().err


def test_a_wrong_file_ends_with_status_two_and_the_field(config, capsys):
    Path(config).write_text(json.dumps(changed("workload.mix", "none")))
    assert main(["compare", config]) == 2
    assert "field workload.mix" in capsys.readouterr().err
    Path(config).write_text("{")
    assert main(["run", config]) == 2
    assert "not JSON" in capsys.readouterr().err


def test_profiles_are_found_by_name(tmp_path):
    path = tmp_path / "profiles.json"
    path.write_text(json.dumps({"profiles": [{"id": "a/b", "aliases": ["ab"], "prefill": {}, "decode": {}}]}))
    assert read_profile(f"{path}#ab")["id"] == "a/b"
    with pytest.raises(ConfigError, match="valid: a/b"):
        read_profile(f"{path}#c")


def test_traces_are_read_and_cut_to_the_engine(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(
        "arrival_s,input_tokens,output_tokens,session,prefix_hashes\n0,100,10,s,a b\n4,99999,20,,\n6,50,5,,\n"
    )
    raw = changed("workload", {"kind": "trace", "path": str(path), "ttft_s": 2, "tpot_s": 0.1})
    demands = parsed(raw).workload.demands(None, 1)
    assert [d.at for d in demands] == [0.0, 4.0, 6.0]
    assert (demands[0].prefix, demands[0].workflow) == (("a", "b"), "s")
    assert demands[1].prompt_tokens + demands[1].output_tokens < 4096
    faster = parsed(raw).workload.demands(2.0, 1)
    assert faster[-1].at == pytest.approx(1.0)
    drawn = changed("workload", {**raw["workload"], "arrivals": "renewal", "count": 50})
    assert len(parsed(drawn).workload.demands(2.0, 1)) == 50
    path.write_text("arrival_s,input_tokens\n0,100\n")
    with pytest.raises(ConfigError, match="output_tokens"):
        parsed(raw)


def test_a_policy_may_bring_an_engine_of_its_own(config, capsys):
    raw = changed("policies", ["round_robin", {"label": "tiny", "name": "round_robin", "engine": {"max_num_seqs": 1}}])
    Path(config).write_text(json.dumps(raw))
    assert main(["compare", config, "--rates", "400", "--seeds", "1"]) == 0
    running = {e["policy"]: max(e["first_seed"]["queue"]["running"]) for e in last_line(capsys)["entries"]}
    assert running["tiny"] <= 2 < running["round_robin"]


def test_a_page_holds_every_chart_and_loads_nothing(config, capsys, tmp_path):
    Path(config).write_text(json.dumps(changed("workload.per_task", 60)))
    path = tmp_path / "page.html"
    assert main(["sweep", config, "--rates", "10,400", "--seeds", "1", "--html", str(path)]) == 0
    text = path.read_text()
    assert text.count('class="plotly-graph-div"') == 1 + 2 + 2 * (3 + 1)
    assert "Requests waiting, 400 requests/s" in text
    assert "<script src" not in text
    assert main(["goodput", config, "--policies", "round_robin", "--seeds", "1", "--html", str(path)]) == 0
    assert path.read_text().count('class="plotly-graph-div"') == 1 + 1 + 2 + 3 + 1
    assert "requests/s at 0.9" in path.read_text()
    assert main(["run", config, "--html", str(path)]) == 0
    assert path.read_text().count('class="plotly-graph-div"') == 1 + 3 + 1
    assert "Attainment by class" in path.read_text()
    capsys.readouterr()
    assert main(["run", config, "--html", str(tmp_path)]) == 2
    assert "Is a directory (field --html)" in capsys.readouterr().err


def test_the_line_of_attainment_is_drawn_where_the_file_says(config, capsys, tmp_path):
    Path(config).write_text(json.dumps(changed("level", 0.75)))
    path = tmp_path / "page.html"
    assert main(["compare", config, "--rates", "10", "--seeds", "1", "--html", str(path)]) == 0
    assert '"text":"0.75"' in path.read_text()


def test_goodput_tells_what_it_saw_at_each_rate(config, capsys):
    Path(config).write_text(json.dumps(changed("workload.per_task", 60)))
    assert main(["goodput", config, "--policies", "round_robin", "--seeds", "1"]) == 0
    found = last_line(capsys)
    line = found["lines"]["round_robin"]
    assert [probe["rate"] for probe in line] == sorted({probe["rate"] for probe in line})
    assert found["goodput"]["round_robin"] == max(probe["rate"] for probe in line if probe["attainment"] >= 0.9)
    assert any(probe["attainment"] < 0.9 for probe in line)
    (entry,) = found["entries"]
    assert (entry["policy"], entry["rate"]) == ("round_robin", found["goodput"]["round_robin"])
    assert entry["first_seed"]["distribution"]["ttft_s"]


def test_the_warm_up_counts_for_no_knee():
    """Nobody serves in the first 2 s: judged with them the fleet seems to bear a third less than it does."""
    raw = changed("workload.per_task", 60)
    raw["settings"]["failures"] = [{"instance": number, "at": 0, "for_s": 2} for number in (0, 1)]
    knees = []
    for warmup_s in (0.0, 3.0):
        experiment = parsed({**raw, "warmup_s": warmup_s, "seeds": [1]})
        knees.append(find_knee(experiment, experiment.contenders[0], 0.9, tolerance=0.2))
    assert knees[0] < 0.7 * knees[1]


@pytest.mark.simulated
def test_kairos_long_tail_is_as_the_worked_examples_say():
    """Near saturation a seed decides much; the order of the policies does not change with it."""
    path = next(path for path in EXPERIMENTS if path.stem == "kairos_prefill")
    experiment = parsed(json.loads(path.read_text()))
    attained = {}
    for each in experiment.contenders:
        runs = [run_once(experiment, each, None, seed).records for seed in experiment.seeds[:4]]
        attained[each.label] = sum(attainment(records) for records in runs) / len(runs)
    assert attained["fcfs"] < attained["kairos_printed"] < attained["kairos"]
    assert attained["fcfs"] == pytest.approx(0.66, abs=0.2)
    assert attained["kairos_printed"] == pytest.approx(0.77, abs=0.2)
    assert attained["kairos"] == pytest.approx(0.98, abs=0.03)
    assert attained["s_edf"] == pytest.approx(0.99, abs=0.03)


LEVELS = [{"ttft_s": 0.7, "tpot_s": 0.5}, {"ttft_s": 20.0, "tpot_s": 1.0}]
STAGES = [{**GOOD["instances"], "role": role} for role in ("prefill", "decode")]


def test_a_mapping_is_read_and_gives_requests_their_targets():
    raw = changed("settings", {"mapping": {"levels": LEVELS, "spread": 0.1}})
    experiment = parsed(raw)
    assert experiment.settings.mapping.levels[0].ttft_max_s == pytest.approx(0.77)
    result = run_once(experiment, experiment.contenders[0], None, 1)
    assert {record.targets.ttft_s <= 0.77 for record in result.records if record.slo_class == "medical_qa"} == {True}


def test_scaling_is_read_for_each_stage():
    raw = changed("settings", {"elastic": {"max_instances": 5, "decode": {"upper": 0.6}, "most": 6, "switch_s": 0.5}})
    elastic = parsed({**raw, "instances": STAGES}).settings.elastic
    assert (elastic.scaling.role, elastic.scaling.max_instances, elastic.scaling.upper) == ("prefill", 5, 0.8)
    assert (elastic.decode.role, elastic.decode.upper) == ("decode", 0.6)
    assert (elastic.most, elastic.switch_s) == (6, 0.5)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"mapping": {"levels": []}}, "settings.mapping.levels"),
        ({"mapping": {"levels": [{"ttft_s": 1}]}}, "settings.mapping.levels[0].tpot_s"),
        ({"mapping": {"levels": LEVELS, "spread": 1}}, "settings.mapping.spread"),
        ({"mapping": {"levels": LEVELS, "width": 1}}, "settings.mapping.width"),
        ({"elastic": {"decode": {}}}, "settings.elastic.decode"),
        ({"elastic": {"most": 0}}, "settings.elastic.most"),
        ({"elastic": {"upper": 0.1}}, "settings.elastic.lower"),
    ],
)
def test_wrong_mappings_and_scalings_name_their_field(settings, field):
    with pytest.raises(ConfigError) as caught:
        parsed(changed("settings", settings))
    assert caught.value.field == field


def test_roles_links_and_engines_by_role_are_read():
    group = GOOD["instances"]
    profile = {**group["profile"], "kv_bytes_per_token": 57_344, "kv_capacity_tokens_est": 65_536, "tp": 4}
    raw = changed("instances", [{**group, "role": role, "profile": profile} for role in ("prefill", "decode")])
    raw["settings"]["links"] = {
        "bandwidth_gb_s": 25,
        "scope": "pair",
        "failures": [{"instance": 0, "at": 1, "for_s": 2}],
    }
    both = {"prefill_engine": {"max_num_seqs": 2}, "decode_engine": {"batching": "kairos_decode"}}
    raw["policies"] = ["slackline", {"name": "slackline", "label": "other", "engine": {"block_size": 8}, **both}]
    experiment = parsed(raw)
    assert experiment.settings.links.failures[0].for_s == 2.0
    common = experiment.settings.instances
    assert [each.role for each in common] == ["prefill"] * 2 + ["decode"] * 2
    assert {(each.kv_bytes_per_token, each.tensor_parallel) for each in common} == {(57_344, 4)}
    assert {each.kv_tokens for each in common} == {16384}  # the file's own goes before the profile's
    assert common[0].spec("x").unit_cost == 4.0
    changed_ones = experiment.contenders[1].settings(experiment.settings).instances
    assert [(e.max_num_seqs, e.part.batching, e.block_size) for e in changed_ones] == [
        *[(2, "chunked_prefill", 8)] * 2,
        *[(16, "kairos_decode", 8)] * 2,
    ]
    result = run_once(experiment, experiment.contenders[1], 20.0, 1)
    assert {use.role for use in result.instances} == {"prefill", "decode"}
    assert attainment(result.records) > 0.9
