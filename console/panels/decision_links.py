"""The figures of a decision, with links to the instances and decisions that they name."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from django.urls import reverse
from django.utils.html import conditional_escape, format_html
from django.utils.safestring import SafeString, mark_safe

from controller.models import Decision, Instance
from controller.wording.vocabulary import figure

# Figures whose values name instances, and figures whose value is the id of another decision.
INSTANCES = (
    "instance", "replacement", "seed", "started", "stopped", "asleep", "warm", "woken", "switched", "from", "source",
    "target",
)  # fmt: skip
DECISIONS = ("scale_out", "scale_in", "launch")
ROLE_CHANGES = ("role_change", "role_switch", "role_switch_failed")  # their `from` is a role
NAMES_MAX = 100  # looked up at most


class Linked(NamedTuple):
    """A figure as `controller.wording.vocabulary.Figure`, its value with links."""

    name: str
    value: SafeString | str
    raw: str


def linked_figures(decision: Decision, *records: Mapping[str, Any]) -> list[list[Linked]]:
    """The figures of each record. Two queries at most: only existing instances and stored decisions get a link."""
    keys = [key for key in INSTANCES if key != "from" or decision.kind not in ROLE_CHANGES]
    named = {name for record in records for key in keys for name in _names(record.get(key))}
    there = Instance.objects.filter(pk__in=sorted(named)[:NAMES_MAX]).values_list("pk", flat=True) if named else ()
    addresses = {name: reverse("instance", args=[name]) for name in there}
    numbers = {value for record in records for key, value in record.items() if _is_number_of_one(key, value)}
    kept = set(Decision.objects.filter(pk__in=numbers).values_list("pk", flat=True)) if numbers else set()
    return [[_with_links(key, value, addresses, keys, kept) for key, value in record.items()] for record in records]


def _is_number_of_one(key: str, value: Any) -> bool:
    return key in DECISIONS and isinstance(value, int)


def _with_links(
    key: str, value: Any, addresses: Mapping[str, str], keys: Sequence[str], kept: Collection[int]
) -> Linked:
    plain = figure(key, value)
    if _is_number_of_one(key, value) and value in kept:
        link = format_html('<a href="{}">{}</a>', reverse("decision", args=[value]), plain.value)
        return Linked(plain.name, link, plain.raw)
    found = [name for name in _names(value) if name in addresses] if key in keys else []
    return Linked(plain.name, _marked_up(plain.value, {name: addresses[name] for name in found}), plain.raw)


def _names(value: Any) -> Iterator[str]:
    """All strings in it, including keys: a figure may be one name, a list of names, or a mapping by name."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield name
            yield from _names(each)
    elif isinstance(value, list):
        for each in value:
            yield from _names(each)


def _marked_up(text: str, addresses: Mapping[str, str]) -> SafeString | str:
    """Turns each whole name in it into a link; everything else is escaped."""
    if not addresses:
        return text
    longest_first = "|".join(re.escape(name) for name in sorted(addresses, key=len, reverse=True))
    parts = re.split(rf"(?<![\w.-])({longest_first})(?![\w-])", text)
    shown = (
        format_html('<a href="{}">{}</a>', addresses[part], part) if part in addresses else conditional_escape(part)
        for part in parts
    )
    return mark_safe("".join(shown))  # every part was escaped above
