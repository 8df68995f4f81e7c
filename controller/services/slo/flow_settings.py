"""The flow settings: one row, which the first change creates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from django.core.exceptions import ValidationError

from controller.core.errors import ConfigError, UnknownName
from controller.dispatch.policy_sets import checked_ordering
from controller.flow.gate import GATED, OFF
from controller.models import FlowSettings
from controller.services import change
from controller.services.actors import Actor
from controller.services.replace import ExpectedVersion, defaults_of, put

ONLY = 1  # the row's id
EDITABLE = ("flow_policy", "drop_budget", "ordering", "ordering_options")
LONGEST_OPTIONS = 2_000  # characters of JSON


def flow_settings_create(*, actor: Actor, **values: Any) -> FlowSettings:
    """`values`: of EDITABLE. Raises ValidationError if the row exists."""
    row = FlowSettings(pk=ONLY, **values)
    return change.create(row, actor=actor, kind="flow_settings", check=flow_settings_check)


def flow_settings_update(*, actor: Actor, version: int | None, changes: Mapping[str, Any]) -> FlowSettings:
    return change.update(
        FlowSettings,
        ONLY,
        actor=actor,
        kind="flow_settings",
        version=version,
        changes=changes,
        editable=EDITABLE,
        check=flow_settings_check,
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


def flow_settings_check(row: FlowSettings) -> None:
    """Raises ValidationError by field. An ordering is built, so that its options are checked."""
    if row.flow_policy not in (OFF, *GATED):
        raise ValidationError({"flow_policy": f"Must be one of: {', '.join((OFF, *GATED))}."})
    if not 0 <= row.drop_budget <= 1:
        raise ValidationError({"drop_budget": "Must be between 0 and 1."})
    _check_ordering(row)


def _check_ordering(row: FlowSettings) -> None:
    if not isinstance(row.ordering_options, dict):
        raise ValidationError({"ordering_options": "Enter a JSON object."})
    if len(json.dumps(row.ordering_options)) > LONGEST_OPTIONS:
        raise ValidationError({"ordering_options": f"Enter at most {LONGEST_OPTIONS} characters."})
    if not row.ordering:
        if row.ordering_options:
            raise ValidationError({"ordering_options": "Options need an ordering. Choose one, or remove them."})
        return
    try:
        checked_ordering(row.ordering, row.ordering_options)
    except UnknownName as error:
        raise ValidationError({"ordering": f"{error}."}) from error
    except ConfigError as error:
        raise ValidationError({"ordering_options": f"{error}."}) from error
