"""Rows to Plotly-ready dicts: units, SLO lines, gaps, colours."""

from __future__ import annotations

import json

import pytest

from console.charts.base import Minute, attainment, goodput, line_style, queue_depth, scaling_load


def minute(at=0.0, key="acme/chat", finished=10, attained=9, goodput_tokens=600):
    return Minute(at=at, key=key, name=key, finished=finished, attained=attained, goodput_tokens=goodput_tokens)


def test_attainment_is_a_share_by_minute_with_its_slo_line():
    spec = attainment([minute(0), minute(60, attained=5)], {"acme/chat": 2}, {"acme/chat": 0.95}, -3000, 600)
    (trace,) = spec["traces"]
    assert (trace["x"], trace["y"]) == ([0, 60], [0.9, 0.5])
    assert trace["line"]["color"] == "series-3"
    assert spec["layout"]["lines"] == [{"y": 0.95, "color": "bad", "text": "SLO 95 %"}]
    assert spec["layout"]["y_title"] == "attained"


def test_one_slo_line_for_each_distinct_target():
    rows = [minute(key=key) for key in ("a", "b", "c")]
    spec = attainment(rows, {}, {"a": 0.9, "b": 0.95, "c": 0.9, "unused": 0.5}, 0, 60)
    assert [line["y"] for line in spec["layout"]["lines"]] == [0.95, 0.9]


def test_minutes_without_requests_are_gaps_in_attainment():
    spec = attainment([minute(0), minute(600), minute(660, finished=0, attained=0)], {}, {}, 0, 700)
    assert spec["traces"][0]["x"] == [0, 540, 600]
    assert spec["traces"][0]["y"] == [0.9, None, 0.9]


def test_the_axis_reaches_down_to_the_worst_minute():
    assert attainment([minute(attained=2)], {}, {}, 0, 60)["layout"]["yaxis"]["range"][0] < 0.2
    assert attainment([], {}, {}, 0, 60)["traces"] == []


def test_goodput_is_per_second_and_zero_in_empty_minutes():
    rows = [minute(0), minute(120), minute(120, key="b", goodput_tokens=1200)]
    first, second = goodput(rows, {"b": 9}, 0, 200)["traces"]
    assert (first["x"], first["y"]) == ([0, 60, 120], [10.0, 0.0, 10.0])
    assert second["y"] == [0.0, 0.0, 20.0]
    assert first["stackgroup"] == second["stackgroup"]


def test_goodput_is_zero_after_the_last_request_up_to_the_last_minute_that_is_over():
    rows = [minute(0), minute(60)]
    ends = {until: goodput(rows, {}, 0, until, to_end=True)["traces"][0]["y"] for until in (60, 119, 239, 240)}
    assert ends == {60: [10.0, 10.0], 119: [10.0, 10.0], 239: [10.0, 10.0, 0.0], 240: [10.0, 10.0, 0.0, 0.0]}


def test_colours_repeat_with_another_dash():
    assert line_style(0)["dash"] == "solid"
    assert line_style(8) == {"color": "series-1", "width": 2, "dash": "dot"}


def test_specs_are_plain_json():
    rows = [minute(0), minute(300)]
    for spec in (attainment(rows, {}, {"acme/chat": 0.9}, 0, 60), goodput(rows, {}, 0, 60), queue_depth(60)):
        assert json.loads(json.dumps(spec)) == spec


def scaling(events=(), loads=(0.4, 1.1), ready=(2, 2), **given):
    points = [[(60.0 * number, each) for number, each in enumerate(values)] for values in (loads, ready)]
    return scaling_load(*points, list(events), (0.8, 0.3), (0.0, 600.0), **given)


def marks(spec, kind):
    return next(trace for trace in spec["traces"] if trace["key"] == kind)


def test_a_mark_stands_at_its_load_or_at_the_edge_and_says_its_true_load():
    loads = (23.9, 7.14, 2.0, None)
    spec = scaling([(60.0 * place, "scale_out", load, "scaled out") for place, load in enumerate(loads)], (0.4, 23.9))
    drawn, top = marks(spec, "scale_out"), spec["layout"]["yaxis"]["range"][1]
    assert drawn["y"] == [pytest.approx(3.2), pytest.approx(3.2), 2.0, 0.8], "four times the threshold is the edge"
    assert all(value < top for value in drawn["y"])
    assert drawn["customdata"] == [
        "load 2390 %, above the chart", "load 714 %, above the chart", "load 200 %", "load not recorded",
    ]  # fmt: skip
    assert spec["layout"]["y_title"] == "load, % of capacity (cut off at 320 %)"


def test_the_axis_of_the_load_reaches_what_was_acted_upon():
    """A load between two samples is on record with the event only."""
    spec = scaling([(90.0, "scale_out", 2.5, "scaled out")], loads=(0.4, 0.5))
    assert spec["layout"]["yaxis"]["range"][1] > 2.5
    assert spec["layout"]["y_title"] == "load, % of capacity"
    before = scaling([(-90.0, "scale_out", 2.5, "scaled out")], loads=(0.4, 0.5))
    assert before["layout"]["yaxis"]["range"][1] < 2.5, "what is not in the window does not count"


@pytest.mark.parametrize(
    ("most", "step"), [(0, 1), (1, 1), (4, 1), (6, 1), (7, 2), (12, 2), (13, 5), (60, 10), (200, 50)]
)
def test_instances_have_whole_ticks_a_few_of_them(most, step):
    axis = scaling(ready=(0, most))["layout"]["y2axis"]
    assert (axis["dtick"], axis["tick0"], axis["range"][0]) == (step, 0, 0)
    assert axis["range"][1] > most


def test_no_line_is_drawn_over_a_time_in_which_no_one_looked():
    load = [(0.0, 0.4), (5.0, 0.5), (600.0, 0.6)]
    spec = scaling_load(load, [(at, 2.0) for at, _ in load], [], (0.8, 0.3), (0.0, 600.0), gap_s=20.0)
    assert spec["traces"][0]["y"] == [0.4, 0.5, None, 0.6]
    assert spec["traces"][1]["y"] == [2.0, 2.0, None, 2.0]
    assert spec["traces"][0]["x"][1] < spec["traces"][0]["x"][2] < 600.0


def test_a_long_sentence_is_broken_for_a_narrow_screen():
    said = "slackline cannot scale demo/collocated out: load 200 %, but there is no managed instance to start a copy of"
    (shown,) = marks(scaling([(0.0, "scale_hold", 2.0, said)]), "scale_hold")["text"]
    assert max(len(line) for line in shown.split("<br>")) <= 44
    assert shown.replace("<br>", " ") == said
