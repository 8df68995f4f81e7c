"""An action on an instance that has changed since its page was opened: what is different now, and who changed it."""

from __future__ import annotations

from typing import Any

from console.panels.changed_since import changed_since
from controller.models import Decision, Instance
from controller.models.fleet import Role, Weights
from controller.selectors.records import decisions
from controller.wording.sentences import sentence

# What a page shows of the instance besides its settings, in the order of its field `seen`, with the possible values.
SEEN = {"desired_state": Instance.Desired.values, "role": Role.values, "weights": Weights.values}
SHOWN = 10  # decisions


def conflict_context(row: Instance, version: int, seen: str) -> dict[str, Any]:
    """`row`: as it is now. `version`, `seen`: of the page that asked."""
    return {"row": row, "changed": changed_since(row, version, states(seen)), "decisions": since(row, version)}


def states(seen: str) -> dict[str, str]:
    """Empty if the page named none, or an unknown one."""
    told = dict(zip(SEEN, seen.split(), strict=False))
    return told if len(told) == len(SEEN) and all(told[name] in values for name, values in SEEN.items()) else {}


def since(row: Instance, version: int) -> list[tuple[Decision, str]]:
    """The newest decisions about it, back to the first one that made a later version. Two queries."""
    about = decisions.search(subject_type="instance", subject=row.pk)
    first = about.filter(outcome__version__gt=version).order_by("at", "id").first()
    rows = about.filter(at__gte=first.at)[:SHOWN] if first else []
    return [(decision, sentence(decision)) for decision in rows]
