"""A comparison as one self-contained HTML page: attainment over rate, latency quantiles, queues over time."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from controller.simulator.table import comparison_table, goodput_table

QUANTILES = ("p50", "p90", "p95", "p99")
STYLE = (
    "body{font:15px system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem}"
    "pre{overflow-x:auto;font-size:12px;line-height:1.4}h2{margin-top:2.5rem}"
)


def page(found: Mapping[str, Any], level: float = 0.9) -> str:
    """`found` is what `runner.compare` or `runner.goodput` returned. Needs plotly; nothing is loaded from elsewhere."""
    figures = _goodput_figures(found) if "goodput" in found else _comparison_figures(found, level)
    shown = goodput_table(found) if "goodput" in found else comparison_table(found)
    title = html.escape(str(found["name"]))
    parts = [f"<h2>{html.escape(name)}</h2>{_drawn(figure, first=not index)}" for index, (name, figure) in figures]
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    return (
        f'<!doctype html><html lang="en"><head>{head}</head>'
        f"<body><h1>{title}</h1>{''.join(parts)}<h2>Table</h2><pre>{html.escape(shown)}</pre></body></html>\n"
    )


def _drawn(figure: Any, first: bool) -> str:
    """The library's script travels with the first figure."""
    text: str = figure.to_html(full_html=False, include_plotlyjs=first)
    return text


Figures = list[tuple[int, tuple[str, Any]]]


def _comparison_figures(found: Mapping[str, Any], level: float) -> Figures:
    entries = found["entries"]
    figures = [("Attainment", _attainment(entries, level))]
    figures += [(f"Time to first token, {_at(rate)}", _latency(entries, rate)) for rate in _rates(entries)]
    figures += [(f"Requests waiting, {_at(rate)}", _queue(entries, rate)) for rate in _rates(entries)]
    return list(enumerate(figures))


def _rates(entries: Sequence[Mapping[str, Any]]) -> list[float | None]:
    return list(dict.fromkeys(entry["rate"] for entry in entries))


def _at(rate: float | None) -> str:
    return f"{rate:.4g} requests/s" if rate else "the workload's own rate"


def _attainment(entries: Sequence[Mapping[str, Any]], level: float) -> Any:
    from plotly import graph_objects as go  # type: ignore[import-untyped]

    figure = go.Figure()
    for policy in dict.fromkeys(entry["policy"] for entry in entries):
        own = [entry for entry in entries if entry["policy"] == policy]
        spread = [entry["attainment_spread"] for entry in own]
        figure.add_scatter(
            x=[entry["rate"] for entry in own],
            y=[entry["attainment"] for entry in own],
            error_y={
                "type": "data",
                "symmetric": False,
                "array": [high - e["attainment"] for (_, high), e in zip(spread, own, strict=True)],
                "arrayminus": [e["attainment"] - low for (low, _), e in zip(spread, own, strict=True)],
            },
            name=policy,
            mode="lines+markers",
        )
    figure.add_hline(y=level, line_dash="dot", annotation_text=f"{level:g}")
    return _axes(figure, "rate, requests/s", "attainment (median, lowest and highest seed)")


def _latency(entries: Sequence[Mapping[str, Any]], rate: float | None) -> Any:
    from plotly import graph_objects as go

    figure = go.Figure()
    for entry in entries:
        if entry["rate"] == rate:
            seconds = entry["first_seed"]["ttft_s"]
            figure.add_bar(x=list(QUANTILES), y=[seconds[name] for name in QUANTILES], name=entry["policy"])
    return _axes(figure, "quantile over all classes, first seed", "seconds")


def _queue(entries: Sequence[Mapping[str, Any]], rate: float | None) -> Any:
    from plotly import graph_objects as go

    figure = go.Figure()
    for entry in entries:
        if entry["rate"] == rate:
            queue = entry["first_seed"]["queue"]
            waiting = [a + b for a, b in zip(queue["queued"], queue["waiting"], strict=True)]
            figure.add_scatter(x=queue["at_s"], y=waiting, name=entry["policy"], mode="lines")
    return _axes(figure, "seconds after the start, first seed", "requests without a first token")


def _goodput_figures(found: Mapping[str, Any]) -> Figures:
    from plotly import graph_objects as go

    ordered = sorted(found["goodput"].items(), key=lambda item: (-item[1], item[0]))
    figure = go.Figure(go.Bar(x=[name for name, _ in ordered], y=[rate for _, rate in ordered]))
    return [(0, ("Goodput", _axes(figure, "policy", f"requests/s at {found['level']:g} attainment")))]


def _axes(figure: Any, x: str, y: str) -> Any:
    figure.update_layout(xaxis_title=x, yaxis_title=y, template="plotly_white", height=420, margin={"t": 30})
    return figure
