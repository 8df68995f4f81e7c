"""The targets that apply to a request (from its own fields, its `slo_class`, its `priority` or defaults), and what its
tenant is entitled to ask for.

The field names are Concord's (ch. 6): target_ttft, target_tbt, deadline, waiting_time, in seconds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from controller.core.decisions import Figure
from controller.core.errors import ConfigError
from controller.core.snapshot import ClassConfig, Entitlements, MappingConfig, TenantConfig
from controller.core.types import CONCORD_DEFAULTS, Targets
from controller.slo.mapping import PriorityMapper

LEVEL_LABEL = re.compile(r"priority-[0-9]+")
LONGEST_S = 86_400.0  # a day; larger values are assumed to be in the wrong unit


# The client's field, and the entitlement that bounds it from below. The first token is due by the deadline too.
FLOORS = (
    ("target_ttft", "tightest_ttft_s"),
    ("target_tbt", "tightest_tpot_s"),
    ("deadline", "tightest_deadline_s"),
    ("deadline", "tightest_ttft_s"),
    ("thinking_deadline", "tightest_ttft_s"),
    ("workflow_deadline", "tightest_deadline_s"),
    ("workflow_deadline", "tightest_ttft_s"),
)
MOST_STEPS = 1_000  # of a workflow, that follow one another


class SloError(ConfigError):
    """An SLO field of the request is wrong; `field` names it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}", field=field)


class NotEntitled(ConfigError):
    """The tenant may not ask for this; `field` names the field of the request."""

    def __init__(self, field: str, entitlement: str, allowed: str) -> None:
        super().__init__(f"{field}: this tenant's entitlement {entitlement} allows {allowed}", field=field)
        self.entitlement = entitlement


@dataclass(frozen=True, slots=True)
class SloFields:
    """What the request itself specified; None for fields that it left out."""

    target_ttft: float | None = None
    target_tbt: float | None = None
    deadline: float | None = None
    waiting_time: float | None = None
    slo_class: str | None = None
    priority: int | None = None
    workflow_deadline: float | None = None  # of the workflow that the request belongs to, from its first request
    workflow_steps_left: int | None = None  # requests that follow one another until its end, this one included
    thinking_deadline: float | None = None  # of the first token that is not reasoning

    @property
    def explicit(self) -> bool:
        fields = (self.target_ttft, self.target_tbt, self.deadline, self.waiting_time, self.thinking_deadline)
        return any(value is not None for value in fields)


@dataclass(frozen=True, slots=True)
class Applied:
    """The targets that apply, and where they came from: explicit, class, priority, tenant_default or defaults."""

    targets: Targets
    slo_class: str
    priority: int | None  # as the client gave it
    value: float
    source: str
    may_defer: bool = False
    level: int | None = None  # level in the mapping, if the targets came from there
    figures: Mapping[str, Figure] = field(default_factory=dict)  # how the mapping derived them, for the decision


def level_label(level: int) -> str:
    """The class name under which requests of a mapped priority are counted."""
    return f"priority-{level}"


def is_level_label(name: str) -> bool:
    return LEVEL_LABEL.fullmatch(name) is not None


def _seconds(body: Mapping[str, object], field: str, *, zero: bool = False) -> float | None:
    value = body.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SloError(field, "must be a number of seconds")
    seconds = float(value)
    if not math.isfinite(seconds):
        raise SloError(field, "must be finite")
    if seconds < 0 or (seconds == 0 and not zero):
        raise SloError(field, "must be positive (seconds from arrival, so a time in the past cannot be promised)")
    if seconds > LONGEST_S:
        raise SloError(field, f"must be at most {LONGEST_S:.0f} seconds")
    return seconds


def parse_slo_fields(body: Mapping[str, object]) -> SloFields:
    """Validate the SLO fields of a request body. Raises SloError naming the field."""
    asked = SloFields(
        target_ttft=_seconds(body, "target_ttft"),
        target_tbt=_seconds(body, "target_tbt"),
        deadline=_seconds(body, "deadline"),
        waiting_time=_seconds(body, "waiting_time", zero=True),
        slo_class=_class_name(body),
        priority=_priority(body),
        workflow_deadline=_seconds(body, "workflow_deadline"),
        workflow_steps_left=_steps_left(body),
        thinking_deadline=_seconds(body, "thinking_deadline"),
    )
    if asked.deadline is not None and asked.target_ttft is not None and asked.deadline < asked.target_ttft:
        raise SloError("deadline", "is before target_ttft: the whole answer cannot be due before its first token")
    if asked.thinking_deadline is not None:
        _check_thinking(asked, asked.thinking_deadline)
    return asked


