"""Rows to Plotly-ready dicts: units, SLO lines, gaps, colours."""

from __future__ import annotations

import json

from console.charts import Minute, attainment, goodput, line_style, queue_depth


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


def test_colours_repeat_with_another_dash():
    assert line_style(0)["dash"] == "solid"
    assert line_style(8) == {"color": "series-1", "width": 2, "dash": "dot"}


def test_specs_are_plain_json():
    rows = [minute(0), minute(300)]
    for spec in (attainment(rows, {}, {"acme/chat": 0.9}, 0, 60), goodput(rows, {}, 0, 60), queue_depth(60)):
        assert json.loads(json.dumps(spec)) == spec
