"""Policy sets: named combinations of policies. `slackline`, the default, is the one that measures best."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from math import isfinite
from typing import Any

import controller.dispatch.virtual_batch
import controller.dispatch.worst_case_fit
import controller.policies.admission
import controller.policies.ordering
import controller.policies.routing  # noqa: F401  (importing registers the parts)
from controller.core.errors import ConfigError, UnknownName
from controller.core.policy import ADMISSIONS, ORDERINGS, ROUTINGS
from controller.core.registry import Registry
from controller.dispatch.disaggregation.migrator import Migrator
from controller.dispatch.disaggregation.migrator_config import MigratorConfig
from controller.dispatch.disaggregation.placements import MIGRATIONS
from controller.dispatch.dispatcher import DispatchConfig, StageDispatcher
from controller.dispatch.pacing import PACINGS
from controller.dispatch.scheduler import Defect, Scheduler

DEFAULT_POLICY_SET = "slackline"
MOST_OPTION = 1_000_000  # what an ordering remembers is bounded by its options


@dataclass(frozen=True, slots=True)
class PolicySet:
    """Policies by name, their settings, and one line for the catalogue."""

    summary: str
    ordering: str
    admission: str
    routing: str
    pacing: str
    dispatch: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    migration: str = "least_outstanding"  # placement of decode stages, when disaggregated
    migrator: Mapping[str, Any] = field(default_factory=dict)


_BARE = {"refuse_infeasible": False}
_PLAIN_RANK = {"engine_rank": "none"}

POLICY_SETS: dict[str, PolicySet] = {
    "round_robin": PolicySet(
        "Each request at once to the next instance.",
        "first_come_first_served", "admit_all", "round_robin", "unlimited", _BARE,
        migration="round_robin", migrator=_PLAIN_RANK,
    ),
    "least_outstanding": PolicySet(
        "Each request at once to the instance with the fewest unfinished.",
        "first_come_first_served", "admit_all", "least_outstanding", "unlimited", _BARE,
        migrator=_PLAIN_RANK,
    ),
    "fcfs_window": PolicySet(
        "Arrival order, a fixed number of requests at each engine.",
        "first_come_first_served", "admit_all", "least_outstanding", "fixed_window", _BARE,
        migrator=_PLAIN_RANK,
    ),
    "edf_window": PolicySet(
        "Earliest deadline first, a fixed number of requests at each engine.",
        "earliest_deadline_first", "admit_all", "least_outstanding", "fixed_window", _BARE,
        migrator=_PLAIN_RANK,
    ),
    "tpot_arrival_window": PolicySet(
        "HyperFlexis' queue order with a fixed number of requests at each engine.",
        "tpot_then_arrival", "admit_all", "least_outstanding", "fixed_window", _BARE,
        migrator=_PLAIN_RANK,
    ),
    "engine_priority_class": PolicySet(
        "Round robin; the engine's own priority scheduling, by class (tightest TTFT first).",
        "first_come_first_served", "admit_all", "round_robin", "unlimited", {**_BARE, "engine_rank": "class"},
        migrator=_PLAIN_RANK,
    ),
    "engine_priority_deadline": PolicySet(
        "Round robin; the engine's own priority scheduling, by deadline.",
        "first_come_first_served", "admit_all", "round_robin", "unlimited", {**_BARE, "engine_rank": "deadline"},
        migrator=_PLAIN_RANK,
    ),
    "scorpio": PolicySet(
        "SCORPIO's guards: least deadline first, the unattainable refused, engines filled while their TPOT holds.",
        "earliest_deadline_first", "scorpio_ttft_guard", "round_robin", "virtual_batch", {**_BARE, "scan_limit": 1},
    ),
    "aladdin": PolicySet(
        "ALADDIN's placement: arrival order, the fullest instance whose worst case still keeps every target.",
        "first_come_first_served", "admit_all", "best_fit", "worst_case_fit", {**_BARE, "scan_limit": 1},
    ),
    "hyperflexis": PolicySet(
        "HyperFlexis Alg. 1: (TPOT, arrival), admission probability, token budgets at maturity times.",
        "tpot_then_arrival", "ttft_probability", "earliest_maturity", "maturity", {"tightest_share": 0.0},
        {"admission": {"measured": False}}, migration="tpot_budget",
    ),
    "slackline": PolicySet(
        "Deadline order while all can be in time, admission probability, eq. 5 at every event, hopeless requests last.",
        "feasible_deadlines", "ttft_probability", "earliest_maturity", "backlog", {"engine_rank": "deadline"},
        migration="tpot_grouped", migrator={"engine_rank": "slot"},
    ),
}  # fmt: skip

_MIGRATOR_PARTS = ("migration", "migrator")  # of the same overrides; build_migrator reads them
_PARTS: dict[str, Registry[Any]] = {
    "ordering": ORDERINGS,
    "admission": ADMISSIONS,
    "routing": ROUTINGS,
    "pacing": PACINGS,
}


def build_scheduler(
    policy_set: str, overrides: Mapping[str, Any] | None = None, defect: Defect | None = None
) -> Scheduler:
    """The scheduler of a policy set. `overrides` and exceptions: as for build_dispatcher and build_migrator."""
    return Scheduler(build_dispatcher(policy_set, overrides), build_migrator(policy_set, overrides), defect)


def build_dispatcher(policy_set: str, overrides: Mapping[str, Any] | None = None) -> StageDispatcher:
    """A dispatcher by name. `overrides` changes settings by part, e.g. {"pacing": {"window": 12}, "dispatch": {...}}.

    A part may also be exchanged: {"ordering": {"name": "earliest_deadline_first"}}. Raises ConfigError (UnknownName for
    names) that says which field is wrong and what is valid.
    """
    chosen = _chosen(policy_set)
    overrides = _by_part(overrides)
    dispatch = {**chosen.dispatch, **overrides.pop("dispatch", {})}
    parts: dict[str, Any] = {}
    for part in _PARTS:
        parts[part] = _build(part, *_part_of(chosen, part, overrides.pop(part, {})))
    build_migrator(policy_set, {part: overrides.pop(part, {}) for part in _MIGRATOR_PARTS})  # checked here already
    if overrides:
        valid = ", ".join(["dispatch", *_PARTS, *_MIGRATOR_PARTS])
        raise ConfigError(f"unknown part {min(overrides)!r}; valid: {valid}", field=min(overrides))
    config = _configured(DispatchConfig, dispatch, "dispatch")
    return StageDispatcher(policy_set, config, **parts, orderings=partial(_build, "ordering"))


def checked_ordering(name: str, options: Mapping[str, Any]) -> None:
    """Raises ConfigError (UnknownName for the name) whose field is `ordering`, or `ordering.` and the setting."""
    for key, value in options.items():
        if isinstance(value, (int, float)) and abs(value) > MOST_OPTION:
            raise ConfigError(f"ordering.{key} must be at most {MOST_OPTION}", field=f"ordering.{key}")
    _build("ordering", name, options)


def check_frames(name: str, state: Mapping[str, Any]) -> None:
    """Raises KeyError, TypeError or ValueError unless it is what frames of this ordering go on from."""
    _build("ordering", name, {}).frames().restore(state, 0.0, 0.0)


def ordering_options() -> dict[str, dict[str, Any]]:
    """The settings of each ordering with their defaults."""
    return {name: asdict(_config_of(ORDERINGS[name])()) for name in ORDERINGS}


def with_ordering(overrides: Mapping[str, Any], name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The overrides with that ordering in place of theirs; as they are without a name."""
    return {**overrides, "ordering": {"name": name, **options}} if name else dict(overrides)


