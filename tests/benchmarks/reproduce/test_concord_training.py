"""The analyser of Concord's runs is trained on other seeds, from what a gateway would have known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.reproduce.__main__ import STORE
from benchmarks.reproduce.concord import (
    ablation,
    chance,
    oracle,
    section,
    sensitivity,
    sweep,
    trained_systems,
    training,
)
from benchmarks.reproduce.concord.lab import (
    CONCORD,
    MIX,
    ORACLE,
    RECORDED,
    TRAINED,
    Case,
    LabFigures,
    analyser_of,
    full_batch,
)
from benchmarks.reproduce.concord.trained import claims, exchanged
from controller.predict.pattern_graphs import Call, graph_of, kind_of, set_of
from tests.benchmarks.reproduce.test_concord import earned

KIND = kind_of("model", "app")


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(training, "FOLDER", tmp_path)
    monkeypatch.setattr(training, "PROGRAMS", 30)
    monkeypatch.setattr(training, "TRAINING_SEEDS", (901,))
    training.forest.cache_clear()
    training.unloaded.cache_clear()
    return tmp_path


@pytest.fixture(autouse=True)
def forgotten() -> None:
    training.forest.cache_clear()
    training.unloaded.cache_clear()
    analyser_of.__globals__["analyser"].cache_clear()


def test_no_run_that_is_compared_has_a_seed_that_was_trained_on() -> None:
    compared = {*section.SEEDS, *ablation.SEEDS, *oracle.SEEDS, oracle.GRID_SEED, sweep.SEED, sensitivity.SEED, 7}
    assert not compared & {*training.TRAINING_SEEDS, training.RECORDING_SEED}
    assert training.RECORDING_SEED not in training.TRAINING_SEEDS


def test_an_answer_is_known_once_it_has_ended(small: Path) -> None:
    found = training.programs(MIX, 901)
    features, tokens = training.answers(found, full_batch())
    assert len(features) == len(tokens) == sum(len(stage.calls) for each in found for stage in each.stages)
    compound = next(each for each in found if not each.single)
    alone, lengths = training.answers([compound], full_batch())
    width = len(compound.stages[0].calls)
    assert all(row[2:] == (0.0, 0.0, 0.0, 0.0) for row in alone[:width])  # nothing has ended yet
    assert [row[3] for row in alone[width:]] == sorted(row[3] for row in alone[width:])
    assert alone[width][3] == width
    assert alone[width][4] in lengths[:width]


def test_a_forest_is_trained_once_and_again_where_its_file_is_damaged(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = training.forest(MIX, full_batch())
    (file,) = small.iterdir()
    training.forest.cache_clear()
    train = training.length_forest.train
    monkeypatch.delattr(training.length_forest, "train")
    assert training.forest(MIX, full_batch()).to_bytes() == first.to_bytes()
    training.forest.cache_clear()
    monkeypatch.setattr(training.length_forest, "train", train, raising=False)
    file.write_bytes(b"damaged")
    assert training.forest(MIX, full_batch()).to_bytes() == first.to_bytes()
    assert [each.read_bytes() for each in small.iterdir()] == [first.to_bytes()]


def test_graphs_are_recorded_at_the_rate_of_the_run(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "LEAST_GRAPHS", 3)
    light, heavy = (analyser_of(Case(rate, 60, 1)) for rate in (0.5, 6.0))
    assert light.token_s is None
    assert {app: len(each) for app, each in light.graphs.items()} != {
        app: len(each) for app, each in heavy.graphs.items()
    }
    assert analyser_of(Case(0.5, 60, 2)) is light
    monkeypatch.setattr(training, "LEAST_GRAPHS", RECORDED)
    analyser_of.__globals__["analyser"].cache_clear()
    assert analyser_of(Case(0.5, 60, 1)).token_s == full_batch().token_s  # too few: those of a full batch


def test_an_application_of_which_too_little_was_recorded_keeps_its_graphs(small: Path) -> None:
    before = training.unloaded(MIX, full_batch())
    calls = [
        [Call(KIND, 0.0, 2.0, 50 + number, 30), Call(KIND, 3.0, 7.0, 50, 30)] for number in range(training.LEAST_GRAPHS)
    ]
    assert training.observed(before, {"chatbot": calls}) is before
    assert training.observed(before, {"chatbot": calls, "deep_research": calls}).token_s is None
    assert training.observed(before, {"chatbot": calls, "deep_research": [calls[0]] * len(calls)}) is before


def test_what_later_stages_took_of_what_was_foretold() -> None:
    graphs = set_of([graph_of([Call(KIND, 0.0, 2.0, 50, 30), Call(KIND, 3.0, 7.0, 50, 30)])], [1.0], {})
    asked = [Call(KIND, 10.0, 13.0, 50, 30), Call(KIND, 14.0, 15.0, 50, 30)]
    assert training.later_shares(graphs, asked) == pytest.approx([2.0 / 5.0], rel=0.05)  # its pause and its second


def test_the_gap_is_split_by_what_the_oracle_lends() -> None:
    split = exchanged(TRAINED)
    grid = {CONCORD.name: {4.0: earned(70.0)[0]}, ORACLE.name: {4.0: earned(100.0)[0]}}
    grid |= {
        system.name: {4.0: earned(value)[0]} for system, value in zip(split.values(), (72.0, 75.0, 90.0), strict=True)
    }
    most, bound = claims(grid)
    assert (most.ours, most.reached, most.analyser, bound.reached) == (30.0, False, "trained", True)
    assert "28.0 % with its upper bound of the length, 25.0 % with its graph, 10.0 % with its giving-up" in most.reason


def test_where_an_ablation_earns_more_the_reason_tells_what_each_seed_kept() -> None:
    calm, oracle_, blind, sjf = (system.name for system in ablation.SYSTEMS)
    head = {name: [kept(value) for value in values] for name, values in (
        (calm, (60.0, 80.0)), (oracle_, (100.0, 100.0)), (blind, (50.0, 60.0)), (sjf, (40.0, 100.0)))}  # fmt: skip
    head[sjf][1] = replace(head[sjf][1], by_kind={"latency": 0.5, "deadline": 0.994, "compound": 0.2})
    gap, over_blind, over_sjf = ablation.claims(head, (1, 2), 700)
    assert (gap.ours, gap.reached, over_blind.ours, over_blind.reason) == (30.0, False, 1.2, "")
    assert (over_sjf.ours, over_sjf.reached, over_sjf.analyser, over_sjf.part) == (0.8, False, "trained", "ablation")
    assert over_sjf.reason == (
        "CALM's goodput over the other's: seed 1 1.500, of latency, deadline, compound programs CALM kept 90, 80, 0 % "
        "and the other 90, 80, 0 %; seed 2 0.800, of latency, deadline, compound programs CALM kept 90, 80, 0 % and "
        "the other 50, 99, 20 %"
    )
    assert ablation.table(head, (1, 2)).rows[-1] == [sjf, 2, 100, 0.5, 0.994, 0.2]


def test_the_ablation_runs_calm_at_the_rule_that_the_sweep_found_best() -> None:
    tables = json.loads((STORE / "concord.json").read_text())["tables"]
    (swept,) = [table for table in tables if table["title"] == "The trained analyser's rule for stages, swept"]
    assert max(swept["rows"], key=lambda row: sum(row[1:]))[0] == ablation.SYSTEMS[0].text


def test_the_oracle_runs_at_the_settings_of_its_own_sweep() -> None:
    tables = json.loads((STORE / "concord.json").read_text())["tables"]
    (swept,) = [table for table in tables if "the comparison uses the best at either load" in table["title"]]
    assert (swept["part"], swept["title"]) == (oracle.PART, oracle.TITLE)
    for column, load in enumerate(sweep.LOADS, start=1):
        most = max(swept["rows"], key=lambda row, column=column: row[column])
        assert oracle.stored_best()[load].text == most[0]


def test_with_the_trained_analyser_too_the_oracle_has_what_earns_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gap to it is not made smaller by settings that its sweep found worse at this load."""
    with pytest.raises(RuntimeError, match="--part oracle first"):
        oracle.stored_best(tmp_path / "none.json")
    early = ORACLE.variant(history=1.75)
    earns = {None: 7.5, 1.75: 8.0}
    monkeypatch.setattr(oracle, "run", lambda system, case: earned(earns[system.history])[0])
    monkeypatch.setattr(oracle, "stored_best", lambda: {2.0: ORACLE, 4.0: early})
    copied = ORACLE.variant()  # as another process has it
    found = ablation.at_these(copied, [Case(4.0, 10, seed) for seed in (1, 2)])
    assert [each.tokens_per_s for each in found] == [8.0, 8.0]
    assert oracle.at_these(TRAINED, [Case(4.0, 10, 1)])[0].tokens_per_s == 7.5


