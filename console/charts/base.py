"""Rows as plain Plotly-ready dicts: {"traces": [...], "layout": {...}}, drawn by `static/js/charts.js`.

Times are epoch seconds and colours are token names ("series-1"): the browser translates both to the viewer's time zone
and theme. Every axis has a unit, every SLO a line. `key` joins a trace with the live rows that extend it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

SERIES = 8  # colours in tokens.css; further series start again with a dotted line
SHORTEST_S = 600.0  # a chart covers at least ten minutes
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


def shortest_window(times: Iterable[float], until: float, longest_s: float) -> tuple[float, float]:
    """Since and until of a chart: the last `longest_s`, or less if there is no older data, but at least SHORTEST_S."""
    first = min(times, default=until)
    return max(until - longest_s, min(first, until - SHORTEST_S)), until


def by_key(rows: Iterable[Minute]) -> dict[str, list[Minute]]:
    groups: dict[str, list[Minute]] = {}
    for row in sorted(rows, key=lambda row: (row.key, row.at)):
        groups.setdefault(row.key, []).append(row)
    return groups


def line_style(index: int) -> dict[str, Any]:
    return {"color": f"series-{index % SERIES + 1}", "width": 2, "dash": DASHES[index // SERIES % len(DASHES)]}


def attainment(
    rows: Sequence[Minute], palette: Mapping[str, int], targets: Mapping[str, float], since: float, until: float
) -> Spec:
    """Share attained by minute and class, one SLO line per distinct target. Minutes without requests are gaps."""
    groups = by_key(rows)
    traces = []
    for key, minutes in groups.items():
        x, y = _with_gaps([(row.at, row.attained / row.finished) for row in minutes if row.finished])
        traces.append(_line(key, minutes[0].name, x, y, palette.get(key, 0), "%{y:.1%}"))
    lines = [
        {"y": target, "color": "bad", "text": f"SLO {target * 100:.4g} %"}
        for target in sorted({targets[key] for key in groups if key in targets}, reverse=True)
    ]
    lowest = min((value for trace in traces for value in trace["y"] if value is not None), default=0.9)
    yaxis = {"range": [max(0.0, min(lowest, 0.9) - 0.05), 1.02], "tickformat": ".0%", "rangemode": "normal"}
    return {
        "traces": traces,
        "layout": {"y_title": "attained", "yaxis": yaxis, "lines": lines, "x_range": [since, until]},
    }


def goodput(
    rows: Sequence[Minute],
    palette: Mapping[str, int],
    since: float,
    until: float,
    step_s: float = 60.0,
    *,
    to_end: bool = False,
) -> Spec:
    """Output tokens per second delivered in time, by class, stacked. Minutes without requests are zero, with `to_end`
    also those after the last one that has some; live rows extend the others. `step_s`: what one row covers."""
    grid = _steps(rows, step_s, until if to_end else None)
    traces = []
    for key, minutes in by_key(rows).items():
        values = {row.at: row.goodput_tokens / step_s for row in minutes}
        y: list[float | None] = [values.get(at, 0.0) for at in grid]
        trace = _line(key, minutes[0].name, list(grid), y, palette.get(key, 0), "%{y:.1f} tok/s")
        traces.append(trace | {"stackgroup": "goodput", "fillcolor": trace["line"]["color"]})
    return {"traces": traces, "layout": {"y_title": "tokens/s in time", "yaxis": {}, "x_range": [since, until]}}


def _steps(rows: Sequence[Minute], step_s: float, until: float | None) -> list[float]:
    """Every step from the first to the last that has requests, or that is over at `until`."""
    if not rows:
        return []
    first, last = min(row.at for row in rows), max(row.at for row in rows)
    over = 0 if until is None else int((until - first) // step_s)
    return [first + step_s * step for step in range(max(round((last - first) / step_s) + 1, over))]


def queue_depth(until: float, window_s: float = 600.0) -> Spec:
    """Empty: queue depth is not stored, so the chart starts when the page is opened and grows from live frames."""
    return {
        "traces": [],
        "grow": {"hovertemplate": "%{y} waiting<extra>%{fullData.name}</extra>"},
        "layout": {
            "y_title": "waiting requests",
            "yaxis": {"autorangeoptions": {"include": 4}},
            "x_range": [until - window_s, until],
        },
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


def _with_gaps(
    points: Sequence[tuple[float, float | None]], longest_s: float = 120.0
) -> tuple[list[float], list[float | None]]:
    """Inserts an empty value between points further apart than `longest_s`: a line there would invent data."""
    x: list[float] = []
    y: list[float | None] = []
    for at, value in points:
        if x and at - x[-1] > longest_s:
            x.append(at - longest_s / 2)
            y.append(None)
        x.append(at)
        y.append(value)
    return x, y


MARKS = {
    "scale_out": ("triangle-up", "ok"),
    "scale_in": ("triangle-down", "accent"),
    "scale_hold": ("x", "warn"),
    "role_change": ("diamond", "accent"),
}


HIGHEST = 4  # times the upper threshold. Higher loads are drawn at the edge, else both thresholds would be one line
HOVER_WIDTH = 44  # characters; a wider box does not fit a phone
TICKS = 6  # at most, on the axis of instances
Event = tuple[float, str, float | None, str]  # epoch seconds, kind, load at it, sentence


def scaling_load(
    load: Sequence[tuple[float, float | None]],
    ready: Sequence[tuple[float, float]],
    events: Sequence[Event],
    thresholds: tuple[float, float],
    window: tuple[float, float],
    moment: float | None = None,
    gap_s: float = 120.0,
) -> Spec:
    """The load metric with both thresholds, ready instances, and the scaler's decisions with their sentences on hover.

    An event without a load is drawn on the upper threshold. `moment`: the selected time, a vertical line. Samples more
    than `gap_s` apart are not joined.
    """
    upper, lower = thresholds
    shown = [event for event in events if event[1] in MARKS and event[0] >= window[0]]
    known = [value for _, value in load] + [value for _, _, value, _ in shown]
    highest = max([value for value in known if value is not None] + [upper * 1.2])
    top = min(highest, HIGHEST * upper)
    traces = [_line("load", "load", *_with_gaps(load, gap_s), 0, "load %{y:.0%}")]
    ready_line = _line("ready", "ready instances", *_with_gaps(ready, gap_s), 3, "%{y:d} ready")
    traces.append(ready_line | {"yaxis": "y2", "line": {**ready_line["line"], "dash": "dot", "shape": "hv"}})
    for kind in MARKS:
        mine = [event for event in shown if event[1] == kind]
        if mine:
            traces.append(_marks(kind, mine, upper, top))
    lines: list[dict[str, Any]] = [
        {"y": upper, "color": "bad", "text": f"scale out above {upper * 100:g} %"},
        {"y": lower, "color": "accent", "text": f"scale in below {lower * 100:g} %"},
    ]
    if moment is not None:
        lines.append({"x": moment, "color": "ink-2", "text": "chosen time"})
    layout = {
        "y_title": "load, % of capacity" if top == highest else f"load, % of capacity (cut off at {top * 100:.0f} %)",
        "y2_title": "instances",
        "yaxis": {"range": [0, top * 1.08], "rangemode": "normal", "tickformat": ".0%"},
        "y2axis": _whole(max((count for _, count in ready), default=0)),
        "lines": lines,
        "x_range": list(window),
    }
    return {"traces": traces, "layout": layout}


def _whole(most: float) -> dict[str, Any]:
    """An axis of whole numbers, from 0 to at least `most`, with ticks 1, 2 or 5 times a power of ten apart."""
    step = next(
        step for power in range(9) for step in (10**power, 2 * 10**power, 5 * 10**power) if most <= step * TICKS
    )
    return {"range": [0, max(most, 1) * 1.08], "rangemode": "normal", "tick0": 0, "dtick": step, "tickformat": "d"}


def _marks(kind: str, events: Sequence[Event], without: float, top: float) -> dict[str, Any]:
    """Markers at their load, or at the edge of the chart if the load is above it; the hover text has the true load."""
    symbol, color = MARKS[kind]
    return {
        "key": kind,
        "name": kind.replace("_", " "),
        "type": "scatter",
        "mode": "markers",
        "x": [at for at, *_ in events],
        "y": [without if load is None else min(load, top) for _, _, load, _ in events],
        "text": ["<br>".join(wrap(said, HOVER_WIDTH)) for *_, said in events],
        "customdata": [_load_words(load, top) for _, _, load, _ in events],
        "marker": {"symbol": symbol, "size": 11, "color": color},
        "cliponaxis": False,
        "hovertemplate": "%{text}<br>%{customdata}<extra></extra>",
    }


def _load_words(load: float | None, top: float) -> str:
    if load is None:
        return "load not recorded"
    return f"load {load * 100:.0f} %{', above the chart' if load > top else ''}"


def measured(
    points: Sequence[tuple[float, float | None]],
    lines: Mapping[str, Sequence[tuple[float, float]]],
    x_title: str,
    y_title: str,
) -> Spec:
    """Measured points and the lines of fitted models, by name. Empty without points."""
    if not points:
        return {"traces": [], "layout": {}}
    dots = {
        "key": "measured",
        "name": "measured",
        "type": "scatter",
        "mode": "markers",
        "x": [x for x, _ in points],
        "y": [y for _, y in points],
        "marker": {"size": 5, "color": "series-8", "opacity": 0.6},
        "hovertemplate": "%{x} tokens, %{y:.4f} s<extra></extra>",
    }
    fits = [
        _line(name, name, [x for x, _ in line], [y for _, y in line], index, "%{y:.4f} s")
        for index, (name, line) in enumerate(lines.items())
    ]
    return {
        "traces": [dots, *fits],
        "layout": {"x_type": "linear", "x_title": x_title, "y_title": y_title, "legend": True},
    }
