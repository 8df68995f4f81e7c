"""Plain-text tables of comparisons, for a terminal and for the appendix of a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def comparison_table(found: Mapping[str, Any]) -> str:
    """One row per rate and policy; the last columns are the classes."""
    classes = sorted({name for entry in found["entries"] for name in entry["by_class"]})
    head = ["rate /s", "x knee", "policy", "attained", "spread", "TTFT p50", "p95", "TPOT p50", "E2E", "util", *classes]
    rows = [_row(entry, classes, found.get("knee")) for entry in found["entries"]]
    return aligned([head, *rows])


def _row(entry: Mapping[str, Any], classes: Sequence[str], knee: float | None) -> list[str]:
    low, high = entry["attainment_spread"]
    rate = entry["rate"]
    return [
        f"{rate:.2f}" if rate else "own",
        f"{rate / knee:.2f}" if rate and knee else "",
        entry["policy"],
        f"{entry['attainment']:.3f}",
        f"{low:.3f}-{high:.3f}",
        _seconds(entry["ttft_p50_s"]),
        _seconds(entry["ttft_p95_s"]),
        _seconds(entry["tpot_p50_s"]),
        _seconds(entry["e2e_mean_s"]),
        f"{entry['utilisation']:.2f}",
        *(f"{entry['by_class'][name]:.2f}" if name in entry["by_class"] else "" for name in classes),
    ]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def sweep_table(found: Mapping[str, Any]) -> str:
    """Attainment by policy (rows) and rate (columns)."""
    rates = list(dict.fromkeys(entry["rate"] for entry in found["entries"]))
    policies = list(dict.fromkeys(entry["policy"] for entry in found["entries"]))
    by = {(entry["policy"], entry["rate"]): entry["attainment"] for entry in found["entries"]}
    head = ["policy", *(f"{rate:.4g}/s" if rate else "own rate" for rate in rates)]
    return aligned([head, *([policy, *(f"{by[policy, rate]:.3f}" for rate in rates)] for policy in policies)])


def goodput_table(found: Mapping[str, Any]) -> str:
    """Policies by goodput rate, best first."""
    ordered = sorted(found["goodput"].items(), key=lambda item: (-item[1], item[0]))
    head = ["policy", f"requests/s at {found['level']:g}"]
    return aligned([head, *([name, f"{rate:.2f}"] for name, rate in ordered)])


def aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
