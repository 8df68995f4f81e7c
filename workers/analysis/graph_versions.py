"""Makes the pattern graphs of each tenant's recorded workflows, judges them on later ones, and publishes or refuses
them.

The split is by time, since a gateway asks about later workflows too. What graphs must not do worse is an equal share
for each step that is left of a workflow of the mean length.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import numpy as np
from celery.exceptions import SoftTimeLimitExceeded
from django.db.models import Max
from django.utils import timezone

from controller.models import GraphVersion, RequestRecord
from controller.predict.graph_medoids import medoids
from controller.predict.pattern_graphs import (
    MOST_NODES,
    SHORTEST_S,
    Call,
    GraphSet,
    graph_of,
    kind_of,
    kind_of_tool,
    levels_in,
    rests_of,
    so_far,
)
from controller.services.records.graph_versions import JudgedGraphs, graph_version_store
from workers.live import LiveUnavailable, run
from workers.workflows import cancellations

log = logging.getLogger(__name__)

MOST_WORKFLOWS = 1_500  # of a tenant, the newest
MOST_CALLS = 60_000  # of a tenant, the newest, that are read for them
MOST_EACH = 500  # calls of a workflow that is learned from: comparing one takes time with the square of them
LEAST_WORKFLOWS = 20
NEW_WORKFLOWS = 0.1  # as a share of the last version's, before another one is made
RECENT_S = 3_600.0  # whose tenants are looked at
READ_S = 172_800.0  # workflows older than a day hardly count
GAP_S = 600.0  # between two versions of a tenant
UNSURE_S = 3_600.0  # those that began in the first hour of this may have begun before it
IDLE_S = 120.0  # since its last call ended, before a workflow counts as finished; more where pauses are longer
MOST_IDLE_S = 1_800.0
WENT_ON_SHARE = 0.95  # of a tenant's workflows that never paused for longer than that
JUDGED_SHARE = 0.2


class FinishedWorkflow(NamedTuple):
    """`calls` by their beginning, in epoch seconds."""

    calls: Sequence[Call]
    ended: float

    @property
    def began(self) -> float:
        return self.calls[0].began


def train_tenants() -> list[GraphVersion]:
    """A new version of each tenant that has enough new workflows; those stored now."""
    stored = []
    now = timezone.now()
    recent = _usable().filter(arrived_at__gt=now - timedelta(seconds=RECENT_S))
    for tenant, newest in sorted(recent.values("tenant").annotate(at=Max("arrived_at")).values_list("tenant", "at")):
        last = GraphVersion.objects.filter(tenant=tenant).order_by("-version").first()
        if last is not None and (now - last.trained_at < timedelta(seconds=GAP_S) or newest <= last.trained_at):
            continue
        workflows = finished_workflows(tenant, now)
        before = None if last is None else last.trained_at.timestamp()
        new = sum(before is None or each.ended > before for each in workflows)
        if len(workflows) < LEAST_WORKFLOWS or (last is not None and new < NEW_WORKFLOWS * last.workflows):
            continue
        try:
            judged = judge(tenant, workflows, now.timestamp())
            if judged is None:
                continue
            row = graph_version_store(judged)
        except SoftTimeLimitExceeded:
            raise
        except Exception:  # what one tenant recorded must not keep the others from theirs
            log.exception("no pattern graphs of %s", tenant)
            continue
        stored.append(row)
        log.info("pattern graphs %s: %s", row, row.refused or f"in force, wrong by {row.error:.3f} of the time left")
    return stored


def _usable() -> Any:
    """Calls that an engine answered; those that got a kept answer again say nothing of the time they take."""
    rows = RequestRecord.objects.exclude(workflow="")
    return rows.filter(outcome="ok", attempts__gt=0, e2e_s__isnull=False, stands_for=1)


def finished_workflows(tenant: str, now: datetime) -> list[FinishedWorkflow]:
    """The newest MOST_WORKFLOWS, by their end. Without those that were cut short, that may still go on, that may have
    begun before what is read, or that have more than MOST_EACH calls."""
    since = now - timedelta(seconds=READ_S)
    rows = _usable().filter(tenant=tenant, arrived_at__gt=since).order_by("-arrived_at", "-id")
    columns = (
        "workflow", "arrived_at", "e2e_s", "model", "stage", "prompt_tokens", "output_tokens", "id",
        "step_key", "parents", "tool_steps",
    )  # fmt: skip
    read = list(rows.values_list(*columns)[:MOST_CALLS])
    oldest, whole = since, since + timedelta(seconds=UNSURE_S)
    if len(read) == MOST_CALLS:
        oldest, whole = read[-1][1], read[int(0.9 * MOST_CALLS)][1]
    steps: dict[str, list[tuple[Call, Sequence[str], Sequence[str] | None]]] = defaultdict(list)
    ends: dict[str, list[float]] = defaultdict(list)  # when something was recorded of them, epoch seconds
    for workflow, at, took, model, stage, prompt, output, name, key, parents, tools in reversed(read):
        began = at.timestamp()
        call = Call(kind_of(model, stage), began, began + took, prompt, output)
        steps[workflow].append((call, (name, key), parents))
        ends[workflow].append(began + took)
        for tool in tools:
            call = Call(kind_of_tool(tool["name"]), tool["began"], tool["ended"], 0, 0)
            steps[workflow].append((call, (tool["key"],), tool["parents"]))
    left_out = _cut_short(tenant, oldest, ends) | _cancelled(tenant, steps)
    idle_s = _idle_s(ends.values())
    found = [
        FinishedWorkflow(each, max(call.ended or call.began for call in each))
        for each in (
            _numbered(calls)
            for workflow, calls in steps.items()
            if workflow not in left_out and now.timestamp() - max(ends[workflow]) >= idle_s and len(calls) <= MOST_EACH
        )
        if each[0].began >= whole.timestamp()
    ]
    return sorted(found, key=lambda each: each.ended)[-MOST_WORKFLOWS:]


def _cut_short(tenant: str, since: datetime, ends: dict[str, list[float]]) -> set[str]:
    """The workflows of `ends` with a call that was not answered under any attempt of its key. Their ends are added."""
    rows = RequestRecord.objects.filter(tenant=tenant, arrived_at__gte=since).exclude(workflow="")
    keyed = rows.filter(outcome="ok").exclude(step_key="")
    answered = {each for each in keyed.values_list("workflow", "step_key").iterator() if each[0] in ends}
    found = set()
    others = rows.exclude(outcome="ok").values_list("workflow", "step_key", "arrived_at", "e2e_s")
    for workflow, key, at, took in others.iterator():
        if workflow in ends:
            ends[workflow].append(at.timestamp() + (took or 0.0))
            if (workflow, key) not in answered:  # without a key nothing tells which request took its place
                found.add(workflow)
    return found


def _cancelled(tenant: str, began: Container[str]) -> set[str]:
    """The workflows that were cancelled, of the newest CANCELLATIONS_KEPT. While requests of theirs ran, records tell
    it as well; between two calls nothing else does."""
    try:
        newest = run(cancellations("0-0"))
    except LiveUnavailable as why:
        log.warning("cancelled workflows are not known: %s", why)
        return set()
    return {each.workflow for each in newest if each.tenant == tenant and each.workflow in began}


def _idle_s(ends: Iterable[Sequence[float]]) -> float:
    """Seconds of silence after which a workflow counts as finished: nearly all others of the tenant went on sooner. A
    call has no record while it runs, so silence is the time between the ends of two."""
    longest = [float(np.diff(sorted(each)).max()) for each in ends if len(each) > 1]
    usual_s = float(np.quantile(longest, WENT_ON_SHARE)) if longest else 0.0
    return min(max(IDLE_S, usual_s), MOST_IDLE_S)


def _numbered(steps: list[tuple[Call, Sequence[str], Sequence[str] | None]]) -> list[Call]:
    """Calls by their beginning, from those with their names and the names of their parents."""
    numbers: dict[str, int] = {}
    calls = []
    for number, (call, names, parents) in enumerate(sorted(steps, key=lambda step: step[0].began), 1):
        calls.append(call._replace(number=number, parents=None if parents is None else parents_in(parents, numbers)))
        numbers |= dict.fromkeys(filter(None, names), number)
    return calls


def parents_in(named: Sequence[str], numbers: Mapping[str, int]) -> tuple[int, ...] | None:
    """The numbers of the calls that have these names. None: there are parents, and the record has none of them, so
    times say what the call depends on."""
    found = tuple(numbers[name] for name in named if name in numbers)
    return found if found or not named else None


def graphs_of(workflows: Sequence[FinishedWorkflow], now: float, tenant: str) -> GraphSet:
    """`now`: epoch seconds, from which their age counts. Raises ValueError for too many kinds of calls, or too old."""
    hours = [max(0.0, now - each.ended) / 3_600 for each in workflows]
    return medoids([graph_of(each.calls) for each in workflows], hours, about={"tenant": tenant})


def judge(tenant: str, workflows: Sequence[FinishedWorkflow], now: float) -> JudgedGraphs | None:
    """Of the earlier workflows, judged on the later ones. None: they have too many kinds of calls, or are too old."""
    split = len(workflows) - max(1, int(JUDGED_SHARE * len(workflows)))
    earlier, later = workflows[:split], workflows[split:]
    try:
        graphs = graphs_of(earlier, min(now, earlier[-1].ended), tenant)
    except ValueError as why:
        log.info("no pattern graphs of %s: %s", tenant, why)
        return None
    length = float(np.mean([len(levels_in(each.calls)) for each in earlier]))
    errors = [step for each in later for step in step_errors(graphs, each.calls, length)]
    told = [step for step in errors if step.graph is not None]
    error = float(np.mean([step.graph for step in told])) if told else 1.0
    even = float(np.mean([step.even for step in (told or errors)])) if errors else 1.0
    return JudgedGraphs(
        tenant=tenant,
        found=graphs,
        first_at=datetime.fromtimestamp(earlier[0].began, tz=timezone.get_current_timezone()),
        last_at=datetime.fromtimestamp(max(each.began for each in earlier), tz=timezone.get_current_timezone()),
        workflows=len(earlier),
        judged=len(later),
        matched=len(told) / len(errors) if errors else 0.0,
        error=error,
        even_error=even,
        refused="" if told and error <= even else f"wrong by {error:.3f} of the time left, equal shares by {even:.3f}",
    )


class StepError(NamedTuple):
    """Absolute differences from the share of the time left that a level really took. `graph` None: like no graph."""

    level: int
    graph: float | None
    even: float


def step_errors(graphs: GraphSet, calls: Sequence[Call], length: float) -> Iterable[StepError]:
    """At the beginning of each level of a workflow, as a gateway would have been asked. Not of the last one, which has
    all that is left, nor of those that ran beside an earlier one. `length`: mean number of levels, which equal shares
    are told."""
    levels = levels_in(calls)
    for level, (began, rest) in enumerate(list(zip(levels, rests_of(calls), strict=True))[:-1]):
        if rest[0] <= SHORTEST_S:
            continue  # it ran beside an earlier level, and has no time of its own
        known = so_far(calls, began)
        truth = rest[0] / sum(rest)
        match = graphs.match(known[:MOST_NODES], len(known[MOST_NODES:]))
        share = None if match is None else match.seconds[0] / sum(match.seconds)
        even = 1.0 / max(1.0, length - level)
        yield StepError(level, None if share is None else abs(share - truth), abs(even - truth))
