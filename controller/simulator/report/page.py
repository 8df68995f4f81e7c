"""What a command of the simulator found as one self-contained HTML page: its charts and its table."""

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
    """`found`: what `runner.compare` or `runner.goodput` returned, or of one run its entry and its report (`run`).

    Needs plotly; nothing is loaded from elsewhere.
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
    """The library's script travels with the first figure."""
    text: str = figure.to_html(full_html=False, include_plotlyjs=first)
    return text
