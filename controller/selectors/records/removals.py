"""Who removed a row: the audit log keeps decisions of people forever."""

from __future__ import annotations

from typing import Any, NamedTuple

from controller.models import Decision

# Objects whose removal also removes others (the foreign key of those, by its name in the audit log).
OWNERS = {"slo_class": "tenant", "priority_mapping": "tenant", "api_key": "tenant", "scaling_policy": "model"}
OWNER_KINDS = {"tenant": "tenant", "model": "served_model"}


class Removal(NamedTuple):
    """`decision` removed it or (`went_with`) its tenant or model. `before`: its last known values."""

    decision: Decision
    name: str
    before: dict[str, Any]
    went_with: bool = False


def removal(kind: str, pk: int) -> Removal | None:
    """None if no removal of a row with that id is recorded."""
    own = _newest(f"{kind}_removed", pk)
    if own is not None:
        return Removal(own, own.subject, dict(own.inputs.get("before") or {}))
    made, field = _newest(f"{kind}_created", pk), OWNERS.get(kind)
    if made is None or field is None:
        return None
    values = dict(made.inputs.get("after") or {})
    owner = values.get(field)
    owners = _newest(f"{OWNER_KINDS[field]}_removed", owner) if isinstance(owner, int) else None
    return Removal(owners, made.subject, values, went_with=True) if owners is not None else None


def _newest(kind: str, pk: int) -> Decision | None:
    return Decision.objects.filter(kind=kind, outcome__id=pk).order_by("-at", "-id").first()
