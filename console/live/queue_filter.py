"""What a person types to find waiting requests. One rule for what the page shows and for what a command on all acts on.

Words are looked for anywhere in id, tenant, class and model, all of them; `tenant:acme`, `class:chat`, `model:demo` and
`id:req-1` name a field and its whole value. Case does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass

from controller.core.messages import QueueRow

FIELDS = {"id": "id", "tenant": "tenant", "class": "slo_class", "model": "model"}


def haystack(row: QueueRow) -> str:
    """Where words are looked for; kept beside the row, since ten thousand are searched for each frame."""
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
