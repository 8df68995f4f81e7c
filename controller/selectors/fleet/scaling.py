"""The history of the scaler: what it saw, what it did, and how long started instances took to serve; its warm pools."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import reduce
from operator import or_
from statistics import median
from typing import Any, NamedTuple

from django.db.models import (
    BooleanField,
    CharField,
    Count,
    ExpressionWrapper,
    F,
    OuterRef,
    Q,
    QuerySet,
    Subquery,
    Value,
    Window,
)
from django.db.models.functions import RowNumber

from controller.engine.start_steps import PROCESS, READY
from controller.models import Action, Decision, Instance, RequestRecord, ScalerState, ScalingPolicy, ScalingSample
from controller.models.fleet import Role, Weights
from controller.scale.capacity_plan import NO_DEVICE, NOTHING_TO_START
from controller.scale.observation import NO_CAPACITY
from controller.scale.provisioning import starters
from controller.selectors.fleet.topology import rooms_for
from controller.selectors.fleet.weights import ANSWERED, FIRST_AT, LONGEST_WAIT

STARTS_SHOWN = 20
COLD_STARTS = 5  # the newest: what a start takes follows the machine and the template
SERVED_WITHIN = timedelta(hours=1)
LOADS = (Action.Kind.WEIGHTS_LOAD, Action.Kind.WAKE)
WEIGHTS_FROM = {"engine": "another engine", "host": "a host copy", "disk": "disk"}
OF_THE_SCALER = Q(kind__startswith="scale_") | Q(kind="role_change")
# It was never ready, and its launch template is paused: somebody tried another template, which must not keep the scaler
# from the one that served.
TRIED = Q(ready_at__isnull=True, template__paused_at__isnull=False)
SAMPLE_NEAR = timedelta(seconds=30)  # a sample that is further away is not used for a moment


@dataclass(frozen=True, slots=True)
class InstanceStart:
    """One instance from the request to start it until it serves, in seconds after that request; None: not yet, or
    never.

    For a warm spare or a sleeper the request is the scale-out that took it, and it is ready once its weights are there,
    as it reports itself if it does. For one that was launched from a seed the request is the launch command
    (`controller/services/fleet/launches.py`). Otherwise it is ready when it was first seen ready, whatever became of
    that process, or at its first token if that was earlier.
    """

    id: str
    source: str  # its provisioner and launch template, and whether it was warm, asleep or launched from a seed
    desired_at: datetime
    ready_s: float | None
    served_s: float | None  # first token of its first request, if that came within SERVED_WITHIN
    weights: str = ""  # engine, host or disk, if an action loaded them
    load_s: float | None = None
    cold: bool = False  # a new process was started for it
    idle_s: float = 0.0  # of `served_s`: it was ready and waited for its first request
    state: str = ""  # now, as pages name it
    error: str = ""

    @property
    def way(self) -> str:
        """What its time depends on: its provisioner, its template, how it began, and where its weights came from."""
        began = f"{self.source}, cold" if self.cold else self.source
        return f"{began}, weights from {WEIGHTS_FROM[self.weights]}" if self.weights in WEIGHTS_FROM else began


@dataclass(frozen=True, slots=True)
class WayTimes:
    """Medians over the starts of one way, in seconds after the request; `served` of `count` have given a first token.

    `served_s` is without the wait for a first request, since that says nothing about the start; `idle` of them waited.
    """

    way: str
    count: int
    served: int
    ready_s: float | None
    served_s: float | None
    load_s: float | None
    idle: int = 0


class First(NamedTuple):
    """The request that an instance served first."""

    token_at: datetime
    arrived_at: datetime


class Counts(NamedTuple):
    """Instances of a stage by their state to the scaler."""

    ready: int = 0
    starting: int = 0
    draining: int = 0


def policies(*, model: str | None = None) -> list[ScalingPolicy]:
    """Policies with the state of their scaler, by model and role."""
    rows = ScalingPolicy.objects.select_related("model", "state").order_by("model__name", "role")
    return list(rows if model is None else rows.filter(model__name=model))


def state_of(policy: ScalingPolicy) -> ScalerState | None:
    return getattr(policy, "state", None)


def samples(*, since: datetime, until: datetime) -> dict[int, list[ScalingSample]]:
    """Samples by policy, oldest first. One query."""
    found: dict[int, list[ScalingSample]] = {}
    for row in ScalingSample.objects.filter(at__gte=since, at__lt=until).order_by("policy_id", "at"):
        found.setdefault(row.policy_id, []).append(row)
    return found


def samples_at(*, at: datetime, model: str | None = None) -> dict[int, ScalingSample]:
    """By policy, the last sample at or before a moment, if it is within SAMPLE_NEAR. One query."""
    rows = ScalingSample.objects.filter(at__lte=at, at__gt=at - SAMPLE_NEAR).order_by("policy_id", "-at")
    if model is not None:
        rows = rows.filter(policy__model__name=model)
    return {row.policy_id: row for row in rows.distinct("policy_id")}


def as_of(policies: Sequence[ScalingPolicy], at: datetime) -> list[ScalingPolicy]:
    """The same policies with the values that they had at a moment, from the changes recorded since. One query."""
    touched = [policy.pk for policy in policies if policy.updated_at > at]
    if not touched:
        return list(policies)
    since = Decision.objects.filter(kind="scaling_policy_updated", at__gt=at, outcome__id__in=touched)
    found = {policy.pk: copy(policy) for policy in policies}
    for changed, values in since.order_by("-at", "-id").values_list("outcome__id", "inputs__before"):
        for name, value in values.items():  # the oldest change since then is applied last
            setattr(found[changed], name, ScalingPolicy._meta.get_field(name).to_python(value))  # type: ignore[union-attr]
    return list(found.values())


def instances_now() -> dict[tuple[int, str], Counts]:
    """By model and role, as the scaler would count them (`controller.scale.observation`); no entry without
    instances."""
    rows = Instance.objects.live().exclude(desired_state=Instance.Desired.STOPPED)
    there = rows.exclude(observed_state__in=NO_CAPACITY)
    groups = there.values_list("model_id", "role", "desired_state", "observed_state", "weights")
    found: dict[tuple[int, str], Counts] = {}
    for model, role, desired, observed, weights, count in groups.annotate(count=Count("pk")).order_by():
        state = _state(desired, observed, weights)
        if state:
            known = found.setdefault((model, role), Counts())
            found[model, role] = known._replace(**{state: getattr(known, state) + count})
    return found


def _state(desired: str, observed: str, weights: str) -> str:
    """ready | starting | draining; "" for a warm spare or a sleeper, which is no capacity."""
    if weights in (Weights.ABSENT, Weights.LEAVING, Weights.ASLEEP):
        return ""
    if desired == Instance.Desired.DRAINING:
        return "draining"
    return "ready" if observed == Instance.Observed.READY and weights == Weights.PRESENT else "starting"


def events(
    *, subject: str | None = None, since: datetime | None = None, until: datetime | None = None, limit: int = 50
) -> list[Decision]:
    """Decisions of the scaler in [since, until), newest first."""
    rows = Decision.objects.filter(OF_THE_SCALER, subject_type="scaling_policy")
    if subject is not None:
        rows = rows.filter(subject=subject)
    if since is not None:
        rows = rows.filter(at__gte=since)
    if until is not None:
        rows = rows.filter(at__lt=until)
    return list(rows.order_by("-at", "-id")[:limit])


def events_around(*, at: datetime, since: datetime, until: datetime, limit: int) -> list[Decision]:
    """The `limit` decisions of the scaler in [since, until) that are nearest to a moment, oldest first. One query.

    It contains that moment's decisions however many came later.
    """
    rows = Decision.objects.filter(OF_THE_SCALER, subject_type="scaling_policy", at__gte=since, at__lt=until)
    before = rows.filter(at__lte=at).order_by("-at", "-id")[:limit]
    after = rows.filter(at__gt=at).order_by("at", "id")[:limit]
    near = sorted(before.union(after, all=True), key=lambda each: abs(each.at - at))[:limit]
    return sorted(near, key=lambda each: (each.at, each.pk))


def starts(limit: int = STARTS_SHOWN) -> list[InstanceStart]:
    """The newest starts, newest first. Two queries: what is known of them, and the first token of each."""
    return _starts(list(_told().order_by("-created_at")[:limit]))


def starts_around(*, at: datetime, since: datetime, until: datetime, limit: int = STARTS_SHOWN) -> list[InstanceStart]:
    """The starts in [since, until) that are nearest to a moment, oldest first. Two queries.

    An instance that a later scale-out took again appears as it was taken at that time.
    """
    span = {"created_at__gte": since, "created_at__lt": until}
    ordered = Action.objects.filter(kind__in=(*LOADS, Action.Kind.FIRST_SERVED), **span).values("instance")
    rows = _told(created_at__lt=until).filter(Q(**span) | Q(pk__in=ordered))
    near = sorted(
        (row for row in rows if since <= _requested_at(row) < until), key=lambda row: abs(_requested_at(row) - at)
    )
    return sorted(_starts(near[:limit]), key=lambda each: (each.desired_at, each.id))


def _told(**actions: datetime) -> QuerySet[Instance]:
    """Instances with the results of their newest actions. `actions`: further filters for those actions."""
    of_it = Action.objects.filter(instance=OuterRef("pk"), **actions).order_by("-id")
    loads = of_it.filter(kind__in=LOADS, params__has_key="scale_out", state=Action.State.DONE)
    watched = of_it.filter(kind=Action.Kind.FIRST_SERVED)
    return (
        Instance.objects.select_related("template")
        .exclude(weights=Weights.ABSENT)
        .annotate(
            taken_at=Subquery(loads.values("created_at")[:1]),
            loaded_at=Subquery(loads.values("ended_at")[:1]),
            scale_out=Subquery(loads.values("params__scale_out")[:1]),
            loaded=Subquery(loads.values("decision__outcome")[:1]),
            watched=Subquery(watched.values("decision__outcome")[:1]),
            launch=Subquery(watched.values("params__launch")[:1]),
            first_ready_at=Subquery(_seen_ready().values("at")[:1]),
        )
    )


def _seen_ready() -> QuerySet[Decision]:
    """The decisions that tell when the instance of a query around them was seen ready, oldest first. Its own column
    has the last time, which may be hours later."""
    of_it = {"subject_type": "instance", "subject": OuterRef("pk"), "at__gte": OuterRef("created_at")}
    return Decision.objects.filter(kind="instance_ready", **of_it).order_by("at")


def _starts(rows: Sequence[Any]) -> list[InstanceStart]:
    tokens = _first_tokens({row.pk: _requested_at(row) for row in rows})
    return [_start(row, tokens.get(row.pk)) for row in rows]


def _taken(row: Any) -> bool:
    """It was warm or asleep, and a scale-out took it."""
    asked = row.scale_out or {}
    return bool(asked.get("warm") or asked.get("woken"))


def _requested_at(row: Any) -> datetime:
    if row.launch:
        return datetime.fromisoformat(row.launch["at"])
    requested: datetime = row.taken_at if _taken(row) else row.created_at
    return requested


def _start(row: Any, first: First | None) -> InstanceStart:
    """`row`: an Instance as annotated above."""
    asked, desired_at = row.scale_out or {}, _requested_at(row)
    ready = row.loaded_at or row.first_ready_at or row.ready_at
    served = None
    if asked.get("woken"):  # requests that it served before it slept do not count
        served = (row.watched or {}).get("first_served_s")
    elif first is not None:
        served = max(0.0, (first.token_at - desired_at).total_seconds())
    loaded = row.loaded or {}
    if row.loaded_at is not None and "ready_s" in loaded:
        ready = row.taken_at + timedelta(seconds=loaded["ready_s"])
    ready_s = None if ready is None else max(0.0, (ready - desired_at).total_seconds())
    idle_s = 0.0
    if ready is not None and served is not None and first is not None:
        idle_s = min(served, max(0.0, (first.arrived_at - max(ready, desired_at)).total_seconds()))
    if ready_s is not None and served is not None:
        ready_s = min(ready_s, served)
    how = ", woken" if asked.get("woken") else ", warm" if asked.get("warm") else ", seeded" if row.launch else ""
    weights, load_s = loaded.get("source", ""), loaded.get("load_s")
    started_by = row.provisioner if row.template is None else f"{row.provisioner} {row.template}"
    cold = not _taken(row) and not row.abilities.registers
    now = {"state": row.shown_state, "error": row.error}
    return InstanceStart(row.pk, started_by + how, desired_at, ready_s, served, weights, load_s, cold, idle_s, **now)


def _first_tokens(desired: Mapping[str, datetime]) -> dict[str, First]:
    """By instance, when a client first got a token, or a whole answer, of a request decoded or prefilled there.

    One union of short queries with ids and times written out. That way the planner knows that an instance has no
    requests, where a query with its id as a parameter reads whole partitions in search of one.
    """
    looks = [look for id, at in desired.items() for look in _looks(id, at)]
    if not looks:
        return {}
    found: dict[str, First] = {}
    for id, *times in looks[0].union(*looks[1:], all=True):
        found[id] = min(First(*times), found.get(id, First(*times)))
    return found


def _looks(id: str, desired_at: datetime) -> list[QuerySet[Any, Any]]:
    window = {"arrived_at__gte": desired_at - LONGEST_WAIT, "arrived_at__lt": desired_at + SERVED_WITHIN}
    near = RequestRecord.objects.filter(ANSWERED, **window).annotate(whose=Value(id, CharField()), first_at=FIRST_AT)
    since = near.filter(first_at__gte=desired_at)  # an earlier one belongs to a time before this request
    mine = (since.filter(instance=id), since.filter(prefill_instance=id).exclude(prefill_instance=""))
    return [_earliest(rows) for rows in mine]


def _earliest(rows: QuerySet[Any]) -> QuerySet[Any, Any]:
    """The earliest answer. Only requests that arrived before the first arrival got its answer can have theirs earlier,
    so not the whole hour is read."""
    first_arrival = rows.order_by("arrived_at").values("first_at")[:1]
    near = rows.filter(arrived_at__lte=Subquery(first_arrival))
    return near.order_by("first_at").values_list("whose", "first_at", "arrived_at")[:1]


def times_by_way(started: Sequence[InstanceStart]) -> list[WayTimes]:
    """Medians by way, sorted by its name."""
    found = []
    for way in sorted({each.way for each in started}):
        mine = [each for each in started if each.way == way]
        served = [each.served_s - each.idle_s for each in mine if each.served_s is not None]
        ready = [each.ready_s for each in mine if each.ready_s is not None]
        load = [each.load_s for each in mine if each.load_s is not None]
        idle = sum(each.idle_s > 0 for each in mine)
        found.append(WayTimes(way, len(mine), len(served), _median(ready), _median(served), _median(load), idle))
    return found


def cold_start_s(pattern: Instance) -> float | None:
    """Seconds that an engine started from the pattern's launch template takes from its process to ready: the median of
    the last `COLD_STARTS` of that template and model. None without a template or before the first. One query."""
    return cold_starts_s([pattern]).get((pattern.model_id, pattern.template_id))


def cold_starts_s(patterns: Iterable[Instance]) -> dict[tuple[int, int | None], float]:
    """`cold_start_s` by model and template of the patterns, those that are known. One query for all of them; none
    without templates."""
    wanted = {(row.model_id, row.template_id) for row in patterns if row.template_id is not None}
    if not wanted:
        return {}
    like = reduce(or_, (Q(model=model, template=template) for model, template in sorted(wanted)))
    newest = Window(RowNumber(), partition_by=[F("model"), F("template")], order_by=F("created_at").desc())
    rows = Instance.objects.filter(like, start_steps__has_keys=[PROCESS, READY]).annotate(place=newest)
    took: dict[tuple[int, int | None], list[float]] = {}
    for model, template, steps in (
        rows.filter(place__lte=COLD_STARTS).order_by().values_list("model_id", "template_id", "start_steps")
    ):
        took.setdefault((model, template), []).append(max(0.0, steps[READY] - steps[PROCESS]))
    return {which: median(each) for which, each in took.items()}


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def patterns() -> QuerySet[Instance]:
    """The pattern of the next instance for each model and role; `_pattern` in
    `controller.services.fleet.scaling_stages` finds it for one."""
    gone = ExpressionWrapper(
        Q(desired_state=Instance.Desired.STOPPED, observed_state__in=Instance.GONE), BooleanField()
    )
    tried = ExpressionWrapper(TRIED, BooleanField())
    rows = Instance.objects.filter(provisioner__in=starters()).annotate(gone=gone, tried=tried)
    return rows.order_by("model_id", "role", "tried", "gone", "-created_at").distinct("model_id", "role")


# What `models_on_demand` reads: gateways may read no other column of a launch template (`controller.postgres.grants`).
_COPIED_FROM = ("model", "role", "observed_state", "error", "template__paused_at")


def models_on_demand() -> list[str]:
    """Names of the models of which the scaler starts an instance once a request waits for it: those with an enabled
    policy and an instance to start a copy of. No free device is asked for, since one may become free while the request
    waits. Two queries; one without policies."""
    policies = ScalingPolicy.objects.filter(enabled=True).exclude(role=Role.DECODE.value)
    names = {(model, role): name for model, role, name in policies.values_list("model_id", "role", "model__name")}
    if not names:
        return []
    rows = patterns().filter(model__in={model for model, _ in names}).select_related("template").only(*_COPIED_FROM)
    return sorted({names[row.model_id, row.role] for row in rows if (row.model_id, row.role) in names and _copied(row)})


def _copied(row: Any) -> bool:
    """Whether the scaler starts copies of a pattern (as `patterns` annotates it)."""
    paused = row.template is not None and row.template.paused_at is not None
    return not paused and not (row.gone and row.settings_refused)


# ---- warm pools ------------------------------------------------------------------------------------------------------


class WarmPool(NamedTuple):
    """`ready`: can be used now; `starting`: the process is not up yet; `held_by`: why there are not more, "" if nothing
    is known to prevent it."""

    ready: int = 0
    starting: int = 0
    held_by: str = ""


def warm_pools(policies: Sequence[ScalingPolicy]) -> dict[int, WarmPool]:
    """Warm pools by policy. One query, and three more if one has too few."""
    counted: dict[tuple[int, str], WarmPool] = {}
    groups = Instance.objects.warm().values_list("model_id", "role", "observed_state")
    for model, role, observed, count in groups.annotate(count=Count("pk")).order_by():
        known = counted.setdefault((model, role), WarmPool())
        state = "ready" if observed == Instance.Observed.READY else "starting"
        counted[model, role] = known._replace(**{state: getattr(known, state) + count})
    found = {policy.pk: counted.get((policy.model_id, policy.role), WarmPool()) for policy in policies}
    short = [each for each in policies if each.enabled and _too_few(each, found[each.pk])]
    for id, reason in _held(short).items():
        found[id] = found[id]._replace(held_by=reason)
    return found


def _too_few(policy: ScalingPolicy, pool: WarmPool) -> bool:
    return policy.warm is not None and pool.ready + pool.starting < policy.warm


def _held(short: Sequence[ScalingPolicy]) -> dict[int, str]:
    if not short:
        return {}
    rows = list(patterns().filter(model__in=[policy.model_id for policy in short]))
    like = {(row.model_id, row.role): row for row in rows}
    rooms = rooms_for(rows)
    found = {}
    for policy in short:
        pattern = like.get((policy.model_id, policy.role))
        if pattern is None:
            found[policy.pk] = NOTHING_TO_START
        elif rooms[pattern.pk] == 0:
            found[policy.pk] = NO_DEVICE
    return found
