"""Edit conflicts: the stored and the entered values, field by field."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from typing import Any, NamedTuple

from django.forms import Form

from controller.models.base import Versioned


class Difference(NamedTuple):
    """`stored`: saved by someone else in the meantime. `yours`: entered in this form."""

    label: str
    stored: Any
    yours: Any


def differences(form: Form, row: Versioned, names: Iterable[str]) -> list[Difference]:
    """Fields with different values. The form then gets the stored version, so that saving again overwrites."""
    found = [
        Difference(
            str(form[name].label), _shown(form, name, getattr(row, name)), _shown(form, name, form.cleaned_data[name])
        )
        for name in names
        if getattr(row, name) != form.cleaned_data[name]
    ]
    data: Any = copy(form.data)  # a request's own cannot be changed
    data["version"] = row.version
    form.data = data
    return found or [Difference("Version", row.version, "same values")]


def _shown(form: Form, name: str, value: Any) -> Any:
    shown = form.fields[name].prepare_value(value)
    unit = getattr(form.fields[name], "unit", "")
    return "none" if shown in (None, "") else f"{shown} {unit}".strip()
