"""The difference between a simulation and a measurement: attainment in points, TTFT percentiles in per cent."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.load.scoring import percentile

POINTS_AIM, P50_AIM_PCT, P95_AIM_PCT = 5.0, 10.0, 20.0


@dataclass(frozen=True, slots=True)
class SeenRun:
    """One run, real or simulated: attainment (0..1) by class and of all, and the TTFT of each request in seconds.

    In both, a request without a first token when the run was cut counts with the time that it had waited by then.
    """

    attainment: float
    by_class: Mapping[str, float]
    ttft_s: Sequence[float]

    @property
    def p50_s(self) -> float:
        return percentile(self.ttft_s, 0.5)

    @property
    def p95_s(self) -> float:
        return percentile(self.ttft_s, 0.95)


def compare(real: Sequence[SeenRun], simulated: Sequence[SeenRun]) -> dict[str, Any]:
    """Medians of the simulated runs against the medians of the real ones.

    `reached`: attainment within 5 points, or within the spread of the real runs if that is larger; TTFT p50 within 10
    %, p95 within 20 %.
    """
    attained, expected = [run.attainment for run in real], [run.attainment for run in simulated]
    spread = 100 * (max(attained) - min(attained))
    points = 100 * (statistics.median(expected) - statistics.median(attained))
    p50, p95 = statistics.median(run.p50_s for run in real), statistics.median(run.p95_s for run in real)
    p50_told, p95_told = (statistics.median(of) for of in zip(*((r.p50_s, r.p95_s) for r in simulated), strict=True))
    p50_error, p95_error = _error_pct(p50_told, p50), _error_pct(p95_told, p95)
    return {
        "attainment": [round(share, 4) for share in attained],
        "attainment_simulated": round(statistics.median(expected), 4),
        "attainment_simulated_spread_points": round(100 * (max(expected) - min(expected)), 2),
        "attainment_spread_points": round(spread, 2),
        "attainment_error_points": round(points, 2),
        "ttft_p50_s": round(p50, 4),
        "ttft_p50_spread_s": [round(f(run.p50_s for run in real), 4) for f in (min, max)],
        "ttft_p50_simulated_s": round(p50_told, 4),
        "ttft_p50_error_pct": round(p50_error, 2),
        "ttft_p95_s": round(p95, 4),
        "ttft_p95_spread_s": [round(f(run.p95_s for run in real), 4) for f in (min, max)],
        "ttft_p95_simulated_s": round(p95_told, 4),
        "ttft_p95_error_pct": round(p95_error, 2),
        "by_class": {
            name: [round(statistics.median(run.by_class.get(name, 0.0) for run in of), 4) for of in (real, simulated)]
            for name in sorted(simulated[0].by_class)
        },
        "reached": {
            "attainment": abs(points) <= max(POINTS_AIM, spread),
            "ttft_p50": abs(p50_error) <= P50_AIM_PCT,
            "ttft_p95": abs(p95_error) <= P95_AIM_PCT,
        },
    }


def parts(predicted: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Whose each error is, by load and policy, from two entries of `compare` over the same real runs.

    `own`: each real run simulated with the machine of that very run, so that its error is the simulator's. The rest of
    the predicted error is the machine's, which was another in the calibration runs before and after. `noise_pct`: how
    far equal real runs are apart, of their median. `within`: the error is within its aim, or the simulator's part is.
    """
    found = []
    for whole, alone in zip(predicted, own, strict=True):
        entry: dict[str, Any] = {"what": whole["what"]}
        for name, aim in (("p50", P50_AIM_PCT), ("p95", P95_AIM_PCT)):
            error, simulator = whole[f"ttft_{name}_error_pct"], alone[f"ttft_{name}_error_pct"]
            low, high = whole[f"ttft_{name}_spread_s"]
            median = whole[f"ttft_{name}_s"]
            entry[name] = {
                "error_pct": error,
                "simulator_pct": simulator,
                "machine_pct": round(error - simulator, 2),
                "noise_pct": round(100 * (high - low) / median, 2) if median > 0 else math.nan,
                "within": abs(error) <= aim or abs(simulator) <= aim,
            }
        found.append(entry)
    return found


def parts_table(entries: Sequence[Mapping[str, Any]]) -> str:
    """One row per entry of `parts`, in per cent of the measured TTFT."""
    columns = ("error", "simulator", "machine", "noise")
    lines = [
        f"{'per cent of the measured TTFT':44}" + "".join(f"{f'{n} {c}':>15}" for n in ("p50", "p95") for c in columns)
    ]
    for entry in entries:
        cells = []
        for name in ("p50", "p95"):
            of = entry[name]
            cells += [f"{of[f'{column}_pct']:>+14.1f} " for column in columns[:3]]
            cells.append(f"{of['noise_pct']:>14.1f}" + (" " if of["within"] else "*"))
        lines.append(f"{entry['what']:44}" + "".join(cells))
    lines.append("* the simulator's own part is beyond 10 % (p50) or 20 % (p95), and so is the error")
    return "\n".join(lines)


def _error_pct(simulated: float, real: float) -> float:
    return 100 * (simulated / real - 1) if real > 0 else math.nan


def worst(entries: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The largest errors of all entries, by size."""
    keys = ("attainment_error_points", "ttft_p50_error_pct", "ttft_p95_error_pct")
    return {key: max((entry[key] for entry in entries), key=abs) for key in keys}


def table(entries: Sequence[Mapping[str, Any]]) -> str:
    """One row per entry: `what`, then real and simulated side by side."""
    lines = [
        f"{'':44}{'attainment':>17}{'spread':>8}{'error':>8}{'TTFT p50':>19}{'error':>8}{'TTFT p95':>19}{'error':>8}"
    ]
    for entry in entries:
        reached = entry["reached"]
        marks = ["" if reached[key] else "*" for key in ("attainment", "ttft_p50", "ttft_p95")]
        attained = f"{statistics.median(entry['attainment']):.3f} {entry['attainment_simulated']:.3f}"
        p50 = f"{entry['ttft_p50_s']:.3f} {entry['ttft_p50_simulated_s']:.3f} s"
        p95 = f"{entry['ttft_p95_s']:.3f} {entry['ttft_p95_simulated_s']:.3f} s"
        lines.append(
            f"{entry['what']:44}{attained:>17}{entry['attainment_spread_points']:>8.1f}"
            f"{entry['attainment_error_points']:>+7.1f}{marks[0]:1}{p50:>19}{entry['ttft_p50_error_pct']:>+7.1f}%"
            f"{marks[1]}{p95:>19}{entry['ttft_p95_error_pct']:>+7.1f}%{marks[2]}"
        )
    lines.append("real, simulated; attainment errors in points; * beyond 5 points and the spread, 10 % or 20 %")
    return "\n".join(lines)
