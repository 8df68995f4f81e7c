"""Rows to plain Plotly-ready dicts: {"traces": [...], "layout": {...}}, drawn by `static/js/charts.js`.

Times are epoch seconds and colours are names of tokens ("series-1"): the browser has its own of both. Every axis has
a unit, every SLO its line. `key` joins a trace with the live rows that lengthen it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SERIES = 8  # colours in tokens.css; further series start again with a dotted line
DASHES = ("solid", "dot", "dashdot")

Spec = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Minute:
    """Counts of one class of one tenant in one minute. `at` is the minute's start, epoch seconds."""

    at: float
    key: str
    name: str
    finished: int
    attained: int
    goodput_tokens: int


def by_key(rows: Iterable[Minute]) -> dict[str, list[Minute]]:
    groups: dict[str, list[Minute]] = {}
    for row in sorted(rows, key=lambda row: (row.key, row.at)):
        groups.setdefault(row.key, []).append(row)
    return groups


def line_style(index: int) -> dict[str, Any]:
    return {"color": f"series-{index % SERIES + 1}", "width": 2, "dash": DASHES[index // SERIES % len(DASHES)]}


def attainment(rows: Sequence[Minute], targets: Mapping[str, float], since: float, until: float) -> Spec:
    """Share attained by minute and class, with one SLO line for each distinct target. Empty minutes are gaps."""
    traces = []
    for index, (key, minutes) in enumerate(by_key(rows).items()):
        x, y = _with_gaps([(row.at, row.attained / row.finished) for row in minutes if row.finished])
        traces.append(_line(key, minutes[0].name, x, y, index, "%{y:.1%}"))
    lines = [
        {"y": target, "color": "bad", "text": f"SLO {target * 100:.4g} %", "below": True}
        for target in sorted({targets[key] for key in by_key(rows) if key in targets})
    ]
    yaxis = {"range": [0, 1.04], "tickformat": ".0%", "rangemode": "normal"}
    return {
        "traces": traces,
        "layout": {"y_title": "attained", "yaxis": yaxis, "lines": lines, "x_range": [since, until]},
    }


def goodput(rows: Sequence[Minute], since: float, until: float) -> Spec:
    """Output tokens a second that were delivered in time, by class, stacked."""
    traces = []
    groups = by_key(rows)
    grid = sorted({row.at for row in rows})
    for index, (key, minutes) in enumerate(groups.items()):
        values = {row.at: row.goodput_tokens / 60 for row in minutes}
        trace = _line(key, minutes[0].name, grid, [values.get(at, 0.0) for at in grid], index, "%{y:.1f} tok/s")
        traces.append(trace | {"stackgroup": "goodput", "fillcolor": trace["line"]["color"]})
    return {
        "traces": traces,
        "layout": {"y_title": "tokens/s in time", "yaxis": {}, "x_range": [since, until]},
    }


def queue_depth(until: float, window_s: float = 600.0) -> Spec:
    """Empty: nobody stores the depth of a queue, so the chart starts with the page and grows from live frames."""
    return {
        "traces": [],
        "grow": {"hovertemplate": "%{y} waiting<extra>%{fullData.name}</extra>"},
        "layout": {"y_title": "requests waiting", "yaxis": {}, "x_range": [until - window_s, until]},
    }


def _line(key: str, name: str, x: list[float], y: list[float | None], index: int, value: str) -> dict[str, Any]:
    return {
        "key": key,
        "name": name,
        "type": "scatter",
        "mode": "lines",
        "x": x,
        "y": y,
        "line": line_style(index),
        "hovertemplate": f"{value}<extra>%{{fullData.name}}</extra>",
    }


def _with_gaps(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float | None]]:
    """An empty value between two points further apart than two minutes: a line there would be a claim."""
    x: list[float] = []
    y: list[float | None] = []
    for at, value in points:
        if x and at - x[-1] > 120:
            x.append(at - 60)
            y.append(None)
        x.append(at)
        y.append(value)
    return x, y
