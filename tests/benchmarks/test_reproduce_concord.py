"""What is computed from Concord's runs: arrivals, the load at 90 %, engines saved."""

from dataclasses import fields

import numpy as np
import pytest

from benchmarks.reproduce import concord
from benchmarks.reproduce.concord_lab import CONCORD, LTR, Case, Figures, arrivals, instance
from benchmarks.reproduce.concord_sweep import choices, finite


def earned(tokens_per_s):
    values = {field.name: 0.0 for field in fields(Figures)}
    return [Figures(**{**values, "tokens_per_s": tokens_per_s})]  # type: ignore[arg-type]


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
