"""bench-analyzer's pattern graphs: made of recorded runs, asked about others."""

from __future__ import annotations

import gzip

import pytest

from benchmarks.analyzer.graphs import AGENTS, graph_figures, halves, sessions, stage_errors
from controller.predict.pattern_graphs import graph_of, set_of


def write_trace(path, duration, runs):
    """Each run: the seconds of its calls, which follow one another after half a second."""
    rows = [f"arrival_s,input_tokens,output_tokens,session,model,{duration}"]
    for name, seconds in runs.items():
        at = 0.0
        for each in seconds:
            rows.append(f"{at},100,20,{name},m,{each}")
            at += each + 0.5
    path.write_bytes(gzip.compress("\n".join(rows).encode()))


def test_other_runs_are_asked_about_and_the_graph_knows_what_equal_shares_do_not(tmp_path):
    path = tmp_path / "runs.csv.gz"
    write_trace(path, "took_s", {name: [1, 1, 8, 10] for name in "abcdefgh"})
    recorded, asked = halves(sessions(path, "took_s"))
    assert (len(recorded), len(asked)) == (4, 4)
    graphs = set_of([graph_of(calls) for calls in recorded], [1.0] * 4, {})
    found = stage_errors(graphs, recorded, asked)
    assert list(found) == ["0", "1", "2"], "the last step has all that is left"
    first = found["0"]
    assert (first["steps"], first["matched"], first["alike"]) == (4, 1.0, 1.0)
    assert first["graph"] == first["gateway"] == pytest.approx(0.0, abs=0.01)
    assert first["steps_left"] == pytest.approx(0.25 - 1 / 21.5, abs=1e-3)
    assert first["last"] == pytest.approx(1 - 1 / 21.5, abs=1e-3)
    assert first["due_accumulated"] < 0.01


def test_a_run_like_no_recorded_one_counts_as_its_last_step(tmp_path):
    path = tmp_path / "runs.csv.gz"
    write_trace(path, "took_s", {"a": [1, 1], "b": [1, 1, 1, 1]})
    recorded, asked = halves(sessions(path, "took_s"))
    found = stage_errors(set_of([graph_of(recorded[0])], [1.0], {}), recorded, asked)
    assert found["2"]["matched"] == 0.0
    assert "graph" not in found["2"]
    assert found["2"]["gateway"] == found["2"]["last"] > 0.5


def test_figures_of_both_traces(tmp_path):
    for name, duration in AGENTS.items():
        write_trace(tmp_path / f"{name}.csv.gz", duration, {run: [1, 2, 3, 4, 5] for run in "abcdef"})
    found = graph_figures(tmp_path)
    assert set(found["stage_error"]) == set(AGENTS)
    assert found["match_ms"]["p99"] > 0
    assert 0 < found["graph_bytes"] <= 200
