"""An unsaved edit of an SLO class or a priority mapping: which requests' targets it would change, and to what.

The rule exists in two forms: as SQL over the request records (`judged`), and for one recorded request (`targets`),
which replays use. Only targets that came from the edited object change; a target that a request set itself stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from django.db.models import (
    Case,
    Count,
    Expression,
    F,
    FloatField,
    Func,
    IntegerField,
    JSONField,
    Q,
    QuerySet,
    Sum,
    Value,
    When,
)
from django.db.models.fields.json import KT
from django.db.models.functions import Cast, Coalesce, Greatest, Least

from controller.core.snapshot import LevelBounds
from controller.core.types import ENGINE_REJECTED, Outcome, Targets
from controller.models import RequestRecord
from controller.slo.attainment import EPSILON_S

FROM_CLASS = ("class", "tenant_default")


class TargetedRequest(Protocol):
    """What an edit needs of a recorded request. `source` and `figures`: of its "slo" decision."""

    @property
    def tenant(self) -> str: ...
    @property
    def slo_class(self) -> str: ...
    @property
    def priority(self) -> int | None: ...
    @property
    def targets(self) -> Targets: ...
    @property
    def source(self) -> str: ...
    @property
    def figures(self) -> Mapping[str, Any]: ...
    @property
    def may_defer(self) -> bool: ...


class SLODecision(Func):
    """The decision of a record that names the source of its targets."""

    template = """jsonb_path_query_first(%(expressions)s, '$[*] ? (@.kind == "slo")')"""
    output_field = JSONField()


@dataclass(frozen=True, slots=True)
class Owners:
    """The tenants that an edit concerns: one, or (None) all without an object of their own."""

    tenant: str | None = None
    others: tuple[str, ...] = ()

    def q(self) -> Q:
        return Q(tenant=self.tenant) if self.tenant is not None else ~Q(tenant__in=self.others)

    def have(self, tenant: str) -> bool:
        return tenant == self.tenant if self.tenant is not None else tenant not in self.others


@dataclass(frozen=True, slots=True)
class ClassEdit:
    """New targets of one class, in seconds."""

    name: str
    owners: Owners
    ttft_s: float
    tpot_s: float
    deadline_s: float | None
    waiting_time_s: float
    value: float | None = None  # None: unchanged
    may_defer: bool | None = None  # None: unchanged

    def rows(self, records: QuerySet[RequestRecord]) -> QuerySet[RequestRecord]:
        """The requests whose targets the edit changes."""
        mine = records.filter(self.owners.q(), slo_class=self.name).annotate(slo=SLODecision("decisions"))
        return mine.filter(slo__reason__in=FROM_CLASS)

    def expressions(self) -> tuple[Expression, Expression]:
        return Value(self.ttft_s, FloatField()), Value(self.tpot_s, FloatField())

    def targets(self, request: TargetedRequest) -> Targets:
        if not self._touches(request):
            return request.targets
        return Targets(self.ttft_s, self.tpot_s, self.deadline_s, self.waiting_time_s)

    def worth(self, request: TargetedRequest, usual: float) -> float:
        """The value of attaining its targets. `usual`: that of its class now."""
        return self.value if self.value is not None and self._touches(request) else usual

    def defers(self, request: TargetedRequest) -> bool:
        """Whether it is served late rather than refused. Its own targets do not change that."""
        named = request.slo_class == self.name and self.owners.have(request.tenant)
        return self.may_defer if named and self.may_defer is not None else request.may_defer

    def _touches(self, request: TargetedRequest) -> bool:
        named = request.slo_class == self.name and request.source in FROM_CLASS
        return named and self.owners.have(request.tenant)


@dataclass(frozen=True, slots=True)
class MappingEdit:
    """New levels of a priority mapping.

    TTFT: the value from the history of that moment, which is recorded with each request, clamped to the new bounds;
    without history the new first value. TPOT: the applied value, clamped to the new bounds. The lower bound is that of
    the level itself, as while a more urgent request waits.
    """

    owners: Owners
    levels: tuple[LevelBounds, ...]

    deadline_s: float | None = None
    waiting_time_s: float | None = None  # as applied: twice the TTFT, at least five seconds

    def rows(self, records: QuerySet[RequestRecord]) -> QuerySet[RequestRecord]:
        mine = records.filter(self.owners.q(), priority__isnull=False).annotate(slo=SLODecision("decisions"))
        return mine.filter(slo__reason="priority")

    def expressions(self) -> tuple[Expression, Expression]:
        reference = Cast(KT("slo__figures__reference_ttft_s"), FloatField())
        correction = Coalesce(Cast(KT("slo__figures__queue_correction_s"), FloatField()), Value(0.0))
        known = Q(slo__figures__history="history")
        ttft = Coalesce(Case(When(known, then=reference - correction), output_field=FloatField()), self._by("ttft_s"))
        tpot = Case(When(known, then=F("target_tpot_s")), default=self._by("tpot_s"), output_field=FloatField())
        return (
            Greatest(Least(ttft, self._by("ttft_max_s")), self._by("ttft_min_s")),
            Greatest(Least(tpot, self._by("tpot_max_s")), self._by("tpot_min_s")),
        )

    def _by(self, name: str) -> Case:
        """A bound by level; priorities beyond the last share it."""
        last = len(self.levels) - 1
        cases = [
            When(priority=level, then=Value(getattr(bounds, name))) for level, bounds in enumerate(self.levels[:last])
        ]
        return Case(*cases, default=Value(getattr(self.levels[last], name)), output_field=FloatField())

    def targets(self, request: TargetedRequest) -> Targets:
        if request.priority is None or request.source != "priority" or not self.owners.have(request.tenant):
            return request.targets
        bounds = self.levels[min(request.priority, len(self.levels) - 1)]
        ttft, tpot = bounds.ttft_s, bounds.tpot_s
        if request.figures.get("history") == "history" and request.figures.get("reference_ttft_s") is not None:
            ttft = float(request.figures["reference_ttft_s"]) - float(request.figures.get("queue_correction_s") or 0.0)
            tpot = request.targets.tpot_s
        ttft = max(min(ttft, bounds.ttft_max_s), bounds.ttft_min_s)
        tpot = max(min(tpot, bounds.tpot_max_s), bounds.tpot_min_s)
        return Targets(ttft, tpot, None, max(5.0, 2 * ttft))

    def worth(self, request: TargetedRequest, usual: float) -> float:
        """A mapping does not change the value."""
        return usual

    def defers(self, request: TargetedRequest) -> bool:
        """A mapping does not change whether a request may be deferred."""
        return request.may_defer


Edit = ClassEdit | MappingEdit


def edit_as_json(edit: Edit) -> dict[str, Any]:
    kind = "class" if isinstance(edit, ClassEdit) else "mapping"
    return {"kind": kind, **asdict(edit)}


def edit_of_json(raw: Mapping[str, Any]) -> Edit:
    values = {name: value for name, value in raw.items() if name != "kind"}
    owners = values.pop("owners")
    values["owners"] = Owners(owners["tenant"], tuple(owners["others"]))
    if raw["kind"] == "class":
        return ClassEdit(**values)
    return MappingEdit(values["owners"], tuple(LevelBounds(**level) for level in values["levels"]))


def judged(edit: Edit, records: QuerySet[RequestRecord]) -> list[dict[str, Any]]:
    """Attainment of the recorded requests under the old and the new targets, by tenant and class. One query.

    Counts, as attainment does, without requests that their clients cancelled or an engine refused: `requests`, `was`
    and `would` attained, `ttft` and `would_ttft`, `tpot` and `would_tpot` (met before and after), `lost` (attained
    only before), `won` (only after). Refused, expired, failed and cut requests are misses before and after, since only
    a simulation can tell how they would have ended.
    """
    ttft, tpot = edit.expressions()
    separately = Q(outcome=Outcome.CANCELLED.value) | Q(error_code=ENGINE_REJECTED)
    rows = edit.rows(records).exclude(separately).annotate(new_ttft=ttft, new_tpot=tpot)
    grace = Value(EPSILON_S)
    whole_after = F("new_ttft") + Greatest(F("output_tokens") - 1, Value(0)) * F("new_tpot") + grace
    served = Q(outcome=Outcome.OK.value) & _not_dropped(edit)
    streamed = Q(judged_by="tokens")
    at_once = ~streamed & Q(e2e_s__lte=whole_after)
    would_ttft = served & ((streamed & Q(ttft_s__lte=F("new_ttft") + grace)) | at_once)
    would_tpot = served & ((streamed & (Q(output_tokens__lte=1) | Q(tpot_s__lte=F("new_tpot") + grace))) | at_once)
    in_time = Q() if edit.deadline_s is None else Q(e2e_s__lte=edit.deadline_s + EPSILON_S)
    rows = rows.annotate(
        met_ttft=_one_if(would_ttft), met_tpot=_one_if(would_tpot), met=_one_if(would_ttft & would_tpot & in_time)
    )
    counted = (
        rows.values("tenant", "slo_class")
        .annotate(
            requests=Sum("stands_for"),
            was=Count("id", filter=Q(attained=True)),
            would=Count("id", filter=Q(met=1)),
            ttft=Count("id", filter=Q(ttft_met=True)),
            would_ttft=Count("id", filter=Q(met_ttft=1)),
            tpot=Count("id", filter=Q(tpot_met=True)),
            would_tpot=Count("id", filter=Q(met_tpot=1)),
            lost=Count("id", filter=Q(attained=True, met=0)),
            won=Count("id", filter=Q(attained=False, met=1)),
        )
        .order_by("tenant", "slo_class")
    )
    return [dict(row) for row in counted]


def _not_dropped(edit: Edit) -> Q:
    """A request that waited longer than it may now would have been dropped."""
    limit = edit.waiting_time_s
    return Q() if limit is None else Q(queue_s__isnull=True) | Q(queue_s__lte=limit)


def _one_if(condition: Q) -> Case:
    return Case(When(condition, then=Value(1)), default=Value(0), output_field=IntegerField())


def owners_of(tenant: str | None, having_own: Sequence[str]) -> Owners:
    return Owners(tenant, tuple(sorted(having_own)) if tenant is None else ())
