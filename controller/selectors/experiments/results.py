"""Experiments as lists, one experiment with its runs, and its figures as a table for CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from django.db.models import QuerySet

from controller.models import Experiment, ExperimentRun, Trace
from controller.selectors.exports import FORMULA

ORDER = ("-created_at", "-id")
LONG = ("spec", "result")
QUANTILES = ("p50", "p90", "p95", "p99")


def experiments(*, state: str | None = None, kept: bool | None = None, text: str | None = None) -> QuerySet[Experiment]:
    """Newest first, without previews. `text`: part of the name."""
    rows = Experiment.objects.filter(kind=Experiment.Kind.EXPERIMENT)
    if state is not None:
        rows = rows.filter(state=state)
    if kept is not None:
        rows = rows.filter(kept=kept)
    if text:
        rows = rows.filter(name__icontains=text)
    return rows.order_by(*ORDER)


def experiment(slug: str) -> Experiment | None:
    return Experiment.objects.filter(slug=slug).first()


def runs(row: Experiment) -> list[ExperimentRun]:
    return list(row.runs.order_by("number"))


def traces() -> QuerySet[Trace]:
    """Newest first, without their content."""
    return Trace.objects.defer("content").order_by("-created_at", "-id")


def moving(since: datetime) -> list[Experiment]:
    """Experiments that are queued, run, or ended after `since`, for live pages."""
    open_ones = Experiment.objects.filter(state__in=Experiment.OPEN)
    ended = Experiment.objects.filter(ended_at__gte=since)
    return list((open_ones | ended).defer(*LONG).order_by(*ORDER)[:200])


HEADER = (
    "experiment", "policy", "policy_set", "rate", "class", "requests", "attainment", "attainment_lowest",
    "attainment_highest", "ttft_met", "tpot_met", "goodput_tokens_per_s", "attained_per_s", "cost", "utilisation",
    *(f"{what}_{share}_s" for what in ("ttft", "tpot", "e2e") for share in QUANTILES),
)  # fmt: skip


def table(row: Experiment) -> Iterable[Sequence[Any]]:
    """The result as rows under HEADER: for each entry one row over all classes (medians over seeds), then one for each
    class."""
    for entry in (row.result or {}).get("entries", []):
        first = entry["first_seed"]
        low, high = entry["attainment_spread"]
        head = (row.slug, entry["policy"], entry["policy_set"], entry["rate"])
        yield (
            *head, "", first["requests"], entry["attainment"], low, high, first["ttft_met"], first["tpot_met"],
            entry["goodput_tokens_per_s"], entry["attained_per_s"], entry["cost"], entry["utilisation"],
            *_latencies(first),
        )  # fmt: skip
        for name, share in entry["by_class"].items():
            one = first["by_class"].get(name)
            if one is not None:
                yield (
                    *head, name, one["requests"], share, "", "", one["ttft_met"], one["tpot_met"], "", "", "", "",
                    *_latencies(one),
                )  # fmt: skip


def _latencies(figures: Mapping[str, Any]) -> list[Any]:
    return [figures[what][share] for what in ("ttft_s", "tpot_s", "e2e_s") for share in QUANTILES]


def as_csv(row: Experiment) -> str:
    """The table as CSV. People choose labels and class names, so a spreadsheet must not run them as formulas."""
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(HEADER)
    for line in table(row):
        writer.writerow([f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA) else cell for cell in line])
    return out.getvalue()