def test_the_oracle_has_whichever_of_its_settings_earns_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an upper bound only where no setting of its own that is known earns more."""
    early = ORACLE.variant(history=1.75)
    earns = {(None, 3.0): 7.0, (1.75, 3.0): 6.0, (None, 4.0): 7.5, (1.75, 4.0): 8.0}
    monkeypatch.setattr(oracle, "run", lambda system, case: earned(earns[system.history, case.rate])[0])
    for rate, most in ((3.0, 7.0), (4.0, 8.0)):
        cases = [Case(rate, 10, seed) for seed in (1, 2)]
        assert [each.tokens_per_s for each in oracle.upper_bound({2.0: ORACLE, 4.0: early}, cases)] == [most, most]
    assert oracle.upper_bound({2.0: ORACLE, 4.0: ORACLE}, [Case(3.0, 10, 1)])[0].tokens_per_s == 7.0


def test_what_chance_was_chosen_with_is_not_what_it_is_judged_by() -> None:
    tuned = {sweep.SEED, 78, 81, 82, 83, *training.TRAINING_SEEDS, training.RECORDING_SEED}
    assert not tuned & set(chance.SEEDS)
    assert dict(chance.CHANCE.settings) == {**TRAINED.settings, "by_chance": True}
    assert chance.CHANCE.variant(name=TRAINED.name, settings=TRAINED.settings) == TRAINED


def kept(tokens_per_s: float) -> LabFigures:
    return replace(earned(tokens_per_s)[0], by_kind={"latency": 0.9, "deadline": 0.8})


def test_chance_is_judged_beside_the_printed_rule_and_the_oracle() -> None:
    grid = {name: {4.0: [kept(value) for value in values]} for name, values in (
        (TRAINED.name, (60.0, 80.0)), (chance.CHANCE.name, (90.0, 94.0)), (ORACLE.name, (100.0, 100.0)))}  # fmt: skip
    (claim,) = chance.claims(grid, (81, 82), 400)
    assert (claim.ours, claim.theirs, claim.reached, claim.verdict) == (8.0, 9.0, True, "changed")
    assert claim.reason == "CALM as printed stays 30.0 % below it on the same programs"
    rows = chance.table(grid, (81, 82)).rows
    assert [row[:5] for row in rows] == [
        [TRAINED.name, 4.0, 60, 80, 30.0], [chance.CHANCE.name, 4.0, 90, 94, 8.0], [ORACLE.name, 4.0, 100, 100, 0.0],
    ]  # fmt: skip
    assert rows[0][5:] == [0.9, 0.8, 0.0]


def test_the_oracle_must_not_lose_to_chance_unnoticed() -> None:
    grid = {name: {4.0: earned(value)} for name, value in (
        (TRAINED.name, 60.0), (chance.CHANCE.name, 120.0), (ORACLE.name, 100.0))}  # fmt: skip
    (claim,) = chance.claims(grid, (81,), 400)
    assert claim.reached is None, "an oracle that earns less is no upper bound"


def figures(tokens_per_s: float, throughput: float, ttft_s: float) -> LabFigures:
    never = dict.fromkeys(("ttft", "tbt", "deadline_e2e", "compound_e2e"), 0.0)
    pair = (ttft_s, ttft_s)
    return replace(kept(tokens_per_s), throughput=throughput, ttft=pair, tbt=pair, deadline_e2e=pair,
                   compound_e2e=pair, never=never)  # fmt: skip


def test_the_baselines_are_judged_with_the_trained_analyser() -> None:
    fast, slow = figures(140.0, 95.0, 1.0), figures(100.0, 100.0, 2.0)
    grid = {name: {2.0: [slow], 4.0: [slow, slow]} for name in trained_systems.BASELINES}
    grid[TRAINED.name] = {2.0: [replace(slow, tokens_per_s=99.5)], 4.0: [fast, replace(fast, tokens_per_s=116.0)]}
    grid[chance.CHANCE.name] = {2.0: [replace(slow, tokens_per_s=90.0)], 4.0: [fast, fast]}
    made = {claim.claim: claim for claim in trained_systems.claims(grid, (1, 2), 500)}
    ltr = made["trained analyser: token goodput over LTR (factor)"]
    assert (ltr.theirs, ltr.ours, ltr.reached, ltr.verdict) == (1.3, 1.28, False, "printed")
    assert ltr.reason.startswith("the printed rule counts goodput as sure")
    changed = made["trained analyser, goodput weighed by chance: token goodput over LTR (factor)"]
    assert (changed.ours, changed.reached, changed.verdict) == (1.4, True, "changed")
    assert made["trained analyser: token goodput over Autellix (factor)"].reached is None
    assert made["trained analyser: token goodput over EDF (factor)"].bar == 1.0
    share = "share of the rates at which goodput is the highest of those built from their papers or code (%)"
    assert made[f"trained analyser: {share}"].ours == 100.0
    assert made[f"trained analyser, goodput weighed by chance: {share}"].ours == 50.0
    share = made["trained analyser: throughput against Sarathi-Serve's, lowest of the seeds (%; the paper: 96)"]
    assert (share.ours, share.reached) == (95.0, False)
    waited = made["trained analyser: TTFT of latency-sensitive requests, median: LTR's over Concord's (factor)"]
    assert (waited.ours, waited.reached) == (2.0, True)
    assert all(claim.analyser == "trained" and claim.part == trained_systems.PART for claim in made.values())


def test_baselines_run_at_the_best_of_the_stored_sweep() -> None:
    found = {system.name: system for system in trained_systems.systems()}
    assert found["LTR"].text == sweep.stored_best("LTR").text
    assert found["LTR"].settings["promote_steps"] > 10_000
    assert all(found[calm.name].foresight == "trained" for calm in trained_systems.CALMS)
