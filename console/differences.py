"""What a recorded change changed, field by field, for the audit's page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple


class Changed(NamedTuple):
    """`kind`: added, removed, changed or same. Values as text."""

    name: str
    before: str
    after: str
    kind: str


def changed_fields(inputs: Mapping[str, Any]) -> list[Changed]:
    """From `before` and `after` of a record (either may be missing: made, removed). Changed fields first."""
    before, after = inputs.get("before"), inputs.get("after")
    if not isinstance(before, dict) and not isinstance(after, dict):
        return []
    old: dict[str, Any] = before if isinstance(before, dict) else {}
    new: dict[str, Any] = after if isinstance(after, dict) else {}
    rows = [_row(name, old, new) for name in dict.fromkeys([*new, *old]) if name != "version"]
    return sorted(rows, key=lambda row: row.kind == "same")


def _row(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Changed:
    if name not in old:
        kind = "added"
    elif name not in new:
        kind = "removed"
    else:
        kind = "same" if old[name] == new[name] else "changed"
    return Changed(name, _text(old, name), _text(new, name), kind)


def _text(values: Mapping[str, Any], name: str) -> str:
    if name not in values:
        return ""
    value = values[name]
    return "none" if value is None else value if isinstance(value, str) else json.dumps(value)
