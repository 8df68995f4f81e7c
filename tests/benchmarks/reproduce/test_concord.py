"""What is computed from Concord's runs: arrivals, the load at 90 %, engines saved."""

import json
from dataclasses import fields

import numpy as np
import pytest

from benchmarks.reproduce.concord import section as concord
from benchmarks.reproduce.concord import sensitivity as concord_sensitivity
from benchmarks.reproduce.concord.lab import (
    AUTELLIX,
    CONCORD,
    LTR,
    ORACLE,
    SARATHI,
    Case,
    LabFigures,
    arrivals,
    instance,
    run,
)
from benchmarks.reproduce.concord.latency import over
from benchmarks.reproduce.concord.oracle import BORROWED, candidates
from benchmarks.reproduce.concord.oracle import claims as oracle_claims
from benchmarks.reproduce.concord.sweep import TITLE, choices, finite, stored_best


def earned(tokens_per_s):
    values = {field.name: 0.0 for field in fields(LabFigures)}
    return [LabFigures(**{**values, "tokens_per_s": tokens_per_s})]  # type: ignore[arg-type]


@pytest.mark.parametrize("cv", [None, 1.0, 3.0])
def test_arrivals_have_the_rate_asked_for_and_only_grow(cv):
    times = arrivals(Case(3.0, 4000, 2, cv=cv))
    assert len(times) == 4000
    assert np.all(np.diff(times) >= 0)
    assert 4000 / times[-1] == pytest.approx(3.0, rel=0.15)
    assert arrivals(Case(3.0, 50, 3, cv=cv)) != times[:50]


def test_the_load_at_ninety_per_cent_is_interpolated():
    curve = {1.0: earned(100.0), 2.0: earned(200.0), 3.0: earned(240.0)}  # 100, 100, 80 a program
    assert concord.light_share_rate(curve) == pytest.approx(2.5)


def test_engines_saved_are_those_the_baseline_needs_more():
    """At 3 programs/s an engine Concord earns 80 a program; the baseline does so at 1.5: twice the engines."""
    grid = {
        CONCORD.name: {1.0: earned(100.0), 2.0: earned(200.0), 3.0: earned(240.0)},
        LTR.name: {1.0: earned(100.0), 2.0: earned(120.0), 3.0: earned(90.0)},
    }
    assert concord.savings(grid, LTR.name) == pytest.approx([50.0, 50.0])
    assert concord.savings(grid, CONCORD.name) == []


def test_every_candidate_of_the_sweep_can_be_built():
    for name, systems in choices().items():
        assert all(system.name == name for system in systems)
        assert len({(system.text, system.history) for system in systems}) == len(systems)
        for system in systems:
            built = instance(system)
            assert built.max_num_seqs >= system.slots


def test_what_never_came_has_no_figure():
    assert (finite(1.234), finite(float("inf"))) == (1.23, None)


def test_latency_is_judged_by_what_came():
    never, none = float("inf"), (0.0, 0.0)
    assert over(10.0, 4.0, none)[:2] == (2.5, True)
    assert over(4.0, 10.0, none)[:2] == (0.4, False)
    assert over(9.0, 10.0, none, 0.9)[:2] == (0.9, True)
    assert over(never, 4.0, (0.1, 0.0))[:2] == (None, True)
    assert over(4.0, never, (0.0, 0.1))[:2] == (None, False)
    assert over(never, never, (0.9, 0.6))[:2] == (None, None)  # two that never come are not compared


def test_why_latencies_are_not_compared_is_counted_in_the_run():
    never = float("inf")
    assert "60 % of Concord's and 90 % of the baseline's never come" in over(never, never, (0.9, 0.6))[2]
    assert "6 % of Concord's and 2 % of the baseline's never come" in over(4.0, never, (0.02, 0.06))[2]
    assert "0 % of Concord's and 55 % of the baseline's never come" in over(never, 4.0, (0.55, 0.0))[2]


def test_a_run_counts_what_never_came():
    found = run(SARATHI, Case(60.0, 600, 1))
    for key, share in found.never.items():
        median, p95 = getattr(found, key)
        assert (share > 0.5, share > 0.05) == (median == float("inf"), p95 == float("inf")), key
    assert max(found.never.values()) > 0.05


