"""What `console/charts/experiments.py` shapes: every group of bars has its name."""

from __future__ import annotations

from console.charts.experiments import ALL, LABEL_MAX, attainment, distribution


def entry(*names: str) -> dict[str, object]:
    by_class = dict.fromkeys(names, 0.9)
    return {"policy": "slackline", "attainment": 0.9, "by_class": by_class, "attainment_spread": (0.9, 0.9)}


def axis(*names: str) -> dict[str, object]:
    return attainment([entry(*names)], names, {}, 0.95)["layout"]["xaxis"]


def test_each_group_has_a_tick_and_a_name():
    names = [f"class-{number}" for number in range(9)]
    assert axis(*names)["tickvals"] == ["all", *names]
    assert axis(*names)["ticktext"] == ["all", *names]


def test_a_long_name_is_cut_under_its_bars_only():
    long = "x" * 64
    found = axis(long)
    assert found["tickvals"] == ["all", long]
    assert found["ticktext"] == ["all", "x" * (LABEL_MAX - 1) + "…"]


def test_requests_without_a_class_are_named_whole():
    assert axis("")["ticktext"] == ["all", "no class (defaults)"]


def latencies(seconds: float, **targets: float) -> dict[str, object]:
    by_class = {name: {"distribution": {}, "targets": {"ttft_s": target}} for name, target in targets.items()}
    first = {"distribution": {"ttft_s": [0.0, seconds / 2, seconds]}, "by_class": by_class}
    return {"policy": "slackline", "first_seed": first}


def test_a_target_beyond_the_slowest_request_is_inside_the_chart():
    layout = distribution([latencies(0.4, chat=0.7)], "ttft_s", ALL, "time to first token, s")["layout"]
    assert layout["lines"] == [{"x": 0.7, "left": True, "color": "bad", "text": "SLO 0.7 s"}]
    assert layout["xaxis"]["range"][1] > 0.7


def test_a_target_far_beyond_is_named_without_squeezing_the_curve():
    layout = distribution([latencies(0.4, chat=60.0)], "ttft_s", ALL, "time to first token, s")["layout"]
    assert [each["text"] for each in layout["lines"]] == ["beyond this chart: SLO 60 s"]
    assert layout["xaxis"]["range"][1] < 1


def test_all_classes_together_have_a_line_of_each():
    layout = distribution([latencies(1.0, chat=0.7, code=0.7, text=1.0)], "ttft_s", ALL, "s")["layout"]
    assert [each["text"] for each in layout["lines"]] == ["SLO 0.7 s (chat, code)", "SLO 1 s (text)"]
