"""What bench-prune prints last: a JSON object with the figures that are asked for, by gateways and load."""

import json
from functools import partial

import pytest

from benchmarks import bench_prune


@pytest.fixture(scope="module")
def told():
    """A whole QUICK run, of shorter runs and with a knee that is known less exactly."""
    with pytest.MonkeyPatch.context() as patch:
        lines = []
        patch.setenv("QUICK", "1")
        patch.setattr("sys.argv", ["bench_prune"])
        patch.setattr(bench_prune, "QUICK_S", 1.0)
        patch.setattr(bench_prune, "find_knee", partial(bench_prune.find_knee, tolerance=0.3))
        patch.setattr("builtins.print", lambda text, **how: lines.append(text))
        bench_prune.main()
    return json.loads(lines[-1])


def test_attainment_is_by_gateways_load_and_variant(told):
    assert set(told["attainment"]) == {"2"}
    by_load = told["attainment"]["2"]
    assert set(by_load) == {"1", "1.7"}
    for attained in by_load.values():
        assert set(attained) == {"off", "on", "scorpio"}
        assert all(0.0 < each <= 1.0 for each in attained.values())
    assert by_load["1.7"]["off"] < by_load["1"]["off"], "past saturation fewer are in time"


def test_pruned_requests_are_counted_with_those_that_made_it(told):
    for load in ("1", "1.7"):
        assert 0 <= told["pruned_made_it"]["2"][load] <= told["pruned"]["2"][load]
    assert told["pruned"]["2"]["1.7"] > 0


def test_the_ratio_is_on_over_off(told):
    for load, attained in told["attainment"]["2"].items():
        assert told["ratio"]["2"][load] == pytest.approx(attained["on"] / attained["off"], abs=0.001)
    assert told["worst"] == min(told["ratio"]["2"].values())
    assert (told["budget"], told["seeds"], told["fleet"]) == (bench_prune.BUDGET, [bench_prune.SEEDS[0]], "common")
