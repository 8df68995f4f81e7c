"""A comparison as one self-contained HTML page: attainment and goodput over rate, latencies, queues over time."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from controller.simulator.table import comparison_table, goodput_table

LATENCIES = (  # field of a report, title, axis
    ("ttft_s", "Time to first token", "seconds to the first token"),
    ("tpot_s", "Time per output token", "seconds per output token"),
    ("e2e_s", "Whole answer", "seconds to the last token"),
)
OVER_RATE = (  # field of an entry, title, axis
    ("goodput_tokens_per_s", "Token goodput", "tokens in time, per second (median over seeds)"),
    ("attained_per_s", "Requests that kept their promises", "requests/s (median over seeds)"),
)
STYLE = (
    "body{font:15px system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem}"
    "pre{overflow-x:auto;font-size:12px;line-height:1.4}h2{margin-top:2.5rem}"
)


def page(found: Mapping[str, Any], level: float = 0.9) -> str:
    """`found` is what `runner.compare` or `runner.goodput` returned. Needs plotly; nothing is loaded from elsewhere."""
    drawn = figures(found, level)
    shown = goodput_table(found) if "goodput" in found else comparison_table(found)
    title = html.escape(str(found["name"]))
    parts = [f"<h2>{html.escape(name)}</h2>{_drawn(figure, not index)}" for index, (name, figure) in enumerate(drawn)]
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    return (
        f'<!doctype html><html lang="en"><head>{head}</head>'
        f"<body><h1>{title}</h1>{''.join(parts)}<h2>Table</h2><pre>{html.escape(shown)}</pre></body></html>\n"
    )


def _drawn(figure: Any, first: bool) -> str:
    """The library's script travels with the first figure."""
    text: str = figure.to_html(full_html=False, include_plotlyjs=first)
    return text


Figures = list[tuple[str, Any]]


def figures(found: Mapping[str, Any], level: float = 0.9) -> Figures:
    """Titles and charts, in the order of the page."""
    return _goodput_figures(found) if "goodput" in found else _comparison_figures(found, level)


def _comparison_figures(found: Mapping[str, Any], level: float) -> Figures:
    entries = found["entries"]
    drawn = [("Attainment", _attainment(entries, level))]
    drawn += [(title, _over_rate(entries, name, axis)) for name, title, axis in OVER_RATE]
    for rate in _rates(entries):
        mine = [entry for entry in entries if entry["rate"] == rate]
        drawn += [(f"{title}, {_at(rate)}", _distribution(mine, name, axis)) for name, title, axis in LATENCIES]
        drawn.append((f"Requests waiting, {_at(rate)}", _queue(mine)))
    return drawn


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


def _over_rate(entries: Sequence[Mapping[str, Any]], name: str, axis: str) -> Any:
    from plotly import graph_objects as go

    figure = go.Figure()
    for policy in dict.fromkeys(entry["policy"] for entry in entries):
        own = [entry for entry in entries if entry["policy"] == policy]
        line = {"x": [entry["rate"] for entry in own], "y": [entry[name] for entry in own]}
        figure.add_scatter(**line, name=policy, mode="lines+markers")
    return _axes(figure, "rate, requests/s", axis)


def _distribution(entries: Sequence[Mapping[str, Any]], name: str, axis: str) -> Any:
    """Share of requests within so many seconds, by policy; upright lines are what classes were promised."""
    from plotly import graph_objects as go

    figure = go.Figure()
    for entry in entries:
        seconds = entry["first_seed"]["distribution"][name]
        shares = [place / max(1, len(seconds) - 1) for place in range(len(seconds))]
        figure.add_scatter(x=seconds, y=shares, name=entry["policy"], mode="lines")
    classes = entries[0]["first_seed"]["by_class"]
    promised = {slo_class: own["targets"].get(name) for slo_class, own in classes.items()}
    for target in sorted({seconds for seconds in promised.values() if seconds is not None}):
        names = ", ".join(slo_class or "no class" for slo_class, seconds in promised.items() if seconds == target)
        figure.add_vline(x=target, line_dash="dot", annotation_text=f"{names} {target:g} s")
    return _axes(figure, f"{axis}, all classes, first seed", "share of requests")


def _queue(entries: Sequence[Mapping[str, Any]]) -> Any:
    from plotly import graph_objects as go

    figure = go.Figure()
    for entry in entries:
        queue = entry["first_seed"]["queue"]
        waiting = [a + b for a, b in zip(queue["queued"], queue["waiting"], strict=True)]
        figure.add_scatter(x=queue["at_s"], y=waiting, name=entry["policy"], mode="lines")
    return _axes(figure, "seconds after the start, first seed", "requests without a first token")


def _goodput_figures(found: Mapping[str, Any]) -> Figures:
    from plotly import graph_objects as go

    ordered = sorted(found["goodput"].items(), key=lambda item: (-item[1], item[0]))
    figure = go.Figure(go.Bar(x=[name for name, _ in ordered], y=[rate for _, rate in ordered]))
    return [("Goodput", _axes(figure, "policy", f"requests/s at {found['level']:g} attainment"))]


def _axes(figure: Any, x: str, y: str) -> Any:
    figure.update_layout(xaxis_title=x, yaxis_title=y, template="plotly_white", height=420, margin={"t": 30})
    return figure
