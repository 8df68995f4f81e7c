"""The last hour and 24 hours from the database, for the Overview. Five or six queries, whatever the traffic."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.urls import reverse
from django.utils.http import urlencode

from console.charts import base as charts
from console.live.live_view import row_key
from console.templatetags.units import count, money
from console.wording.budget import budget_words, error_budget
from controller.models import PriorityMapping, SLOClass
from controller.selectors import catalogue
from controller.selectors.fleet import cost as fleet
from controller.selectors.records.attainment import Attainment, attainment, attainment_series
from controller.slo.classes import level_label
from controller.wording.vocabulary import class_name

HOUR = timedelta(hours=1)
DAY = timedelta(days=1)
TARGET_WITHOUT_CLASS = 0.95
NO_CLASS = "(none)"  # the value of ?slo_class= for requests without a class


@dataclass(frozen=True, slots=True)
class Goal:
    """Share of requests that should attain their SLO, and their TTFT target in seconds, if one is known."""

    target: float
    ttft_s: float | None


def goals(classes: Iterable[SLOClass], mappings: Iterable[PriorityMapping]) -> dict[tuple[str | None, str], Goal]:
    """By owner (None: all tenants) and name. Mapped priorities have the name under which their requests are counted."""
    levels = {key: Goal(TARGET_WITHOUT_CLASS, ttft_s) for key, ttft_s in level_targets(mappings).items()}
    named = {(row.tenant.name if row.tenant else None, row.name): Goal(row.target, row.ttft_s) for row in classes}
    return levels | named


def goal_of(known: Mapping[tuple[str | None, str], Goal], tenant: str, slo_class: str) -> Goal:
    """A tenant's own class wins over the common one. Requests without a class get the default target."""
    found = known.get((tenant, slo_class)) or known.get((None, slo_class))
    return found or Goal(TARGET_WITHOUT_CLASS, None)


def level_targets(mappings: Iterable[PriorityMapping]) -> dict[tuple[str | None, str], float]:
    """The initial TTFT of each level of each mapping; measurements later move it within the level's bounds."""
    return {
        (row.tenant.name if row.tenant else None, level_label(number)): level["ttft_s"]
        for row in mappings
        for number, level in enumerate(row.levels)
    }


def overview_history(now: datetime) -> dict[str, Any]:
    """Classes with their last hour, 24 hours and budget; charts; cost. Plain values, for the template and as JSON."""
    known = goals(catalogue.slo_classes(), catalogue.priority_mappings())
    minutes = attainment_series(since=now - HOUR, until=now, bucket=timedelta(minutes=1), by=("tenant", "slo_class"))
    day = attainment(since=now - DAY, until=now, quantiles=False)
    classes = class_history(minutes, day, known)
    targets = {each["key"]: each["target"] for each in classes}
    palette = {each["key"]: each["series"] for each in classes}
    rows = [_minute(row) for row in minutes]
    window = chart_window(rows, now)
    return {
        "classes": classes,
        **costs(minutes, now),
        "charts": {
            "attainment": charts.attainment(rows, palette, targets, *window),
            "goodput": charts.goodput(rows, palette, *window),
        },
    }


def costs(minutes: Sequence[Attainment], now: datetime) -> dict[str, Any]:
    """Cost per hour of what is provisioned; total cost of the last hour, and cost per attained request.

    The last two cover the same window as `minutes`: whole minutes, by arrival.
    """
    rate = fleet.cost_rate()
    spent = fleet.cost(since=(now - HOUR).replace(second=0, microsecond=0), until=now)
    attained = sum(row.attained for row in minutes)
    each = spent / attained if attained else None
    whose = f"{count(rate.instances)} instance{'' if rate.instances == 1 else 's'} provisioned"
    share = "no request attained" if each is None else f"{money(each)} units per attained request"
    return {
        "cost_per_hour": rate.per_s * HOUR.total_seconds(),
        "cost_whose": whose if rate.instances else "no instance provisioned",
        "cost_spent": spent,
        "cost_per_attained": each,
        "cost_hour": f"last hour: {money(spent)} units, {share}",
    }


def chart_window(rows: Sequence[charts.Minute], now: datetime) -> tuple[float, float]:
    """Since and until of the charts: the last hour, or less if nothing is older."""
    return charts.shortest_window([row.at for row in rows], now.timestamp(), HOUR.total_seconds())


def _minute(row: Attainment) -> charts.Minute:
    tenant, slo_class = row.tenant or "", row.slo_class or ""
    return charts.Minute(
        at=row.start.timestamp() if row.start else 0.0,
        key=row_key(tenant, slo_class),
        name=f"{class_name(slo_class)} · {tenant}",
        finished=row.finished,
        attained=row.attained,
        goodput_tokens=row.goodput_tokens,
    )


def class_history(
    minutes: Sequence[Attainment], day: Sequence[Attainment], known: Mapping[tuple[str | None, str], Goal]
) -> list[dict[str, Any]]:
    hour: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for row in minutes:
        counts = hour[(row.tenant or "", row.slo_class or "")]
        counts[0] += row.finished
        counts[1] += row.attained
    found = []
    for series, row in enumerate(day):
        tenant, slo_class = row.tenant or "", row.slo_class or ""
        goal = goal_of(known, tenant, slo_class)
        finished, attained = hour[(tenant, slo_class)]
        found.append(
            {
                "key": row_key(tenant, slo_class),
                "series": series,  # the class has this colour in every chart and in the table
                "tenant": tenant,
                "slo_class": slo_class,
                "name": class_name(slo_class),
                "target": goal.target,
                "ttft_target_s": goal.ttft_s,
                "hour": attained / finished if finished else None,
                "hour_budget": budget_words(finished, finished - attained, goal.target),
                "day": row.share,
                **error_budget(row.finished, row.finished - row.attained, goal.target),
                **links(tenant, slo_class),
            }
        )
    return found


def links(tenant: str, slo_class: str) -> dict[str, str]:
    """Links from a class to its misses, to the decisions that affect it, and to its queued requests."""
    about = urlencode({"tenant": tenant, "slo_class": slo_class or NO_CLASS})
    waits = urlencode({"key": row_key(tenant, slo_class)})
    return {
        "requests_url": f"{reverse('requests')}?{about}&attained=no",
        "decisions_url": f"{reverse('audit')}?{about}",
        "queue_url": f"{reverse('queue')}?{waits}",
    }
