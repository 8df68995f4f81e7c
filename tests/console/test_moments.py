"""Moments in forms: all of one kind, said to be UTC, read from an address with or without a zone."""

from __future__ import annotations

import importlib
import pkgutil
from datetime import UTC, datetime

import pytest
from django import forms

import console
from console.forms.base import RequestSearch, TimeField
from console.views.scaling import Moment


def of_the_console():
    """Every form class of the console with its fields that hold a moment."""
    for found in pkgutil.walk_packages(console.__path__, "console."):
        if ".management." not in found.name and found.name not in ("console.asgi", "console.environment"):
            importlib.import_module(found.name)
    seen, left = {}, [forms.Form]
    while left:
        form = left.pop()
        left += form.__subclasses__()
        if form.__module__.startswith("console."):
            kinds = forms.DateTimeField | forms.DateField | forms.TimeField | forms.SplitDateTimeField
            seen[form] = {name: field for name, field in form.base_fields.items() if isinstance(field, kinds)}
    return seen


def test_every_moment_that_is_typed_is_of_the_one_kind_and_says_utc():
    """Whoever adds a form with a moment gets the reader's own zone with it."""
    forms_with_moments = {form.__name__: fields for form, fields in of_the_console().items() if fields}
    assert {"RequestSearch", "AuditSearch", "Moment", "ExperimentForm", "KeyForm"} <= forms_with_moments.keys()
    for form, fields in forms_with_moments.items():
        for name, field in fields.items():
            assert isinstance(field, TimeField), f"{form}.{name}"
            assert field.label.endswith("(UTC)"), f"{form}.{name}"
            assert "data-moment" in field.widget.attrs, f"{form}.{name}"


@pytest.mark.parametrize(
    ("typed", "at", "shown"),
    [
        ("2026-11-01T06:30", datetime(2026, 11, 1, 6, 30, tzinfo=UTC), "2026-11-01T06:30"),
        ("2026-11-01T06:30:05", datetime(2026, 11, 1, 6, 30, 5, tzinfo=UTC), "2026-11-01T06:30:05"),
        ("2026-11-01T12:00:00+05:30", datetime(2026, 11, 1, 6, 30, tzinfo=UTC), "2026-11-01T06:30:00"),
        ("2026-11-01T06:30:00Z", datetime(2026, 11, 1, 6, 30, tzinfo=UTC), "2026-11-01T06:30:00"),
        ("", None, ""),
    ],
)
def test_an_address_means_one_moment_whoever_opens_it(typed, at, shown):
    form = RequestSearch({"since": typed})
    assert form.is_valid(), form.errors
    assert form.cleaned_data["since"] == at
    assert f'value="{shown}"' in str(form["since"])


@pytest.mark.parametrize(
    "wrong", ["noon", "0001-01-01T00:00+14:00", "9999-12-31T23:59-12:00", "2026-13-01T00:00+01:00"]
)
def test_what_is_no_moment_is_shown_as_it_was_typed(wrong):
    form = Moment({"at": wrong})
    assert not form.is_valid()
    assert f'value="{wrong}"' in str(form["at"])
