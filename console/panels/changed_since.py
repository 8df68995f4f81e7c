"""What is different in a row since a page showed it, for actions that have no form with the values."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from controller.models.base import Versioned
from controller.selectors.records import decisions
from controller.services.change import as_json
from controller.wording.changes import Changed, changed_fields

NOTHING: Mapping[str, Any] = MappingProxyType({})


def changed_since(row: Versioned, version: int, seen: Mapping[str, Any] = NOTHING) -> list[Changed]:
    """Fields that differ from those at `version`, as decisions recorded them. `row`: as it is now; `seen`: values that
    the page has told, of fields that change without such a decision."""
    kind = f"{row._meta.db_table}_updated"
    before = {**decisions.values_at(kind=kind, row_id=row.pk, version=version), **seen}
    stored = as_json(row)
    after = {name: stored[name] for name in before if name in stored}
    return [each for each in changed_fields({"before": before, "after": after}) if each.kind != "same"]
