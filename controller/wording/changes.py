"""What a recorded change changed, from its `before` and `after`: as text for a sentence, as rows for the audit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any, NamedTuple

from controller.wording.vocabulary import named, shown


def changes(inputs: Mapping[str, Any]) -> list[str]:
    """What a person changed, from the record's `before` and `after`: "first token within 400 ms (was 500 ms)"."""
    before, after = _with_names(inputs, "before"), _with_names(inputs, "after")
    if not isinstance(before, dict) or not isinstance(after, dict):
        return []
    names = [name for name in after if name in before and before[name] != after[name] and name != "version"]
    return [text for name in names for text in _changed(name, before[name], after[name])]


def _with_names(inputs: Mapping[str, Any], side: str) -> Any:
    """One side of a change, with the names that were recorded of foreign keys in place of their ids."""
    values, names = inputs.get(side), inputs.get("names")
    if not isinstance(values, dict) or not isinstance(names, dict):
        return values
    return {name: _by_id(names.get(name), value) for name, value in values.items()}


def _by_id(names: Any, value: Any) -> Any:
    return names.get(str(value), value) if isinstance(names, dict) else value


def _changed(name: str, before: Any, after: Any) -> list[str]:
    """Of a list of objects (a mapping's levels) each that changed, by its number."""
    if _of_objects(before) and _of_objects(after):
        return [
            f"{named(name)} {place} {_change_of_one(old, new)}"
            for place, (old, new) in enumerate(zip_longest(before, after))
            if old != new
        ]
    return [_replaced(name, before, after)]


def _change_of_one(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> str:
    if before is None or after is None:
        return "added" if before is None else "removed"
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return ", ".join(_replaced(name, before.get(name), after.get(name)) for name in names)


def _replaced(name: str, before: Any, after: Any) -> str:
    """What is too long to show may differ only where it was cut off."""
    old, new = _short(name, before), _short(name, after)
    return f"{named(name)} changed" if old == new else f"{named(name)} {new} (was {old})"


def _of_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def _short(name: str, value: Any) -> str:
    text = "none" if value is None else shown(name, value)
    return text if len(text) <= 40 else text[:37] + "..."


# ---- rows of the audit's page ---------------------------------------------------------------------------------------


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
    before, after = _with_names(inputs, "before"), _with_names(inputs, "after")
    if not isinstance(before, dict) and not isinstance(after, dict):
        return []
    old = _parts(before if isinstance(before, dict) else {})
    new = _parts(after if isinstance(after, dict) else {})
    rows = [_row(path, old, new) for path in dict.fromkeys([*new, *old]) if path != ("version",)]
    return sorted(rows, key=lambda row: row.kind == "same")


Path = tuple[str, ...]


def _parts(values: Mapping[str, Any]) -> dict[Path, Any]:
    """By path. Lists of objects (a mapping's levels) are split, so that one number is one line."""
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
    return Changed(name, words, _text(old, path), _text(new, path), kind, _raw(old, path), _raw(new, path))


def _raw(values: Mapping[Path, Any], path: Path) -> str:
    return json.dumps(values[path], default=str) if path in values else ""


def _text(values: Mapping[Path, Any], path: Path) -> str:
    if path not in values:
        return ""
    value = values[path]
    return "none" if value is None else '""' if value == "" else shown(path[-1], value)
