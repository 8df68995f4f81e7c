"""Replicas, tightness, composition and request goodput of Concord with an analyser that was trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from benchmarks.reproduce.concord import section, sensitivity, trained_sensitivity, training
from benchmarks.reproduce.concord.chance import CHANCE
from benchmarks.reproduce.concord.lab import (
    AUTELLIX,
    CONCORD,
    LTR,
    ORACLE,
    RECORDED,
    SARATHI,
    TRAINED,
    Case,
    LabFigures,
    System,
    analyser_of,
)
from benchmarks.reproduce.concord.request_goodput import request_goodput
from tests.benchmarks.reproduce.test_concord import earned

EARNS = {TRAINED.name: 9.0, CHANCE.name: 12.0, LTR.name: 10.0, AUTELLIX.name: 4.0, SARATHI.name: 5.0}
KEPT = {"latency": 0.9, "compound": 0.1}


class Fixed:
    """Systems that earn the same in every case; one that is told to count requests serves three times as many."""

    quick = False

    def figures(self, name: str, case: Case) -> LabFigures:
        times = 3.0 if case.count == "requests" else 1.0
        return replace(earned(EARNS[name])[0], requests_per_s=times * EARNS[name], by_kind=KEPT)


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Fixed:
    def run(system: System, case: Case) -> LabFigures:
        return earned(15.0)[0] if system.exchanged == ("giving_up",) else earned(0.0)[0]

    def at_these(system: System, cases: Sequence[Case]) -> list[LabFigures]:
        return earned(20.0) if system == ORACLE else earned(0.0)

    monkeypatch.setattr(trained_sensitivity, "run", run)
    monkeypatch.setattr(trained_sensitivity, "at_these", at_these)
    monkeypatch.setattr(trained_sensitivity, "Lab", lambda systems, quick, progress: Fixed())
    return Fixed()


def test_request_goodput_is_of_runs_that_were_told_to_count_requests(lab: Fixed) -> None:
    found = request_goodput(lab, TRAINED.name, 600, (1, 2), "here")  # type: ignore[arg-type]
    assert (found.ours, found.theirs, found.reached, found.reason) == (2.7, 2.3, True, "")


def test_each_form_of_calm_is_judged_with_the_trained_analyser(lab: Fixed) -> None:
    made = trained_sensitivity.reproduce(False, lambda line: None)
    assert {claim.analyser for claim in made.claims} == {"trained"}
    assert all(claim.claim.startswith("trained analyser") for claim in made.claims)
    assert {(claim.part, claim.figure) for claim in made.claims} == set(trained_sensitivity.PARTS.items())
    assert [table.part for table in made.tables] == list(trained_sensitivity.PARTS)
    judged = [(claim.figure, claim.verdict) for claim in made.claims]
    single = [("Fig. 6.2",), ("Fig. 6.9",), ("Fig. 6.10", "Fig. 6.10"), ("Fig. 6.8",)]
    assert judged == [(each, verdict) for part in single for verdict in ("printed", "changed") for each in part]
    assert [claim.ours for claim in made.claims if claim.figure == "Fig. 6.9"] == [0.9, 1.2]


def test_a_figure_can_be_run_alone(lab: Fixed) -> None:
    made = trained_sensitivity.reproduce(False, lambda line: None, ["trained_slos", "oracle"])
    assert {claim.part for claim in made.claims} == {"trained_slos"}
    assert [table.part for table in made.tables] == ["trained_slos"]


def test_why_a_figure_is_missed_is_counted_in_runs_of_the_worst_case(lab: Fixed) -> None:
    made = trained_sensitivity.reproduce(False, lambda line: None).claims
    replicas = next(claim for claim in made if claim.figure == "Fig. 6.8")
    assert (replicas.ours, replicas.reached) == (0.9, False)
    assert replicas.reason == (
        "engines: 1; of latency, compound programs CALM kept 90, 10 % and LTR 90, 10 %. With the oracle's giving-up "
        "rule in place of its own CALM earns 1.50 times as much as LTR there, and the oracle 2.00 times"
    )
    over_sarathi = next(claim for claim in made if "Sarathi-Serve" in claim.claim)
    assert (over_sarathi.ours, over_sarathi.reached, over_sarathi.reason) == (1.8, True, "")


def test_a_table_has_a_column_for_each_form_of_calm(lab: Fixed) -> None:
    base = Case(4.0, 600, 8)
    alone = sensitivity.tables(lab, replace(base, programs=60))[0]
    assert list(alone.columns)[-2:] == ["times the best other, tokens", "requests (tokens are what is maximised)"]
    assert alone.title.endswith("60 programs an engine, one seed")
    (both,) = sensitivity.tables(lab, base, (TRAINED.name, CHANCE.name), ["Fig. 6.9"])
    assert len(both.columns) == len(both.rows[0])
    assert both.rows[0] == ["0.8", 9, 12, 10, 4, 5, 0.9, 0.9, 1.2, 1.2]


def test_the_noise_models_figures_are_of_the_same_cases() -> None:
    assert CONCORD.name == TRAINED.name
    base = Case(sensitivity.RATE, trained_sensitivity.PROGRAMS, sensitivity.SEED)
    first = sensitivity.claims(Fixed(), base)[0]
    assert first.setting.endswith("600 programs (some 2,700 requests) an engine, more where all are single")
    seeds = {*trained_sensitivity.SEEDS, sensitivity.SEED}
    assert not seeds & {*training.TRAINING_SEEDS, training.RECORDING_SEED}
    assert set(trained_sensitivity.PARTS) <= set(section.OWN_PARTS)


def test_as_much_is_recorded_of_each_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Case] = []
    monkeypatch.setitem(analyser_of.__globals__, "analyser", asked.append)
    for engines in (1, 4):
        analyser_of(Case(4.0 * engines, 10_000, 1, engines=engines))
    analyser_of(Case(16.0, 2_000, 1, engines=4))
    assert [each.programs for each in asked] == [RECORDED, 4 * RECORDED, 2_000]
