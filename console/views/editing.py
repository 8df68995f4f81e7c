"""What every page with a form does once it is sent: errors at their fields, conflicts, messages, the status.

Two people may edit the same row. The second one to save gets both sets of values, field by field (412), and can then
overwrite the first one's. Fields that the second one did not touch take the stored values, so that saving again does
not undo what the first one did there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.db.models import Model
from django.forms import Form
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.shortcuts import redirect, render
from django.utils.html import format_html
from django.utils.safestring import SafeString

from console.access import actor_of
from console.forms.base import EditForm
from console.forms.numbers import number_of
from console.panels.changed_since import changed_since
from controller.models import Decision
from controller.models.base import Versioned
from controller.selectors.records import decisions
from controller.services.change import VersionConflict
from workers.notices import announce_config

STALE = HTTPStatus.PRECONDITION_FAILED  # as in the control API
UNTOUCHED = "not changed by you"
T = TypeVar("T")
V = TypeVar("V", bound=Versioned)


class Difference(NamedTuple):
    """`stored`: saved by someone else in the meantime. `yours`: entered in this form."""

    label: str
    stored: Any
    yours: Any


def written(form: Form, write: Callable[[], T]) -> T | None:
    """What `write` returns. None: the service refused the values, and its errors are in the form."""
    try:
        return write()
    except ValidationError as error:
        show_errors(form, error)
        return None


def created(request: HttpRequest, form: EditForm, create: Callable[..., T], told: Callable[[T], str]) -> T | None:
    """The row that a posted form created, as `create(actor=, **values)` stored it, with a message. None: the form was
    not posted, or is to be shown again with its errors."""
    if request.method != "POST" or not form.is_valid():
        return None
    row = written(form, lambda: create(actor=actor_of(request), **form.values()))
    if row is not None:
        messages.success(request, told(row))
    return row


def updated(form: EditForm, row: V, write: Callable[..., V]) -> tuple[V | None, list[Difference]]:
    """The row as `write(version=, changes=)` stored it, or None with the differences if there was a conflict."""
    try:
        return written(form, lambda: write(version=form.cleaned_data["version"], changes=form.values())), []
    except VersionConflict:
        row.refresh_from_db()
        return None, differences(form, row, form.CHANGEABLE)


def removed(row: V, request: HttpRequest, remove: Callable[..., object], page: Callable[..., T]) -> T | None:
    """Remove the row at the posted version, as `remove(actor=, version=)` does; None once it is removed. Otherwise the
    `page` that says why not: `page(request, row, text, status=, changed=)`."""
    version = number_of(request.POST.get("version", ""))
    if version is None:
        return page(request, row, "Not removed: the form was incomplete. Try again.", status=422)
    try:
        remove(actor=actor_of(request), version=version)
    except VersionConflict as error:
        row.refresh_from_db()
        return page(request, row, str(error), status=STALE, changed=changed_since(row, version))
    except ValidationError as error:
        return page(request, row, "; ".join(error.messages), status=409)
    return None


def form_page(
    request: HttpRequest, template: str, form: Form, conflict: Sequence[Difference] = (), **context: Any
) -> HttpResponse:
    status = STALE if conflict else 422 if form.errors else 200
    return render(request, template, {"form": form, "conflict": conflict, **context}, status=status)


def say_updated(
    request: HttpRequest, form: Form, stored: Versioned, text: str, link: Callable[[], SafeString | str] = str
) -> None:
    """`link`: follows the text, for instance to revert the change; only called if something changed."""
    if stored.version == form.cleaned_data["version"]:
        messages.info(request, "No changes.")
    else:
        messages.success(request, format_html("{}{}", text, link()))


def saved(page: str, *ids: int | str) -> HttpResponseRedirect:
    """To `page`, after gateways were notified to read the configuration again."""
    announce_config()
    return redirect(page, *ids)


def restore_link(text: str, path: str, decision: Decision | None) -> SafeString | str:
    return format_html(' <a href="{}?restore={}">{}</a>', path, decision.pk, text) if decision else ""


def show_errors(form: Form, error: ValidationError) -> None:
    """Add an error of a service or of the database to the field it names."""
    named = error.message_dict if hasattr(error, "error_dict") else {"__all__": error.messages}
    for name, texts in named.items():
        for text in texts:
            form.add_error(name if name in form.fields else None, text)


def differences(form: Form, row: Versioned, names: Iterable[str]) -> list[Difference]:
    """Fields with different values. The form then gets the stored version, so that saving again overwrites, and the
    stored values of fields that only the other person changed."""
    seen, found = values_seen(form, row), []
    data: Any = copy(form.data)  # a request's own cannot be changed
    for name in names:
        stored, entered = getattr(row, name), form.cleaned_data[name]
        if stored == entered:
            continue
        untouched = name in seen and seen[name] == _plain(entered)
        label, shown = str(form[name].label), _shown(form, name, stored)
        found.append(Difference(label, shown, UNTOUCHED if untouched else _shown(form, name, entered)))
        if untouched:
            _enter(data, form, name, stored)
    data["version"] = row.version
    form.data = data
    return found or [Difference("Version", row.version, "same values")]


def values_seen(form: Form, row: Versioned) -> Mapping[str, Any]:
    """The values that the form showed at first, of the fields that were changed since."""
    return decisions.values_at(
        kind=f"{row._meta.db_table}_updated", row_id=row.pk, version=form.cleaned_data["version"]
    )


def _plain(value: Any) -> Any:
    """As decisions record it."""
    return value.pk if isinstance(value, Model) else value


def _enter(data: Any, form: Form, name: str, value: Any) -> None:
    """Enter a value in the data of the form, as a browser would send it."""
    shown = form.fields[name].prepare_value(_plain(value))
    if isinstance(shown, list) and hasattr(data, "setlist"):
        data.setlist(form.add_prefix(name), shown)
    else:
        data[form.add_prefix(name)] = "" if shown is None else shown


def _shown(form: Form, name: str, value: Any) -> Any:
    shown = form.fields[name].prepare_value(value)
    unit = getattr(form.fields[name], "unit", "")
    return "none" if shown in (None, "") else f"{shown} {unit}".strip()
