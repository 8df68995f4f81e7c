"""An action on an instance that has changed since its page was opened: what is different now, and who changed it."""

from __future__ import annotations

from typing import Any

from controller.models import Decision, Instance
from controller.models.fleet import Role, Weights
from controller.selectors.records import decisions
from controller.services.change import as_json
from controller.wording.changes import Changed, changed_fields
from controller.wording.sentences import sentence

# What a page shows of the instance besides its settings, in the order of its field `seen`, with the possible values.
SEEN = {"desired_state": Instance.Desired.values, "role": Role.values, "weights": Weights.values}
SHOWN = 10  # decisions


def conflict_context(row: Instance, version: int, seen: str) -> dict[str, Any]:
    """`row`: as it is now. `version`, `seen`: of the page that asked."""
    return {"row": row, "changed": differences(row, version, seen), "decisions": since(row, version)}


def differences(row: Instance, version: int, seen: str) -> list[Changed]:
    """Settings as decisions recorded them, and the states that the page itself has told."""
    before = decisions.values_at(kind="instance_updated", row_id=row.pk, version=version) | states(seen)
    stored = as_json(row)
    after = {name: stored[name] for name in before if name in stored}
    return [each for each in changed_fields({"before": before, "after": after}) if each.kind != "same"]


def states(seen: str) -> dict[str, str]:
    """Empty if the page told none, or none that there are."""
    told = dict(zip(SEEN, seen.split(), strict=False))
    return told if len(told) == len(SEEN) and all(told[name] in values for name, values in SEEN.items()) else {}


def since(row: Instance, version: int) -> list[tuple[Decision, str]]:
    """The newest decisions about it, back to the first one that made a later version. Two queries."""
    about = decisions.search(subject_type="instance", subject=row.pk)
    first = about.filter(outcome__version__gt=version).order_by("at", "id").first()
    rows = about.filter(at__gte=first.at)[:SHOWN] if first else []
    return [(decision, sentence(decision)) for decision in rows]
