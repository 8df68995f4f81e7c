"""The text filter of the queue. The page and commands on all matching requests use the same rule.

Every word must occur in the id, tenant, class or model; `tenant:acme`, `class:chat`, `model:demo` and `id:req-1` match
a field's whole value. Case does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass

from controller.core.messages import QueueRow

FIELDS = {"id": "id", "tenant": "tenant", "class": "slo_class", "model": "model"}


def haystack(row: QueueRow) -> str:
    """The text that words are searched in; kept with each row, since each frame searches up to ten thousand rows."""
    return "\n".join((row["id"], row["tenant"], row["slo_class"], row["model"])).lower()


@dataclass(frozen=True, slots=True)
class Words:
    anywhere: tuple[str, ...]
    exactly: tuple[tuple[str, str], ...]

    def match(self, row: QueueRow, text: str) -> bool:
        """`text`: the row's haystack."""
        if not all(word in text for word in self.anywhere):
            return False
        return all(row[field].lower() == value for field, value in self.exactly)  # type: ignore[literal-required]


def words_of(text: str) -> Words:
    anywhere, exactly = [], []
    for word in text.lower().split():
        name, colon, value = word.partition(":")
        if colon and value and name in FIELDS:
            exactly.append((FIELDS[name], value))
        else:
            anywhere.append(word)
    return Words(tuple(anywhere), tuple(exactly))
