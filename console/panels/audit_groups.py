"""The audit's list: what followed from one decision of a scaler stands under it, in one entry that opens.

A scale-in leaves six records: the decision, its drain, and each state that the reconciler saw until the instance was
gone. A reader looks for the first; the others tell how it went.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta

from console.panels.context import named_instances
from controller.models import Decision

CAUSES = ("scale_out", "scale_in", "role_change")
FOLLOWS_WITHIN = timedelta(minutes=15)  # a drain may take that long
PERSON = "person"

Row = tuple[Decision, str]  # and its sentence


@dataclass(slots=True)
class AuditEntry:
    """`followed`: records of jobs about the instances that the decision names, oldest first."""

    decision: Decision
    sentence: str
    followed: list[Row] = field(default_factory=list)


def entries(rows: Iterable[Row]) -> list[AuditEntry]:
    """The rows of one page, newest first, those that followed from another one moved into its entry."""
    found: list[AuditEntry] = []
    latest: dict[str, AuditEntry] = {}  # by instance: the decision of a scaler that its records follow from
    for decision, sentence in reversed(list(rows)):
        cause = next((latest[name] for name in _about(decision) if name in latest), None)
        if cause is not None and _follows(decision, cause.decision):
            cause.followed.append((decision, sentence))
            continue
        entry = AuditEntry(decision, sentence)
        found.append(entry)
        if decision.kind in CAUSES:
            latest |= dict.fromkeys(named_instances(decision), entry)
        else:
            for name in _about(decision):  # what a person does to an instance begins something new
                latest.pop(name, None)
    return found[::-1]


def _about(decision: Decision) -> Iterator[str]:
    if decision.subject_type == "instance":
        yield decision.subject
    elif decision.kind.startswith("scale_out_") and decision.inputs.get("instance"):  # how a scale-out ended
        yield str(decision.inputs["instance"])


def _follows(decision: Decision, cause: Decision) -> bool:
    return decision.actor_type != PERSON and decision.at - cause.at <= FOLLOWS_WITHIN
