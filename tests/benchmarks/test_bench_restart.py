"""The restarted gateway's figures: how far bounds moved, and which workflows kept their deadline."""

import time

import pytest

from benchmarks import bench_restart
from benchmarks.bench_restart import WITHIN_S, drift_pct, keep, kept


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


class Stores:
    """A gateway that has stored what it learned `ages` seconds ago, as it says at one look after the other."""

    def __init__(self, *ages):
        self.ages = list(ages)

    def metric(self, name):
        assert name.startswith("slackline_learned_age_seconds")
        return self.ages.pop(0)


def test_what_was_stored_before_the_probes_is_waited_for(monkeypatch):
    """Else the drift is that of the probes' own answers, which the next process has not heard of."""
    clock = [100.0]
    monkeypatch.setattr(bench_restart.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(bench_restart.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    gateway = Stores(-1.0, 0.5, 8.0, 9.0, 0.05, 0.0)
    keep(gateway)
    assert gateway.ages == [0.0], "0.05 s ago is after 0.4 s of waiting"
    with pytest.raises(TimeoutError, match="was not stored"):
        keep(Stores(*[60.0] * 1000))