def _check_thinking(asked: SloFields, thinking_s: float) -> None:
    field = "thinking_deadline"
    if asked.target_ttft is not None:
        raise SloError(field, "takes the place of target_ttft: give one of them")
    if asked.deadline is not None and asked.deadline < thinking_s:
        raise SloError(field, "is after deadline: the whole answer cannot be due before its first token")


def _steps_left(body: Mapping[str, object]) -> int | None:
    value = body.get("workflow_steps_left")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_STEPS:
        raise SloError("workflow_steps_left", f"must be a whole number from 1 to {MOST_STEPS}")
    return value


def _class_name(body: Mapping[str, object]) -> str | None:
    name = body.get("slo_class")
    if name is None:
        return None
    if not isinstance(name, str) or not 0 < len(name) <= 100:
        raise SloError("slo_class", "must be the name of a class")
    return name


def _priority(body: Mapping[str, object]) -> int | None:
    value = body.get("priority")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise SloError("priority", "must be an integer; 0 is the highest")
    if not 0 <= value <= 1000:
        raise SloError("priority", "must be between 0 (highest) and 1000")
    return value


def check_fields(asked: SloFields, entitled: Entitlements) -> None:
    """Raises NotEntitled for the first field of the request that the tenant may not use like this.

    Entitlements bound what a request names itself. Targets that come from a class or a priority mapping are the
    operator's own choice, and are bounded by `allowed_classes` and `highest_priority`.
    """
    name, priority = asked.slo_class, asked.priority
    if name is not None and entitled.allowed_classes and name not in entitled.allowed_classes:
        raise NotEntitled("slo_class", "allowed_classes", _listed(entitled.allowed_classes))
    if priority is not None and priority < entitled.highest_priority:
        most = entitled.highest_priority
        raise NotEntitled("priority", "highest_priority", f"{most} and above (0 is the highest priority)")
    for target, floor in FLOORS:
        value, least = getattr(asked, target), getattr(entitled, floor)
        if value is not None and least is not None and value < least:
            raise NotEntitled(target, floor, f"{least:g} s or more")


def check_model(model: str, entitled: Entitlements) -> None:
    """Raises NotEntitled. `model`: its name, not an alias."""
    if entitled.allowed_models and model not in entitled.allowed_models:
        raise NotEntitled("model", "allowed_models", _listed(entitled.allowed_models))


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names)


