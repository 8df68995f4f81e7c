"""docs/reproduction.md and its plots, made from the stored sections alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.reproduce.claims import Claim, Plot, Section, Table, Value

HEAD = """# Reproduction

Written by `make reproduce` (one paper alone: `python -m benchmarks.reproduce --paper NAME`, figures of HyperFlexis:
`--paper hyperflexis --part fig7`); do not edit by hand.
All but Kairos runs in the simulator: the dispatcher, engine schedulers, mapping and scaler that serve, on fitted
latency profiles and virtual time. Kairos runs the same engine schedulers in an event loop of its own
(`benchmarks/reproduce/kairos/stages.py`), because its decode step costs what its longest sequence costs. A figure here
is a comparison of policies under a paper's own workload, not of machines.
*reached* is "-" where a baseline could only be built from another paper's description of it, and where the paper gives
nothing to compare with.

"""
MARKS = {True: "yes", False: "**no**", None: "-"}


def write(sections: Sequence[Section], page: Path, plots: Path) -> None:
    """The page, and one SVG a plot in the folder `plots` beside it."""
    plots.mkdir(parents=True, exist_ok=True)
    parts = [HEAD, _headlines(sections)]
    for section in sections:
        parts.append(f"\n## {section.paper}\n\n{section.settings_text.strip()}\n\n")
        if section.meta:
            parts.append(_run(section.meta))
        parts.extend(_reasons(section.claims))
        parts.extend(_table(table) for table in section.tables)
        for plot in section.plots:
            draw(plot, plots / f"{plot.name}.svg")
            parts.append(f"![{plot.title}]({plots.name}/{plot.name}.svg)\n\n")
    page.write_text("".join(parts).rstrip() + "\n")


def _run(meta: Mapping[str, Any]) -> str:
    lines = ["Run: " + ", ".join(f"{key} {value}" for key, value in meta.items() if key != "parts") + ".\n"]
    for name, own in meta.get("parts", {}).items():
        lines.append(f"- {name} run again: " + ", ".join(f"{key} {value}" for key, value in own.items()) + "\n")
    return "\n".join([lines[0], "".join(lines[1:])]) if len(lines) > 1 else lines[0] + "\n"


def _headlines(sections: Sequence[Section]) -> str:
    claims = [claim for section in sections for claim in section.claims]
    counted = [claim.reached for claim in claims if claim.reached is not None]
    rows = [
        [c.paper, c.figure, c.claim, c.theirs, c.ours, MARKS[c.reached], c.setting, ", ".join(map(str, c.seeds))]
        for c in claims
    ]
    title = f"Headlines ({sum(counted)} of {len(counted)} reached)"
    return _table(Table(title, ["paper", "figure", "claim", "paper's", "ours", "reached", "setting", "seeds"], rows))


def _reasons(claims: Sequence[Claim]) -> list[str]:
    given = [f"- {claim.figure}, {claim.claim}: {claim.reason}\n" for claim in claims if claim.reason]
    return ["Where they differ, and why:\n\n", *dict.fromkeys(given), "\n"] if given else []


def _table(table: Table) -> str:
    lines = [f"**{table.title}**\n", _line(table.columns), _line(["---"] * len(table.columns))]
    lines += [_line([_cell(value) for value in row]) for row in table.rows]
    return "\n".join(lines) + "\n\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(value: Value) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "\\|")


def draw(plot: Plot, path: Path) -> None:
    """One SVG, without a date in it: equal data give an equal file."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    plt.rcParams["svg.hashsalt"] = "slackline"
    figure, axes = plt.subplots(figsize=(7, 4))
    for index, (label, points) in enumerate(plot.series.items()):
        xs, ys = zip(*points, strict=True) if points else ((), ())
        axes.plot(xs, ys, marker="osD^vPX*"[index % 8], markersize=4, label=label)
    if plot.level is not None:
        axes.axhline(plot.level, color="grey", linestyle="--", linewidth=1)
    if plot.log_x:
        axes.set_xscale("log")
    axes.set(title=plot.title, xlabel=plot.x_label, ylabel=plot.y_label)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
