"""`stage_error`, `match_ms` and `graph_bytes` of bench-analyzer: pattern graphs of agents' runs, asked about others.

A session of a trace is a workflow; every second one is recorded, the others run. At the beginning of each level of a
running one (for these agents, each call) a gateway would ask what share of the time left the step gets. The truth is
what it took, waiting included, of what the rest of the run took.
"""

from __future__ import annotations

import csv
import gzip
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from controller.predict.graph_medoids import medoids
from controller.predict.pattern_graphs import (
    MOST_GRAPHS,
    MOST_NODES,
    SHORTEST_S,
    Call,
    GraphSet,
    graph_of,
    kind_of,
    levels_in,
    rest_of,
    set_of,
    so_far,
)
from controller.slo.stage_deadlines import STAGE_DEADLINES, stage_due

AGENTS = {"swebench_agent_sessions": "duration_s", "claude_code_sessions_head5000": "api_time_s"}
STAGES = (0, 1, 2, 5, 10, 20, 30)  # from each of these to before the next
MOST_CALLS = 120  # of a session: claude_code has two of more than a thousand


def sessions(path: Path, duration: str) -> dict[str, list[Call]]:
    """The calls of each session, in the order in which they began. `duration`: the column with a call's seconds."""
    found: dict[str, list[Call]] = defaultdict(list)
    with gzip.open(path, "rt") as file:
        for row in csv.DictReader(file):
            began = float(row["arrival_s"])
            tokens = int(row["input_tokens"]), int(row["output_tokens"])
            found[row["session"]].append(
                Call(kind_of(row["model"], ""), began, began + float(row[duration] or 0), *tokens)
            )
    return {name: sorted(calls, key=lambda call: call.began)[:MOST_CALLS] for name, calls in found.items()}


def halves(found: dict[str, list[Call]]) -> tuple[list[list[Call]], list[list[Call]]]:
    """Recorded runs, and others."""
    names = sorted(found)
    return [found[name] for name in names[::2]], [found[name] for name in names[1::2]]


def stage_errors(graphs: GraphSet, recorded: Sequence[Sequence[Call]], asked: Sequence[Sequence[Call]]) -> Any:
    """By stage and rule: mean absolute error in shares of the time left, and by the formulations of App. A in shares of
    the whole time, of when the stage ends; both of the graph at the steps that were like one. `matched`: their share of
    all; `alike`: of steps whose whole structure was. `gateway`: of all steps, those like no graph counting as the last
    one."""
    length = float(np.mean([len(levels_in(calls)) for calls in recorded]))
    errors: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    steps: dict[int, int] = defaultdict(int)
    matched: dict[int, int] = defaultdict(int)
    alike: dict[int, int] = defaultdict(int)
    for calls in asked:
        levels = levels_in(calls)
        for level, began in enumerate(levels[:-1]):
            rest = rest_of(calls, level)
            if rest[0] <= SHORTEST_S:
                continue  # it ran beside an earlier level, and has no time of its own
            stage = max(each for each in STAGES if each <= level)
            steps[stage] += 1
            known = so_far(calls, began)
            match = graphs.match(known[:MOST_NODES], len(known[MOST_NODES:]))
            alike[stage] += match is not None and match.candidates > 0
            truth = rest[0] / sum(rest)
            shares = {
                "last": 1.0,
                "even_split": 1.0 / max(1.0, length - level),
                "steps_left": 1.0 / (len(levels) - level),
                "gateway": 1.0 if match is None else match.seconds[0] / sum(match.seconds),
            }
            matched[stage] += match is not None
            for rule, share in shares.items():
                errors[stage][rule].append(abs(share - truth))
            if match is None:
                continue
            errors[stage]["graph"].append(errors[stage]["gateway"][-1])
            for rule, error in formulations(graphs, match.graph, calls, level, began).items():
                errors[stage][rule].append(error)
    return {
        str(stage): {
            "steps": steps[stage],
            "matched": round(matched[stage] / steps[stage], 3),
            "alike": round(alike[stage] / steps[stage], 3),
            **{rule: round(float(np.mean(each)), 4) for rule, each in errors[stage].items()},
        }
        for stage in sorted(steps)
    }


def formulations(graphs: GraphSet, graph: int, calls: Sequence[Call], level: int, began: float) -> dict[str, float]:
    """Of each rule of App. A, if the workflow is due when it really ends: the error of when this stage ends."""
    seconds = [each.gap_s + each.run_s for each in graphs.levels(graph)]
    first = calls[0].began
    whole = sum(rest_of(calls, 0))
    truth = (began - first + rest_of(calls, level)[0]) / whole
    return {
        f"due_{rule}": abs(stage_due(rule, seconds, level, first, began, whole) - first - truth * whole) / whole
        for rule in STAGE_DEADLINES
    }


def stage_table(trace: str, stages: Mapping[str, Mapping[str, float]]) -> str:
    """`stage_errors` for people: a row for each stage, and a column for each rule. A rule that was asked nowhere in a
    stage has no figure there."""
    columns = list(dict.fromkeys(name for row in stages.values() for name in row))
    widths = [max(8, len(name)) for name in columns]
    heads = [f"{name:>{width}}" for name, width in zip(columns, widths, strict=True)]
    lines = ["  ".join([f"{trace:30}", *heads])]
    for stage, row in stages.items():
        cells = [f"{row.get(name, '-'):>{width}}" for name, width in zip(columns, widths, strict=True)]
        lines.append("  ".join([f"{'from step ' + stage:>30}", *cells]))
    return "\n".join(lines)


def match_times(recorded: Sequence[Sequence[Call]], asked: Sequence[Sequence[Call]]) -> tuple[list[float], GraphSet]:
    """Milliseconds of processor time of each match with MOST_GRAPHS graphs: recorded runs from any of their calls on,
    since there are fewer runs."""
    parts = [calls[start:] for start in range(MOST_CALLS) for calls in recorded if start + 2 < len(calls)]
    graphs = set_of([graph_of(calls) for calls in parts[:MOST_GRAPHS]], [1.0] * min(len(parts), MOST_GRAPHS), {})
    graphs.prepare()
    found = []
    for calls in asked:
        for began in levels_in(calls):
            known = so_far(calls, began)
            started = time.thread_time()
            graphs.match(known[:MOST_NODES], len(known[MOST_NODES:]))
            found.append((time.thread_time() - started) * 1e3)
    return found, graphs


def graph_figures(folder: Path) -> dict[str, Any]:
    """Of the agents' traces in this folder."""
    by_trace: dict[str, Any] = {}
    times: list[float] = []
    largest, count = 0.0, MOST_GRAPHS
    for name, duration in AGENTS.items():
        recorded, asked = halves(sessions(folder / f"{name}.csv.gz", duration))
        graphs = medoids([graph_of(calls) for calls in recorded], [0.0] * len(recorded))
        by_trace[name] = stage_errors(graphs, recorded, asked)
        took, many = match_times(recorded, asked)
        times += took
        largest, count = max(largest, many.graph_bytes), min(count, len(many))
    p50, p99 = np.quantile(times, (0.5, 0.99))
    return {
        "stage_error": by_trace,
        "match_ms": {"p50": round(float(p50), 3), "p99": round(float(p99), 3), "graphs": count},
        "graph_bytes": largest,
    }