class ClassBook:
    """All classes and mappings of one configuration.

    A tenant's own class or mapping has precedence over a common one.
    """

    def __init__(self, classes: Sequence[ClassConfig], mappings: Sequence[MappingConfig]) -> None:
        self._classes = {(c.tenant, c.name): c for c in classes}
        self._mappings = {m.tenant: PriorityMapper(m) for m in mappings}

    def find(self, tenant: str, name: str) -> ClassConfig | None:
        return self._classes.get((tenant, name)) or self._classes.get((None, name))

    def mapping(self, tenant: str) -> PriorityMapper | None:
        return self._mappings.get(tenant) or self._mappings.get(None)

    def names(self, tenant: str) -> list[str]:
        return sorted({name for owner, name in self._classes if owner in (None, tenant)})

    def attainment_target(self, tenant: str, name: str) -> float:
        config = self.find(tenant, name)
        return config.target if config else 0.95

    def resolve(
        self, asked: SloFields, tenant: TenantConfig, pending_higher: Callable[[int], bool], now: float
    ) -> Applied:
        """The targets of a request. `pending_higher(p)`: whether a request of a higher priority than p is queued.

        Raises SloError for an unknown class, or when the request's own fields contradict the class.
        """
        base = self._base(asked, tenant, pending_higher, now)
        return replace(_override(asked, base), source="explicit") if asked.explicit else base

    def _base(
        self, asked: SloFields, tenant: TenantConfig, pending_higher: Callable[[int], bool], now: float
    ) -> Applied:
        """The targets that the request's own fields override: of its class, its mapped priority, its tenant's class, or
        Concord's.
        """
        if asked.slo_class is not None:
            config = self.find(tenant.name, asked.slo_class)
            if config is None:
                known = ", ".join(self.names(tenant.name)) or "none"
                raise SloError("slo_class", f"unknown class {asked.slo_class!r}; known: {known}")
            return _from_class(asked, config, "class")
        mapping = self.mapping(tenant.name)
        if asked.priority is not None and mapping is not None:
            return _from_priority(asked.priority, mapping, pending_higher, now)
        config = self.find(tenant.name, tenant.default_class) if tenant.default_class else None
        if config is not None:
            return _from_class(asked, config, "tenant_default")
        return Applied(CONCORD_DEFAULTS, "", asked.priority, 1.0, "defaults")

    def observe(
        self, tenant: str, priority: int, ttft_s: float | None, tpot_s: float | None, queue_s: float, now: float
    ) -> None:
        """Learn from the measured values of a finished request whose priority was mapped."""
        mapping = self.mapping(tenant)
        if mapping is not None:
            mapping.observe(mapping.level(priority), ttft_s, tpot_s, queue_s, now)

    def state(self, now: float, most: int) -> list[Any]:
        """What the mappings measured, by tenant (None: of all): the newest `most` values, or one of each window."""
        each = max(1, most // max(1, 2 * len(self._mappings)))
        return [[tenant, mapping.state(now, each)] for tenant, mapping in self._mappings.items()]

    def restore(self, state: Sequence[Any], now: float, since_s: float) -> None:
        """Go on from a state that was taken `since_s` ago. Raises KeyError, TypeError or ValueError for anything else
        than a state."""
        for tenant, measured in state:
            if (mapping := self._mappings.get(tenant)) is not None:
                mapping.restore(measured, now, since_s)

    def renewed(self, classes: Sequence[ClassConfig], mappings: Sequence[MappingConfig]) -> ClassBook:
        """A book for the new configuration that keeps the measured history of unchanged mappings."""
        book = ClassBook(classes, mappings)
        for owner, old in self._mappings.items():
            new = book._mappings.get(owner)
            if new is not None and new.config == old.config:
                book._mappings[owner] = old
        return book


def _from_class(asked: SloFields, config: ClassConfig, source: str) -> Applied:
    targets = Targets(config.ttft_s, config.tpot_s, config.deadline_s, config.waiting_time_s)
    return Applied(targets, config.name, asked.priority, config.value, source, config.may_defer)


def _from_priority(
    priority: int, mapping: PriorityMapper, pending_higher: Callable[[int], bool], now: float
) -> Applied:
    level = mapping.level(priority)
    assigned = mapping.assign(level, pending_higher(level), now)
    waiting = max(CONCORD_DEFAULTS.waiting_time_s, 2 * assigned.ttft_s)
    figures: dict[str, Figure] = {
        "history": assigned.reason,
        "reference_ttft_s": assigned.reference_ttft_s,
        "queue_correction_s": assigned.queue_correction_s,
    }
    targets = Targets(assigned.ttft_s, assigned.tpot_s, None, waiting)
    return Applied(targets, level_label(level), priority, mapping.value(level), "priority", False, level, figures)


def _override(asked: SloFields, base: Applied) -> Applied:
    """Fields in the request override the class.

    Without `waiting_time` the request may wait at least until its own `target_ttft` or `thinking_deadline`, and at most
    until its deadline.
    """
    targets = base.targets
    first = asked.target_ttft if asked.thinking_deadline is None else asked.thinking_deadline
    ttft = first if first is not None else targets.ttft_s
    deadline = asked.deadline if asked.deadline is not None else targets.deadline_s
    waiting = asked.waiting_time if asked.waiting_time is not None else targets.waiting_time_s
    if asked.waiting_time is None and first is not None:
        waiting = max(waiting, first)
    if deadline is not None:
        if first is not None and deadline < ttft:
            named = "target_ttft" if asked.thinking_deadline is None else "thinking_deadline"
            raise SloError(named, f"is after the deadline of {deadline:g} s")
        ttft = min(ttft, deadline)
        if asked.waiting_time is None:
            waiting = min(waiting, deadline)
    tpot = asked.target_tbt if asked.target_tbt is not None else targets.tpot_s
    return replace(base, targets=Targets(ttft, tpot, deadline, waiting, asked.thinking_deadline))
