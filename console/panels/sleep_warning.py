"""What is said before an instance is put to sleep: who else serves its model then, and what each level keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from console.panels.role_change import counted_instances
from controller.models import Instance, ScalingPolicy
from controller.models.fleet import Role, Weights
from controller.selectors import catalogue
from controller.services.sleeping import LEVELS

FIRST = "Nothing new is sent there; what runs may finish."
KEEPS = {
    1: "Then it gives up its device's memory and keeps its weights in the host's, until it is woken.",
    2: "Then it gives up its device's memory and its weights, no copy kept: to wake it they are read again, {source}.",
}
READ_FROM = {"reference": "from another engine's memory or the disk"}  # the others know the disk only
SGLANG = {
    1: "An SGLang server does so if it was started with --enable-weights-cpu-backup; the order fails otherwise.",
    2: "An SGLang server does so if it was started without --enable-weights-cpu-backup; the order fails otherwise.",
}


@dataclass(frozen=True, slots=True)
class SleepChoice:
    """One way to put it to sleep: the action that does it, its button, and what is asked before."""

    action: str
    button: str
    asked: str


def sleep_choices(row: Instance) -> list[SleepChoice]:
    """Each level with what would come of it. Two queries."""
    others = Counter(Role(role) for role in _serving_beside(row))
    policy = catalogue.scaling_policies().filter(model=row.model, role=row.role, enabled=True).first()
    left = [who_is_left(row, others, policy)]
    names = {1: ("sleep", "Put to sleep"), 2: ("sleep_2", "Sleep at level 2")}
    return [SleepChoice(*names[level], " ".join([*left, *_effects(row, level)])) for level in LEVELS]


def _serving_beside(row: Instance) -> list[str]:
    """Roles of the others of its model that take requests now: a sleeper or one that still starts is no help."""
    wanted = catalogue.instances(live=True).filter(model=row.model, desired_state=Instance.Desired.RUNNING)
    there = wanted.filter(observed_state=Instance.Observed.READY, weights=Weights.PRESENT).exclude(pk=row.pk)
    return list(there.order_by().values_list("role", flat=True))


def who_is_left(row: Instance, others: Mapping[Role, int], policy: ScalingPolicy | None) -> str:
    """`policy`: of its model and role, if one is on."""
    warning = _last_of_all(row, others)
    apart = {role: others.get(role, 0) for role in Role if others.get(role, 0)}
    counts = ", ".join(f"{count} {role.value}" for role, count in apart.items())
    beside = counted_instances(sum(apart.values()))
    said = [warning, f"{beside} of {row.model.name} would serve beside it{f' ({counts})' if apart else ''}."]
    if policy is not None and others.get(Role(row.role), 0) < policy.min_instances:
        said.append(f"The scaling policy of {row.role} wants at least {policy.min_instances}: it wakes or starts one.")
    return " ".join(part for part in said if part)


def _last_of_all(row: Instance, others: Mapping[Role, int]) -> str:
    """Of what every request needs, or every one that is prefilled apart; "" where somebody else does it."""
    model, prefills = row.model.name, others.get(Role.PREFILL, 0)
    if not sum(others.values()):
        return f"Careful: it is the last instance of {model} that serves. Until one is woken or started, nothing is."
    if not prefills + others.get(Role.COLLOCATED, 0):
        return f"Careful: it is the last instance of {model} that prefills. Until another does, no request can begin."
    if row.role == Role.DECODE and prefills and not others.get(Role.DECODE, 0):
        apart = counted_instances(prefills)
        return (
            f"Careful: it is the last that decodes for {apart} of {model} that only prefill. What they prefill waits, "
            "and is given up unless another decodes it or does both."
        )
    return ""


def _effects(row: Instance, level: int) -> list[str]:
    effect = KEEPS[level].format(source=READ_FROM.get(row.backend, "from the disk"))
    return [FIRST, effect, *([SGLANG[level]] if row.backend == "sglang" else [])]
