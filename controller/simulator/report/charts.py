"""The charts of the simulator's pages: of one run, of a comparison or sweep, of a search for goodput.

Input is plain JSON values from `runner` and `report`. Needs plotly, which is imported only to draw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LATENCIES = (  # field of a report, title, axis
    ("ttft_s", "Time to first token", "seconds to the first token"),
    ("tpot_s", "Time per output token", "seconds per output token"),
    ("e2e_s", "End to end", "seconds to the last token"),
)
OVER_RATE = (  # field of an entry, title, axis
    ("goodput_tokens_per_s", "Token goodput", "tokens in time, per second (median over seeds)"),
    ("attained_per_s", "Attained requests", "requests/s (median over seeds)"),
)
MET = (("attainment", "all targets"), ("ttft_met", "TTFT"), ("tpot_met", "TPOT"))
COUNTS = (
    ("queued", "queued"),
    ("waiting", "in an engine, before the first token"),
    ("running", "answering"),
    ("instances", "instances"),
)

Figures = list[tuple[str, Any]]


def figures(found: Mapping[str, Any], level: float = 0.9) -> Figures:
    """Titles and charts, in the order of the page. `level`: where the line of attainment is drawn."""
    if "goodput" in found:
        return _goodput_figures(found)
    return _run_figures(found["run"], level) if "run" in found else _comparison_figures(found, level)


def _run_figures(run: Mapping[str, Any], level: float) -> Figures:
    """Charts of one policy at one rate, by class."""
    drawn = [("Attainment by class", _by_class(run, level))]
    drawn += [(title, _class_distributions(run, name, axis)) for name, title, axis in LATENCIES]
    return [*drawn, ("Requests over time", _counts(run["queue"]))]


def _classes(run: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {slo_class or "no class": own for slo_class, own in run["by_class"].items()}


def _by_class(run: Mapping[str, Any], level: float) -> Any:
    from plotly import graph_objects as go

    classes = {"all": run, **_classes(run)}
    figure = go.Figure()
    for name, label in MET:
        figure.add_bar(x=list(classes), y=[own[name] for own in classes.values()], name=label)
    figure.add_hline(y=level, line_dash="dot", annotation_text=f"{level:g}")
    return _axes(figure, "class", "share of requests that met it")


def _class_distributions(run: Mapping[str, Any], name: str, axis: str) -> Any:
    from plotly import graph_objects as go

    figure = go.Figure()
    for label, own in _classes(run).items():
        _add_distribution(figure, own["distribution"][name], label)
    _mark_targets(figure, run["by_class"], name)
    return _axes(figure, axis, "share of requests")


def _counts(queue: Mapping[str, Any]) -> Any:
    from plotly import graph_objects as go

    figure = go.Figure()
    for name, label in COUNTS:
        figure.add_scatter(x=queue["at_s"], y=queue[name], name=label, mode="lines")
    return _axes(figure, "seconds after the start", "requests and instances")


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
    from plotly import graph_objects as go

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
    """Share of requests within a time in seconds, by policy; vertical lines are the targets of the classes."""
    from plotly import graph_objects as go

    figure = go.Figure()
    for entry in entries:
        _add_distribution(figure, entry["first_seed"]["distribution"][name], entry["policy"])
    _mark_targets(figure, entries[0]["first_seed"]["by_class"], name)
    return _axes(figure, f"{axis}, all classes, first seed", "share of requests")


def _add_distribution(figure: Any, seconds: Sequence[float], label: str) -> None:
    """`seconds` at 0, 1, ... 100 % of the requests."""
    shares = [place / max(1, len(seconds) - 1) for place in range(len(seconds))]
    figure.add_scatter(x=list(seconds), y=shares, name=label, mode="lines")


def _mark_targets(figure: Any, classes: Mapping[str, Any], name: str) -> None:
    targets = {slo_class: own["targets"].get(name) for slo_class, own in classes.items()}
    for target in sorted({seconds for seconds in targets.values() if seconds is not None}):
        names = ", ".join(slo_class or "no class" for slo_class, seconds in targets.items() if seconds == target)
        figure.add_vline(x=target, line_dash="dot", annotation_text=f"{names} {target:g} s")


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
    drawn = [("Goodput", _axes(figure, "policy", f"requests/s at {found['level']:g} attainment"))]
    probes = [{"policy": policy, **probe} for policy, line in found["lines"].items() for probe in line]
    drawn.append(("Attainment", _attainment(probes, found["level"])))
    drawn += [(title, _over_rate(probes, name, axis)) for name, title, axis in OVER_RATE]
    best = [{**entry, "policy": f"{entry['policy']}, {_at(entry['rate'])}"} for entry in found["entries"]]
    drawn += [(f"{title}, each at its goodput", _distribution(best, name, axis)) for name, title, axis in LATENCIES]
    return [*drawn, ("Requests waiting, each at its goodput", _queue(best))]


def _axes(figure: Any, x: str, y: str) -> Any:
    figure.update_layout(xaxis_title=x, yaxis_title=y, template="plotly_white", height=420, margin={"t": 30})
    return figure
