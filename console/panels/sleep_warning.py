"""The confirmation before an instance is put to sleep: who else serves its model, and what each level keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from console.panels.role_change import counted_instances
from controller.models import Instance, ScalingPolicy
from controller.models.fleet import Role, Weights
from controller.selectors import catalogue
from controller.services.sleeping import LEVELS

FIRST = "It receives no new requests and finishes those it is running."
KEEPS = {
    1: "Then it frees its device memory and keeps its weights in host memory until it wakes.",
    2: "Then it frees its device memory and discards its weights. Waking reads them again {source}.",
}
READ_FROM = {"reference": "from a peer or from disk"}  # other backends read from disk only
SGLANG = {
    1: "SGLang requires --enable-weights-cpu-backup for this; otherwise the action fails.",
    2: "SGLang must run without --enable-weights-cpu-backup for this; otherwise the action fails.",
}


@dataclass(frozen=True, slots=True)
class SleepChoice:
    """One sleep level: its action, the text of its button, and the question to confirm."""

    action: str
    button: str
    asked: str


def sleep_choices(row: Instance) -> list[SleepChoice]:
    """Each sleep level with its effects. Two queries."""
    others = Counter(Role(role) for role in _serving_beside(row))
    policy = catalogue.scaling_policies().filter(model=row.model, role=row.role, enabled=True).first()
    left = [who_is_left(row, others, policy)]
    names = {1: ("sleep", "Sleep"), 2: ("sleep_2", "Sleep (level 2)")}
    return [SleepChoice(*names[level], " ".join([*left, *_effects(row, level)])) for level in LEVELS]


def _serving_beside(row: Instance) -> list[str]:
    """Roles of the other instances of its model that can serve now: not those that sleep or start."""
    wanted = catalogue.instances(live=True).filter(model=row.model, desired_state=Instance.Desired.RUNNING)
    there = wanted.filter(observed_state=Instance.Observed.READY, weights=Weights.PRESENT).exclude(pk=row.pk)
    return list(there.order_by().values_list("role", flat=True))


def who_is_left(row: Instance, others: Mapping[Role, int], policy: ScalingPolicy | None) -> str:
    """Who serves the model without `row`. `policy`: the enabled one of its model and role."""
    warning = _last_of_all(row, others)
    by_role = {role: others.get(role, 0) for role in Role if others.get(role, 0)}
    counts = ", ".join(f"{count} {role.value}" for role, count in by_role.items())
    remaining = counted_instances(sum(by_role.values()))
    said = [warning, f"{remaining} of {row.model.name} would remain{f' ({counts})' if by_role else ''}."]
    if policy is not None and others.get(Role(row.role), 0) < policy.min_instances:
        least = f"The scaling policy for {row.role} requires at least {policy.min_instances}"
        said.append(f"{least}, so the scaler wakes or starts one.")
    return " ".join(part for part in said if part)


def _last_of_all(row: Instance, others: Mapping[Role, int]) -> str:
    """A warning if no other instance can take over its stage; "" if one can."""
    model, prefills = row.model.name, others.get(Role.PREFILL, 0)
    if not sum(others.values()):
        return (
            f"Warning: this is the last serving instance of {model}. Until one wakes or starts, no request is served."
        )
    if not prefills + others.get(Role.COLLOCATED, 0):
        return f"Warning: this is the last instance of {model} that prefills. Without it, no request can start."
    if row.role == Role.DECODE and prefills and not others.get(Role.DECODE, 0):
        count = f"{prefills} prefill instance{'' if prefills == 1 else 's'}"
        return (
            f"Warning: this is the last decode instance for {count} of {model}. Their requests wait, and fail unless a "
            "decode or collocated instance takes them."
        )
    return ""


def _effects(row: Instance, level: int) -> list[str]:
    effect = KEEPS[level].format(source=READ_FROM.get(row.backend, "from disk"))
    return [FIRST, effect, *([SGLANG[level]] if row.backend == "sglang" else [])]
