"""What a recorded change changed, field by field, for the audit's page: in words and with units."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from controller.wording.figures import named, shown


class Changed(NamedTuple):
    """`name` as it is recorded; `kind`: added, removed, changed or same. Values as text, raw ones as JSON."""

    name: str
    words: str
    before: str
    after: str
    kind: str
    raw_before: str
    raw_after: str


def changed_fields(inputs: Mapping[str, Any]) -> list[Changed]:
    """From `before` and `after` of a record (either may be missing: made, removed). Changed fields first."""
    before, after = inputs.get("before"), inputs.get("after")
    if not isinstance(before, dict) and not isinstance(after, dict):
        return []
    old = _parts(before if isinstance(before, dict) else {})
    new = _parts(after if isinstance(after, dict) else {})
    rows = [_row(path, old, new) for path in dict.fromkeys([*new, *old]) if path != ("version",)]
    return sorted(rows, key=lambda row: row.kind == "same")


Path = tuple[str, ...]


def _parts(values: Mapping[str, Any]) -> dict[Path, Any]:
    """By path. Lists of objects (a mapping's levels) are taken apart, so that one number is one line."""
    found: dict[Path, Any] = {}
    for name, value in values.items():
        if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            found |= {(name, str(i), inner): part for i, each in enumerate(value) for inner, part in each.items()}
        else:
            found[(name,)] = value
    return found


def _row(path: Path, old: Mapping[Path, Any], new: Mapping[Path, Any]) -> Changed:
    if path not in old:
        kind = "added"
    elif path not in new:
        kind = "removed"
    else:
        kind = "same" if old[path] == new[path] else "changed"
    name = path[0] if len(path) == 1 else f"{path[0]}[{path[1]}].{path[2]}"
    words = named(path[0]) if len(path) == 1 else f"{named(path[0])} {path[1]}: {named(path[2])}"
    texts = [_text(values, path) for values in (old, new)]
    raws = [json.dumps(values[path], default=str) if path in values else "" for values in (old, new)]
    return Changed(name, words, *texts, kind, *raws)


def _text(values: Mapping[Path, Any], path: Path) -> str:
    if path not in values:
        return ""
    value = values[path]
    return "none" if value is None else '""' if value == "" else shown(path[-1], value)
