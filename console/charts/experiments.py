"""Charts of an experiment as Plotly-ready dicts, drawn by `static/js/plots.js`, with units and SLO lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from console.charts.base import SERIES, Spec, line_style
from controller.wording.vocabulary import class_name

Entry = Mapping[str, Any]
ALL = ""  # all classes together
FARTHEST = 2  # times the slowest request: as far as an SLO line may widen the axis
LABEL_MAX = 20  # characters of a label under its bars; longer ones are rotated and leave no room for the bars


def charts(result: Mapping[str, Any], targets: Mapping[str, float]) -> dict[str, Any]:
    """`by_rate`: charts of each rate, in part by class; `over_rates`: charts over the rates, if there are several.

    `targets`: attainment target by class, for the SLO lines.
    """
    entries = result["entries"]
    rates = list(dict.fromkeys(entry["rate"] for entry in entries))
    policies = list(dict.fromkeys(entry["policy"] for entry in entries))
    names = sorted({name for entry in entries for name in entry["by_class"]})
    found: dict[str, Any] = {
        "policies": [{"name": name, "series": place % SERIES + 1} for place, name in enumerate(policies)],
        "rates": [{"key": str(place), "name": rate_words(rate)} for place, rate in enumerate(rates)],
        "classes": [{"key": name, "name": class_name(name)} for name in names],
        "by_rate": {},
    }
    for place, rate in enumerate(rates):
        own = [entry for entry in entries if entry["rate"] == rate]
        found["by_rate"][str(place)] = {
            "attainment": attainment(own, names, targets, result["level"]),
            "goodput": bars(own, "goodput_tokens_per_s", "tokens/s in time", "%{y:.1f} tok/s"),
            "cost": cost(own),
            "queue": queue(own),
            "ttft": {name: distribution(own, "ttft_s", name, "time to first token, s") for name in (ALL, *names)},
            "tpot": {name: distribution(own, "tpot_s", name, "time per output token, s") for name in (ALL, *names)},
        }
    if len(rates) > 1:
        found["over_rates"] = {
            "attainment_rates": over_rates(entries, policies, "attainment", "attained", result["level"]),
            "goodput_rates": over_rates(entries, policies, "goodput_tokens_per_s", "tokens/s in time", None),
        }
    return found


def rate_words(rate: float | None) -> str:
    return "original rate" if rate is None else f"{rate:.4g} requests/s"


def attainment(entries: Sequence[Entry], names: Sequence[str], targets: Mapping[str, float], level: float) -> Spec:
    """Attainment by class, one bar per policy, with the range over the seeds if there are several."""
    x = ["all", *(class_name(name) for name in names)]
    traces = []
    for place, entry in enumerate(entries):
        y = [entry["attainment"], *(entry["by_class"].get(name) for name in names)]
        low, high = entry["attainment_spread"]
        trace = _bar(entry["policy"], x, y, place, "%{y:.1%}")
        if high > low:
            above, below = high - entry["attainment"], entry["attainment"] - low
            trace["error_y"] = {"type": "data", "symmetric": False, "array": [above], "arrayminus": [below]}
        traces.append(trace)
    wanted = sorted({targets.get(name, level) for name in names} or {level}, reverse=True)
    lines = [{"y": share, "color": "bad", "text": f"SLO {share * 100:.4g} %"} for share in wanted]
    return {
        "traces": traces,
        "layout": {
            "y_title": "attained",
            "yaxis": {"range": [0, 1.08], "tickformat": ".0%"},
            "xaxis": {"type": "category", "tickmode": "array", "tickvals": x, "ticktext": [short(name) for name in x]},
            "lines": lines,
            "barmode": "group",
        },
    }


def short(name: str) -> str:
    """The label under the bars."""
    return name if len(name) <= LABEL_MAX else f"{name[: LABEL_MAX - 1]}…"


def bars(entries: Sequence[Entry], name: str, title: str, value: str) -> Spec:
    traces = [_bar(entry["policy"], [entry["policy"]], [entry[name]], i, value) for i, entry in enumerate(entries)]
    return {"traces": traces, "layout": {"y_title": title, "yaxis": {}, "xaxis": {"type": "category"}}}


def cost(entries: Sequence[Entry]) -> Spec:
    """Provisioned instance time times unit cost; on hover also per attained request."""
    traces = []
    for place, entry in enumerate(entries):
        first = entry["first_seed"]
        attained = first["attained_per_s"] * first["seconds"]
        each = f"{entry['cost'] / attained:.3g} per attained request" if attained else "no requests attained"
        trace = _bar(entry["policy"], [entry["policy"]], [entry["cost"]], place, "%{y:,.0f}")
        traces.append(trace | {"hovertemplate": f"%{{y:,.0f}}, {each}<extra>%{{fullData.name}}</extra>"})
    layout = {"y_title": "cost, units (instance-seconds x unit cost)", "yaxis": {}, "xaxis": {"type": "category"}}
    return {"traces": traces, "layout": layout}


def distribution(entries: Sequence[Entry], what: str, name: str, title: str) -> Spec:
    """Cumulative distribution over the requests that have the measurement, first seed; the targets as lines."""
    traces: list[dict[str, Any]] = []
    targets: dict[float, str] = {}  # and whose they are
    for place, entry in enumerate(entries):
        first = entry["first_seed"]
        one = first if name == ALL else first["by_class"].get(name, {})
        seconds = one.get("distribution", {}).get(what, [])
        targets |= targets_of(first, what, name)
        step = 1 / max(1, len(seconds) - 1)
        shares = [round(place * step, 4) for place in range(len(seconds))]
        traces.append(_line(entry["policy"], seconds, shares, place, "%{y:.0%} within %{x:.3g} s"))
    farthest = max((trace["x"][-1] for trace in traces if trace["x"]), default=0.0)
    lines = target_lines(targets, farthest)
    # A line does not widen the axis by itself.
    right = max([farthest, *(line["x"] for line in lines if "x" in line)])
    return {
        "traces": traces,
        "layout": {
            "y_title": "share of requests",
            "x_title": title,
            "yaxis": {"range": [0, 1.02], "tickformat": ".0%"},
            "xaxis": {"range": [0, right * 1.05]} if right else {"rangemode": "tozero"},
            "lines": lines,
            "hovermode": "closest",
        },
    }


def targets_of(first: Mapping[str, Any], what: str, name: str) -> dict[float, str]:
    """The targets, in seconds, and whose they are: of one class, or with ALL of each class."""
    if name != ALL:
        target = first["by_class"].get(name, {}).get("targets", {}).get(what)
        return {} if target is None else {target: ""}
    found: dict[float, list[str]] = {}
    for each, own in first["by_class"].items():
        if (target := own.get("targets", {}).get(what)) is not None:
            found.setdefault(target, []).append(class_name(each))
    if len(found) == 1:
        return dict.fromkeys(found, "")
    return {target: f" ({', '.join(classes)})" for target, classes in found.items()}


def target_lines(targets: Mapping[float, str], farthest: float) -> list[dict[str, Any]]:
    """`farthest`: the slowest request. Targets far beyond it would squeeze the curves, so one line of words names them.

    `left`: the words stand to the left of the line, where the axis ends soon after it.
    """
    near = [target for target in sorted(targets) if not farthest or target <= FARTHEST * farthest]
    right = max([farthest, *near])
    lines: list[dict[str, Any]] = [
        {"x": target, "left": target > right / 2, "color": "bad", "text": f"SLO {target:g} s{targets[target]}"}
        for target in near
    ]
    beyond = [f"{target:g} s" for target in sorted(targets) if target not in near]
    if beyond:
        lines.append({"beyond": True, "color": "bad", "text": f"beyond this chart: SLO {', '.join(beyond)}"})
    return lines


def queue(entries: Sequence[Entry]) -> Spec:
    """Requests without a first token, in the gateway's queue and in the engines."""
    traces = []
    for place, entry in enumerate(entries):
        over = entry["first_seed"]["queue"]
        waiting = [a + b for a, b in zip(over["queued"], over["waiting"], strict=True)]
        traces.append(_line(entry["policy"], over["at_s"], waiting, place, "%{y} waiting at %{x:.0f} s"))
    layout = {"y_title": "waiting requests", "x_title": "time since start, s", "yaxis": {}, "xaxis": {}}
    return {"traces": traces, "layout": layout | {"hovermode": "closest"}}


