"""Decisions as sentences: who did what to whom, and why. The figures follow the sentence, not inside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from console.words import reason_in_words
from controller.models import Decision

# Verbs of known kinds; an unknown kind reads as its own words.
KINDS: dict[str, str] = {
    "scale_out": "scaled out",
    "scale_in": "scaled in",
    "scale_hold": "left the fleet as it is for",
    "instance_replaced": "replaced instance",
    "instance_started": "started instance",
    "instance_stopped": "stopped instance",
    "instance_drained": "drained instance",
    "refusals": "refused requests of",
    "refuse": "refused requests of",
    "expire": "let requests expire for",
    "queue_cancel": "cancelled queued requests:",
    "queue_reprioritise": "changed the priority of queued requests:",
    "queue_pause": "paused queued requests:",
    "queue_resume": "resumed queued requests:",
    "access_refused": "was refused",
}
CHANGES = {"created": "created", "updated": "changed", "removed": "removed", "revoked": "revoked"}
TYPES = {
    "slo_class": "SLO class",
    "priority_mapping": "the priority mapping of",
    "api_key": "API key",
    "scaling_policy": "scaling policy",
    "served_model": "model",
}


def verb(kind: str, subject_type: str) -> str:
    """`slo_class.updated` or `slo_class_updated` is "changed SLO class"; `scale_out` is "scaled out"."""
    if kind in KINDS:
        return KINDS[kind]
    for ending, done in CHANGES.items():
        if kind.endswith(f"_{ending}"):
            return f"{done} {TYPES.get(subject_type, subject_type.replace('_', ' '))}"
    return kind.replace("_", " ").replace(".", " ")


def sentence(decision: Decision) -> str:
    what = f"{decision.actor} {verb(decision.kind, decision.subject_type)} {decision.subject or 'all tenants'}"
    changed = changes(decision.inputs)
    if changed:
        return f"{what}: {'; '.join(changed)}"
    says_nothing_new = decision.reason.endswith(tuple(CHANGES))  # "person_created" beside "created SLO class"
    return what if says_nothing_new or not decision.reason else f"{what}: {reason_in_words(decision.reason)}"


def changes(inputs: Mapping[str, Any]) -> list[str]:
    """What a person changed, from the `before` and `after` of the record: "ttft_s 0.5 to 0.4"."""
    before, after = inputs.get("before"), inputs.get("after")
    if not isinstance(before, dict) or not isinstance(after, dict):
        return []
    names = [
        name
        for name in after
        if name in before and before[name] != after[name] and name not in ("version", "updated_at")
    ]
    return [f"{name} {_short(before[name])} to {_short(after[name])}" for name in names]


def _short(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else "none" if value is None else str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def scalar_figures(values: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers, words and flags; nested objects and row numbers are for the audit's detail, not for one line."""
    return {
        name: value
        for name, value in values.items()
        if not isinstance(value, dict | list) and name not in ("id", "version")
    }


def as_item(decision: Decision) -> dict[str, Any]:
    """One line of the live list; the same shape as the live messages."""
    return {
        "id": str(decision.pk),
        "at": decision.at.timestamp(),
        "kind": decision.kind,
        "actor": decision.actor,
        "subject": decision.subject,
        "reason": decision.reason,
        "sentence": sentence(decision),
        "figures": scalar_figures({**decision.inputs, **decision.outcome}),
    }