def ordering_of(policy_set: str, overrides: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name of the ordering, and all of its settings. Raises as build_dispatcher does."""
    name, settings = _part_of(_chosen(policy_set), "ordering", _by_part(overrides).get("ordering", {}))
    return name, asdict(_configured(_config_of(ORDERINGS[name]), settings, "ordering"))


def build_migrator(policy_set: str, overrides: Mapping[str, Any] | None = None) -> Migrator:
    """The migrator of the same policy set: {"migration": {"name": "one_shot"}, "migrator": {"hold_s": 10}} changes it.

    Other parts of `overrides` are the dispatcher's. Raises as build_dispatcher does.
    """
    chosen, overrides = _chosen(policy_set), _by_part(overrides)
    settings = {**chosen.settings.get("migration", {}), **overrides.get("migration", {})}
    placement = _build("migration", settings.pop("name", chosen.migration), settings)
    config = _configured(MigratorConfig, {**chosen.migrator, **overrides.get("migrator", {})}, "migrator")
    return Migrator(policy_set, config, placement)


def _chosen(policy_set: str) -> PolicySet:
    try:
        return POLICY_SETS[policy_set]
    except KeyError:
        valid = ", ".join(sorted(POLICY_SETS))
        raise UnknownName(f"unknown policy set {policy_set!r}; valid: {valid}", field="policy_set") from None


def _part_of(chosen: PolicySet, part: str, changes: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name of a part and its settings; those of the set only if `changes` do not exchange the part."""
    name = changes.get("name", getattr(chosen, part))
    own = chosen.settings.get(part, {}) if name == getattr(chosen, part) else {}
    return name, {**own, **{key: each for key, each in changes.items() if key != "name"}}


def _by_part(overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    for part, settings in (overrides or {}).items():
        if not isinstance(settings, Mapping):
            raise ConfigError(f"{part} must be a mapping from settings to values, is {settings!r}", field=part)
        if not isinstance(settings.get("name", ""), str):
            raise ConfigError(f"{part}.name must be text, is {settings['name']!r}", field=f"{part}.name")
    return dict(overrides or {})


def _build(part: str, name: str, settings: Mapping[str, Any]) -> Any:
    implementation: Any = MIGRATIONS[name] if part == "migration" else _PARTS[part][name]
    return implementation(_configured(_config_of(implementation), settings, part))


def _config_of(implementation: Any) -> Any:
    found = getattr(implementation, "Config", None)
    return getattr(sys.modules[implementation.__module__], "Config") if found is None else found  # noqa: B009


def _configured(config_type: Any, settings: Mapping[str, Any], part: str) -> Any:
    known = {f.name for f in fields(config_type)}
    unknown = sorted(set(settings) - known)
    if unknown:
        valid = ", ".join(sorted(known)) or "none"
        raise ConfigError(f"{part} has no setting {unknown[0]!r}; valid: {valid}", field=f"{part}.{unknown[0]}")
    defaults = config_type()
    for name, value in settings.items():
        _require_kind(f"{part}.{name}", value, getattr(defaults, name))
    return replace(defaults, **settings)


def _require_kind(field: str, value: object, default: object) -> None:
    """Overrides come from JSON: a text in place of a number would only fail later, in the middle of a pass."""
    if isinstance(default, float):
        fits = isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
    else:
        fits = type(value) is type(default)
    if not fits:
        kind = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[type(default)]
        raise ConfigError(f"{field} must be {kind}, is {value!r}", field=field)
