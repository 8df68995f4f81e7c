"""One self-contained HTML page with the charts and the table of a simulator command."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from controller.simulator.report.charts import figures
from controller.simulator.report.table import comparison_table, goodput_table

STYLE = (
    "body{font:15px system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem}"
    "pre{overflow-x:auto;font-size:12px;line-height:1.4}h2{margin-top:2.5rem}"
)


def page(found: Mapping[str, Any], level: float = 0.9) -> str:
    """The page. `found`: the result of `runner.compare` or `runner.goodput`, or one run's entry and report (`run`).

    Needs plotly; the page loads nothing from elsewhere.
    """
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
    """The figures as HTML; the first one contains plotly's script."""
    text: str = figure.to_html(full_html=False, include_plotlyjs=first)
    return text
