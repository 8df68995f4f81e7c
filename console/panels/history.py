"""What the database knows about the last hour and day, for the Overview. Five or six queries, whatever the traffic."""

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
from controller.selectors import catalogue, fleet
from controller.selectors.attainment import Attainment, attainment, attainment_series
from controller.slo.classes import level_label
from controller.wording.reasons import class_name

HOUR = timedelta(hours=1)
DAY = timedelta(days=1)
TARGET_WITHOUT_CLASS = 0.95
NO_CLASS = "(none)"  # how a link says "requests without a class"


@dataclass(frozen=True, slots=True)
class Promise:
    target: float
    ttft_s: float | None


def promises(classes: Iterable[SLOClass], mappings: Iterable[PriorityMapping]) -> dict[tuple[str | None, str], Promise]:
    """Of classes by name, and of mapped priorities by the name that their requests are counted under."""
    levels = {key: Promise(TARGET_WITHOUT_CLASS, ttft_s) for key, ttft_s in level_targets(mappings).items()}
    named = {(row.tenant.name if row.tenant else None, row.name): Promise(row.target, row.ttft_s) for row in classes}
    return levels | named


def promise_of(known: Mapping[tuple[str | None, str], Promise], tenant: str, slo_class: str) -> Promise:
    """A tenant's own class wins over the common one; what has no class is held to the common default."""
    found = known.get((tenant, slo_class)) or known.get((None, slo_class))
    return found or Promise(TARGET_WITHOUT_CLASS, None)


def level_targets(mappings: Iterable[PriorityMapping]) -> dict[tuple[str | None, str], float]:
    """The TTFT that each level of each mapping begins with: what is measured moves it between the level's bounds."""
    return {
        (row.tenant.name if row.tenant else None, level_label(number)): level["ttft_s"]
        for row in mappings
        for number, level in enumerate(row.levels)
    }


def overview_history(now: datetime) -> dict[str, Any]:
    """Classes with their hour, day and budget; charts; cost. Plain values, for a template and for JSON alike."""
    known = promises(catalogue.slo_classes(), catalogue.priority_mappings())
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
    """An hour of what is provisioned now; and what the last hour cost, all of it and for each attained request.

    Both of the latter are of one window, that of `minutes`: whole minutes, by arrival.
    """
    rate = fleet.cost_rate()
    spent = fleet.cost(since=(now - HOUR).replace(second=0, microsecond=0), until=now)
    attained = sum(row.attained for row in minutes)
    each = spent / attained if attained else None
    whose = f"{count(rate.instances)} instance{'' if rate.instances == 1 else 's'} provisioned now"
    share = "nothing attained" if each is None else f"{money(each)} per attained"
    return {
        "cost_per_hour": rate.per_s * HOUR.total_seconds(),
        "cost_whose": whose if rate.instances else "no instance provisioned now",
        "cost_spent": spent,
        "cost_per_attained": each,
        "cost_hour": f"last hour: {money(spent)} spent, {share}",
    }


def chart_window(rows: Sequence[charts.Minute], now: datetime) -> tuple[float, float]:
    """The last hour, or less where nothing is older."""
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
    minutes: Sequence[Attainment], day: Sequence[Attainment], known: Mapping[tuple[str | None, str], Promise]
) -> list[dict[str, Any]]:
    hour: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for row in minutes:
        counts = hour[(row.tenant or "", row.slo_class or "")]
        counts[0] += row.finished
        counts[1] += row.attained
    found = []
    for series, row in enumerate(day):
        tenant, slo_class = row.tenant or "", row.slo_class or ""
        promise = promise_of(known, tenant, slo_class)
        finished, attained = hour[(tenant, slo_class)]
        found.append(
            {
                "key": row_key(tenant, slo_class),
                "series": series,  # one colour a class on every chart and in the table
                "tenant": tenant,
                "slo_class": slo_class,
                "name": class_name(slo_class),
                "target": promise.target,
                "ttft_target_s": promise.ttft_s,
                "hour": attained / finished if finished else None,
                "hour_budget": budget_words(finished, finished - attained, promise.target),
                "day": row.share,
                **error_budget(row.finished, row.finished - row.attained, promise.target),
                **links(tenant, slo_class),
            }
        )
    return found


def links(tenant: str, slo_class: str) -> dict[str, str]:
    """From a class to the requests that missed, to the decisions that bear on them, and to what of it waits."""
    about = urlencode({"tenant": tenant, "slo_class": slo_class or NO_CLASS})
    waits = urlencode({"key": row_key(tenant, slo_class)})
    return {
        "requests_url": f"{reverse('requests')}?{about}&attained=no",
        "decisions_url": f"{reverse('audit')}?{about}",
        "queue_url": f"{reverse('queue')}?{waits}",
    }
