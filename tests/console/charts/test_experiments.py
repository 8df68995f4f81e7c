"""What `console/charts/experiments.py` shapes: every group of bars has its name."""

from __future__ import annotations

from console.charts.experiments import LABEL_MAX, attainment


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
