"""The flow settings: one row, which the first change creates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.core.exceptions import ValidationError

from controller.flow.gate import GATED, OFF
from controller.models import FlowSettings
from controller.services import change
from controller.services.actors import Actor
from controller.services.replace import ExpectedVersion, defaults_of, put

ONLY = 1  # the row's id
EDITABLE = ("flow_policy", "drop_budget")


def flow_settings_create(*, actor: Actor, flow_policy: str = OFF, drop_budget: float = 0.0) -> FlowSettings:
    """Raises ValidationError if the row exists."""
    row = FlowSettings(pk=ONLY, flow_policy=flow_policy, drop_budget=drop_budget)
    return change.create(row, actor=actor, kind="flow_settings", check=_check)


def flow_settings_update(*, actor: Actor, version: int | None, changes: Mapping[str, Any]) -> FlowSettings:
    return change.update(
        FlowSettings,
        ONLY,
        actor=actor,
        kind="flow_settings",
        version=version,
        changes=changes,
        editable=EDITABLE,
        check=_check,
    )


def flow_settings_put(
    *, actor: Actor, values: Mapping[str, Any], expected: ExpectedVersion
) -> tuple[FlowSettings, bool]:
    """Create the row or replace its values; whether it was created. Absent values get their default."""
    absent = defaults_of(FlowSettings, values, EDITABLE)

    def change_to(row: FlowSettings) -> FlowSettings:
        return flow_settings_update(actor=actor, version=row.version, changes={**absent, **values})

    return put(
        FlowSettings,
        {"pk": ONLY},
        expected=expected,
        absent=absent,
        create=lambda: flow_settings_create(actor=actor, **values),
        change=change_to,
    )


def _check(row: FlowSettings) -> None:
    if row.flow_policy not in (OFF, *GATED):
        raise ValidationError({"flow_policy": f"Must be one of: {', '.join((OFF, *GATED))}."})
    if not 0 <= row.drop_budget <= 1:
        raise ValidationError({"drop_budget": "Must be between 0 and 1."})
