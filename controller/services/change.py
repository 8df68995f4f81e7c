"""The steps that every change shares, in one transaction: check, version, audit, announce to gateways."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from types import MappingProxyType
from typing import Any, TypeVar

from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import Model, ProtectedError

from controller.core.errors import SlacklineError
from controller.models import Decision
from controller.models.base import Versioned
from controller.services.actors import Actor
from controller.services.config import config_version_raise
from controller.services.decisions import decision_record

M = TypeVar("M", bound=Model)
V = TypeVar("V", bound=Versioned)
Names = dict[str, dict[str, str]]
HIDDEN = frozenset({"sha256", "created_at", "updated_at"})


class VersionConflict(SlacklineError):
    """Another change was saved first. `current`: the stored version; `seen`: the version that this change is based on.
    `absent`: what fields that the caller did not name would have got (`controller.services.replace`)."""

    absent: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, subject: str, seen: int, current: int) -> None:
        super().__init__(
            f"{subject} was changed by someone else: your version is {seen}, the current version is {current}"
        )
        self.seen, self.current = seen, current


def as_json(row: Model) -> dict[str, Any]:
    """A row as the audit log shows it: plain values, foreign keys by id, no secrets."""
    values = {}
    for field in row._meta.concrete_fields:
        if field.name not in HIDDEN:
            value = getattr(row, field.attname)
            values[field.name] = value.isoformat() if isinstance(value, datetime) else value
    return values


def names_in(row: Model, fields: Iterable[str] | None = None) -> Names:
    """By foreign key of the row (None: all), the name of what it refers to, by its id: a page would show the id alone.

    A key that is a name already (an instance's) has none.
    """
    found: Names = {}
    for field in row._meta.concrete_fields:
        pk = getattr(row, field.attname)
        if field.is_relation and pk is not None and (fields is None or field.name in fields):
            name = str(getattr(row, field.name))
            if name != str(pk):
                found[field.name] = {str(pk): name}
    return found


def _named(*of: Names) -> dict[str, Names]:
    """As it is recorded beside `before` and `after`; nothing where no foreign key is among them."""
    found: Names = {}
    for each in of:
        for field, names in each.items():
            found[field] = {**found.get(field, {}), **names}
    return {"names": found} if found else {}


def create(row: M, *, actor: Actor, kind: str, check: Callable[[M], None] | None = None, gateways: bool = True) -> M:
    """Check, insert, and audit as `<kind>_created`. `gateways`: gateways read this table.

    Versions go on after those of a removed object of the same name: whoever read that one, and knows it by a name and
    an ETag, must not change the new one unseen.
    """
    with transaction.atomic():
        _validate(row, check)
        if isinstance(row, Versioned):
            row.version = _removed_version(kind, str(row)) + 1
        row.save(force_insert=True)
        audit(actor, kind, "created", row, {"after": as_json(row), **_named(names_in(row))})
        if gateways:
            config_version_raise()
    return row


def update(
    table: type[V],
    pk: Any,
    *,
    actor: Actor,
    kind: str,
    version: int | None,
    changes: Mapping[str, Any],
    editable: Iterable[str],
    check: Callable[[V], None] | None = None,
    gateways: bool = True,
) -> V:
    """Change the named fields of a row that still has `version` (None: whichever it has), and audit as
    `<kind>_updated`.

    Raises DoesNotExist, VersionConflict, or ValidationError (also for a field that is not editable). If no value
    differs, the version stays and no decision is recorded.
    """
    _refuse_others(changes, frozenset(editable))
    with transaction.atomic():
        row = table._default_manager.select_for_update().get(pk=pk)
        if version is not None and row.version != version:
            raise VersionConflict(str(row), version, row.version)
        before, named = as_json(row), names_in(row, changes)
        for name, value in changes.items():
            setattr(row, name, value)
        _validate(row, check)
        changed = {name: value for name, value in as_json(row).items() if before[name] != value}
        if not changed:
            return row
        row.version += 1
        row.save(update_fields=[*changes, "version", "updated_at"])
        told = {"before": {name: before[name] for name in changed}, "after": changed}
        named = {name: named[name] for name in changed if name in named}
        audit(actor, kind, "updated", row, {**told, **_named(named, names_in(row, changed))})
        if gateways:
            config_version_raise()
    return row


def remove(
    table: type[V],
    pk: Any,
    *,
    actor: Actor,
    kind: str,
    version: int | None = None,
    first: Callable[[V], Mapping[str, Any]] | None = None,
    gateways: bool = True,
) -> None:
    """Delete, and audit as `<kind>_removed`. Raises ValidationError while other rows refer to it.

    `first` changes rows that refer to it before the deletion, in the same transaction; its result is recorded too.
    """
    with transaction.atomic():
        row = table._default_manager.select_for_update().get(pk=pk)
        if version is not None and row.version != version:
            raise VersionConflict(str(row), version, row.version)
        also = first(row) if first is not None else {}
        audit(actor, kind, "removed", row, {"before": as_json(row), **_named(names_in(row)), **also})
        try:
            row.delete()
        except ProtectedError as error:
            users = ", ".join(sorted({str(user) for user in error.protected_objects})[:5])
            raise ValidationError(f"{row} is still in use by {users}.") from error
        if gateways:
            config_version_raise()


def _removed_version(kind: str, subject: str) -> int:
    """The version in which an object of this name was last removed; 0 if none was, or it is no longer in the audit."""
    removed = Decision.objects.filter(kind=f"{kind}_removed", subject_type=kind, subject=subject)
    outcome = removed.order_by("-at", "-id").values_list("outcome", flat=True).first() or {}
    return int(outcome.get("version") or 0)


def audit(actor: Actor, kind: str, what: str, row: Model, inputs: Mapping[str, Any]) -> None:
    """Record the decision `<kind>_<what>` about the row."""
    decision_record(
        actor=actor,
        kind=f"{kind}_{what}",
        subject_type=kind,
        subject=str(row),
        reason=f"{actor.type}_{what}",
        inputs=inputs,
        outcome={"id": row.pk, "version": getattr(row, "version", None)},
    )


def _refuse_others(changes: Mapping[str, Any], editable: frozenset[str]) -> None:
    wrong = sorted(set(changes) - editable)
    if wrong:
        raise ValidationError(dict.fromkeys(wrong, "This field cannot be changed."))


def _validate(row: M, check: Callable[[M], None] | None) -> None:
    """Validate each field, then combinations of fields, then the constraints of the database."""
    row.clean_fields()
    if check is not None:
        check(row)
    row.validate_unique()
    row.validate_constraints()
