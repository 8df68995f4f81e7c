"""bench-analyzer trains on the first part of a trace and asks about the later one."""

from benchmarks.bench_analyzer import PRODUCED, SHIPPED, Answer, cut, forest_of, interval, judged, pinball
from controller.predict.answer_lengths import FEATURES


def test_bounds_on_the_shipped_trace_cover_what_they_claim():
    trace = cut("azure2023_conv", SHIPPED, 1_200)
    assert (len(trace.training), len(trace.asked)) == (600, 600)
    found = judged(trace, forest_of(trace.training))
    assert list(found["coverage"]) == [str(each) for each in PRODUCED]
    at_arrival = found["coverage"]["0"]
    assert at_arrival["answers"] == 600
    assert 0.85 <= at_arrival["adaptive"] <= 0.95
    low, high = at_arrival["adaptive_interval"]
    assert low <= at_arrival["adaptive"] <= high
    assert found["pinball"]["less"] > 0.1, "prompts say something about answers here"
    assert found["coverage"]["400"]["kept"] < found["coverage"]["400"]["fixed"], "a bound that is refined holds longer"


def test_an_answer_is_known_only_once_it_has_ended(tmp_path):
    import gzip

    path = tmp_path / "swebench_agent_sessions.csv.gz"
    rows = ["arrival_s,input_tokens,output_tokens,session", "0,10,100,a", "1,20,5,a", "10,30,7,a", "11,40,9,b"]
    path.write_bytes(gzip.compress("\n".join(rows).encode()))
    trace = cut("swebench_agent_sessions", path, None)
    assert [each.session for each in trace.training] == ["a"] * 3
    assert [each.session for each in trace.asked] == ["b"]
    calls = [dict(zip(FEATURES, each.features, strict=True))["workflow_calls"] for each in trace.training]
    assert calls == [0, 0, 2], "after 1 s the answer of 100 tokens still ran"


def test_figures():
    import numpy as np

    truth, bound = np.array([10.0, 30.0]), np.array([20.0, 20.0])
    assert pinball(truth, bound) == (0.1 * 10 + 0.9 * 10) / 2
    assert interval(np.array([True] * 10), ["a"] * 10) == [1.0, 1.0]
    assert Answer("s", (1.0,), 3).tokens == 3
