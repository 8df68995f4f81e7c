"""The restarted gateway's figures: how far bounds moved, and which workflows kept their deadline."""

import time

import pytest

from benchmarks import bench_restart
from benchmarks.bench_restart import WITHIN_S, drift_pct, kept


@pytest.mark.parametrize(
    ("before", "after", "pct"),
    [([100, 200, 300], [100, 200, 300], 0.0), ([100, 200, 300], [110, 180, 300], 10.0), ([100, 100], [50, 150], 50.0)],
)
def test_drift_is_the_median_change_either_way(before, after, pct):
    assert drift_pct(before, after) == pct


def test_a_drift_of_other_probes_is_none():
    with pytest.raises(ValueError, match="zip"):
        drift_pct([100], [100, 100])


def decision(left_s):
    return {"kind": "workflow", "figures": {"left_s": left_s}}


def test_a_workflow_is_kept_if_its_request_has_what_the_deadline_leaves(monkeypatch):
    now = time.monotonic()
    due = {"kept": now + 100.0, "begun anew": now + 100.0, "forgotten": now + 100.0, "nearly": now + 100.0}
    told = {
        "kept": [decision(100.0)],
        "begun anew": [decision(300.0)],
        "forgotten": [{"kind": "slo", "figures": {}}],
        "nearly": [decision(100.0 - 3 * WITHIN_S)],
    }

    class Asked:
        def ask(self, tokens, **changes):
            return changes["metadata"]["workflow_id"]

    monkeypatch.setattr(bench_restart, "stored", lambda records, request_id, column: told[request_id])
    assert kept(Asked(), None, due) == 0.25