def test_no_conclusion_over_what_was_built_from_a_description():
    def at(tokens):
        values = {field.name: 1.0 for field in fields(LabFigures)}
        return {rate: [LabFigures(**{**values, "tokens_per_s": each})] for rate, each in tokens.items()}

    grid = {name: at({1.0: 100.0, 2.0: 150.0, 3.0: 160.0}) for name in (LTR.name, AUTELLIX.name, SARATHI.name)}
    grid |= {
        CONCORD.name: at({1.0: 100.0, 2.0: 200.0, 3.0: 280.0}),
    }
    made = concord._grid_claims(grid)
    judged = {claim.claim: claim.reached for claim in made if claim.figure == "Fig. 6.5"}
    assert [text for text, reached in judged.items() if reached is None] == [
        "share of the rates at which goodput is the highest of all, including Autellix (%)",
        "resources saved over Autellix, least (%; the paper: 28.5 to 83.2)",
        "resources saved over Autellix, most (%; the paper: 28.5 to 83.2)",
    ]
    assert (
        judged["share of the rates at which goodput is the highest of those built from their papers or code (%)"]
        is True
    )
    assert judged["resources saved over LTR and Sarathi-Serve, least (%; the paper: 28.5 to 83.2)"] is True
    head = {name: at({4.0: 100.0})[4.0] for name in (CONCORD.name, LTR.name, AUTELLIX.name)}
    assert [claim.reached for claim in concord._headline(head, (1,))] == [False, None]


class Fixed:
    """Systems that earn what is said, whatever the case; LTR falls behind Autellix on four engines."""

    quick = False

    def figures(self, name, case):
        earned_by = {CONCORD.name: 10.0, LTR.name: 5.0 if case.engines < 4 else 3.0, AUTELLIX.name: 4.0}
        return earned(earned_by.get(name, 2.0))[0]


def test_over_the_best_baseline_there_is_no_conclusion_where_that_is_autellix():
    made = {claim.figure: claim for claim in concord_sensitivity.claims(Fixed(), Case(4.0, 600, 8))[:3]}
    assert (made["Fig. 6.8"].ours, made["Fig. 6.8"].reached) == (2.0, None)
    assert (made["Fig. 6.9"].ours, made["Fig. 6.9"].reached) == (2.0, False)
    assert (made["Fig. 6.10"].ours, made["Fig. 6.10"].reached) == (2.0, True)


def of_kinds(tokens, compound=0.8):
    values = {field.name: 1.0 for field in fields(LabFigures)}
    kinds = {"compound": compound, "latency": 1.0}
    return LabFigures(**{**values, "tokens_per_s": tokens, "by_kind": kinds})  # type: ignore[arg-type]


def test_an_oracle_that_earns_less_than_calm_is_no_upper_bound():
    def made(oracle):
        grid = {
            CONCORD.name: {2.0: of_kinds(90.0), 4.0: of_kinds(95.0)},
            ORACLE.name: {2.0: of_kinds(oracle, 0.9), 4.0: of_kinds(100.0)},
            BORROWED: {2.0: of_kinds(72.0, 0.6), 4.0: of_kinds(99.0)},
        }
        head = {name: [of_kinds(tokens)] for name, tokens in ((CONCORD.name, 95.0), (ORACLE.name, 100.0))}
        return oracle_claims(head, grid, (1,))

    head, most, check = made(98.0)
    assert (head.ours, head.reached) == (5.0, True)
    assert (most.ours, most.reached) == (8.16, True)
    assert (check.ours, check.reached) == (1.053, True)
    assert "0.80 times CALM's goodput at 2 programs/s, because it keeps 60 instead of 90 %" in check.reason
    _, most, check = made(85.0)
    assert (most.reached, check.reached) == (None, False)


def test_the_oracle_has_settings_of_its_own():
    found = candidates()
    assert {system.foresight for system in found} == {"oracle"}
    assert {system.history for system in found} == {None, 1.0, 1.25, 1.75}
    assert len({system.text for system in found}) == len(found)


def test_calms_settings_are_those_of_the_stored_sweep(tmp_path):
    with pytest.raises(RuntimeError, match="run --paper concord first"):
        stored_best(file=tmp_path / "none.json")
    packed = choices()[CONCORD.name]
    rows = [[each.name, each.text, 100.0, 500.0 if each is packed[2] else 10.0] for each in packed]
    (tmp_path / "concord.json").write_text(json.dumps({"tables": [{"title": TITLE, "rows": rows}]}))
    assert stored_best(file=tmp_path / "concord.json") == packed[2]


@pytest.mark.simulated
def test_the_oracle_can_be_run_alone():
    section = concord.reproduce(lambda line: None, True, ("oracle",))
    assert {claim.part for claim in section.claims} == {"oracle"}
    assert section.settings_text == ""
