"""Create or replace an object by its name. The same call twice changes nothing, and records nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from django.core.exceptions import ValidationError
from django.db import IntegrityError, models, transaction

from controller.core.errors import SlacklineError
from controller.models.base import Versioned
from controller.services.change import VersionConflict

V = TypeVar("V", bound=Versioned)


class NotStored(SlacklineError):
    """The caller expects an object that does not exist."""


class AlreadyStored(SlacklineError):
    """The caller expects that the object does not exist yet, but it does. `absent`: see `put`."""

    absent: Mapping[str, Any] = MappingProxyType({})


class FixedField(SlacklineError):
    """The stored object has another value in a field that never changes. `fields`: messages by field."""

    def __init__(self, fields: Mapping[str, str]) -> None:
        super().__init__("; ".join(f"{name}: {message}" for name, message in fields.items()))
        self.fields = dict(fields)


@dataclass(frozen=True, slots=True)
class ExpectedVersion:
    """What the caller expects to find: this `version`, any version (`exists`), no object (`missing`), or either."""

    version: int | None = None
    exists: bool = False
    missing: bool = False


def put(
    table: type[V],
    key: Mapping[str, Any],
    *,
    expected: ExpectedVersion,
    absent: Mapping[str, Any],
    create: Callable[[], V],
    change: Callable[[V], V],
) -> tuple[V, bool]:
    """The stored row, and whether it was created. `key`: field values that identify it. `absent`: what fields get that
    the caller does not name, for the errors: a refused caller must see what the call would have reset.

    Two callers may create the same object at the same moment; the second one then changes what the first one created.
    Raises VersionConflict, NotStored, AlreadyStored, and what `create` and `change` raise.
    """
    rows = table._default_manager.filter(**key)
    with transaction.atomic():
        row = rows.select_for_update().first()
        if row is None:
            if expected.exists:
                raise NotStored("The object does not exist.")
            try:
                with transaction.atomic():
                    return create(), True
            except (IntegrityError, ValidationError):
                row = rows.select_for_update().first()
                if row is None:
                    raise
        refused: AlreadyStored | VersionConflict | None = None
        if expected.missing:
            refused = AlreadyStored(f"{row} already exists.")
        elif expected.version is not None and row.version != expected.version:
            refused = VersionConflict(str(row), expected.version, row.version)
        if refused is not None:
            refused.absent = absent
            raise refused
        return change(row), False


def defaults_of(
    table: type[models.Model], values: Mapping[str, Any], names: Iterable[str], *, kept: Iterable[str] = ()
) -> dict[str, Any]:
    """The default of each field in `names` that has no value in `values`, except for `kept`, which stay as they are
    stored."""
    fields = {name: table._meta.get_field(name) for name in names if name not in values and name not in kept}
    return {name: field.get_default() for name, field in fields.items() if isinstance(field, models.Field)}