def over_rates(entries: Sequence[Entry], policies: Sequence[str], name: str, title: str, level: float | None) -> Spec:
    """Median over the seeds at each rate; for attainment also the range."""
    traces = []
    for place, policy in enumerate(policies):
        own = [entry for entry in entries if entry["policy"] == policy]
        value = "%{y:.1%} at %{x:.4g}/s" if level is not None else "%{y:.1f} tok/s at %{x:.4g}/s"
        trace = _line(policy, [entry["rate"] for entry in own], [entry[name] for entry in own], place, value)
        trace["mode"] = "lines+markers"
        if level is not None:
            spread = [entry["attainment_spread"] for entry in own]
            above = [high - entry[name] for (_, high), entry in zip(spread, own, strict=True)]
            below = [entry[name] - low for (low, _), entry in zip(spread, own, strict=True)]
            trace["error_y"] = {"type": "data", "symmetric": False, "array": above, "arrayminus": below}
        traces.append(trace)
    share = {"range": [0, 1.05], "tickformat": ".0%"} if level is not None else {}
    lines = [{"y": level, "color": "bad", "text": f"target {level * 100:.4g} %"}] if level is not None else []
    layout = {"y_title": title, "x_title": "requests/s", "yaxis": share, "xaxis": {}, "lines": lines}
    return {"traces": traces, "layout": layout | {"hovermode": "closest"}}


def _bar(name: str, x: Sequence[Any], y: Sequence[Any], place: int, value: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "bar",
        "x": list(x),
        "y": list(y),
        "marker": {"color": f"series-{place % SERIES + 1}"},
        "hovertemplate": f"{value}<extra>%{{fullData.name}}</extra>",
    }


def _line(name: str, x: Sequence[Any], y: Sequence[Any], place: int, value: str) -> dict[str, Any]:
    return {
        "name": name,
        "type": "scatter",
        "mode": "lines",
        "x": list(x),
        "y": list(y),
        "line": line_style(place),
        "hovertemplate": f"{value}<extra>%{{fullData.name}}</extra>",
    }
