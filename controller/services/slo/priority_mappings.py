"""Priority-to-SLO mappings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from itertools import pairwise
from typing import Any

from django.core.exceptions import ValidationError

from controller.core.snapshot import LevelBounds
from controller.models import PriorityMapping, Tenant
from controller.services import change
from controller.services.actors import Actor
from controller.services.replace import ExpectedVersion, defaults_of, put
from controller.slo.mapping import CONTENTION_RULES

EDITABLE = ("levels", "window", "window_age_s", "contention")
LEVELS_MAX = 32
TIGHTER = "Must not be tighter than the target of the next higher priority."
_BOUNDS = tuple(field.name for field in fields(LevelBounds))


def priority_mapping_create(
    *,
    actor: Actor,
    levels: Sequence[Mapping[str, float]],
    tenant: Tenant | None = None,
    window: int = 1000,
    window_age_s: float = 300.0,
    contention: str = "relax_to_next_higher",
) -> PriorityMapping:
    """`levels`: objects with the fields of LevelBounds, the most urgent first."""
    row = PriorityMapping(tenant=tenant, levels=levels, window=window, window_age_s=window_age_s, contention=contention)
    return change.create(row, actor=actor, kind="priority_mapping", check=_check)


def priority_mapping_update(
    *, actor: Actor, mapping_id: int, version: int | None, changes: Mapping[str, Any]
) -> PriorityMapping:
    return change.update(
        PriorityMapping,
        mapping_id,
        actor=actor,
        kind="priority_mapping",
        version=version,
        changes=changes,
        editable=EDITABLE,
        check=_check,
    )


def priority_mapping_put(
    *, actor: Actor, tenant: Tenant | None, values: Mapping[str, Any], expected: ExpectedVersion
) -> tuple[PriorityMapping, bool]:
    """Create the mapping or replace its values; whether it was created. Absent values get their default."""

    absent = defaults_of(PriorityMapping, values, EDITABLE)

    def change_to(row: PriorityMapping) -> PriorityMapping:
        return priority_mapping_update(
            actor=actor, mapping_id=row.pk, version=row.version, changes={**absent, **values}
        )

    return put(
        PriorityMapping,
        {"tenant": tenant},
        expected=expected,
        absent=absent,
        create=lambda: priority_mapping_create(actor=actor, tenant=tenant, **values),
        change=change_to,
    )


def priority_mapping_remove(*, actor: Actor, mapping_id: int, version: int | None = None) -> None:
    change.remove(PriorityMapping, mapping_id, actor=actor, kind="priority_mapping", version=version)


def tighter_than_above(levels: Sequence[Mapping[str, Any]]) -> list[tuple[int, str]]:
    """Index and field of each target that is tighter than that of the more urgent level above it. Empty if all are in
    order.

    Numbers may be missing, since stored and half-typed levels are checked too.
    """
    return [
        (place, name)
        for place, (above, below) in enumerate(pairwise(levels), start=1)
        for name in ("ttft_s", "tpot_s")
        if _is_number(above.get(name)) and _is_number(below.get(name)) and below[name] < above[name]
    ]


def _check(row: PriorityMapping) -> None:
    if row.contention not in CONTENTION_RULES:
        raise ValidationError({"contention": f"Must be one of: {', '.join(CONTENTION_RULES)}."})
    if not isinstance(row.levels, list) or not 1 <= len(row.levels) <= LEVELS_MAX:
        raise ValidationError({"levels": f"Must be a list of 1 to {LEVELS_MAX} levels."})
    errors: dict[str, str] = {}
    row.levels = [_level(index, level, errors) for index, level in enumerate(row.levels)]
    # The order of invalid levels means nothing.
    errors = errors or {f"levels.{place}.{name}": TIGHTER for place, name in tighter_than_above(row.levels)}
    if errors:
        raise ValidationError(errors)


def _level(index: int, raw: Any, errors: dict[str, str]) -> dict[str, float]:
    """One level with all numbers as floats. Errors go into `errors` under `levels.<index>.<field>`."""
    place = f"levels.{index}"
    if not isinstance(raw, Mapping) or set(raw) != set(_BOUNDS):
        errors[place] = f"Must be an object with exactly these fields: {', '.join(_BOUNDS)}."
        return {}
    for name, value in raw.items():
        if not (_is_number(value) and math.isfinite(value) and value > 0):
            errors[f"{place}.{name}"] = "Must be a number above 0."
    if any(key.startswith(f"{place}.") for key in errors):
        return {}
    level = LevelBounds(**{name: float(value) for name, value in raw.items()})
    for what in ("ttft", "tpot"):
        low, start, high = (getattr(level, f"{what}{end}") for end in ("_min_s", "_s", "_max_s"))
        if not low <= start <= high:
            errors[f"{place}.{what}_s"] = f"Must be between {what}_min_s and {what}_max_s."
    return asdict(level)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
