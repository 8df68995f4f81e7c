"""What would come of giving an instance another role: in sentences before it is done, or why it cannot be done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from controller.models import Instance, ScalingPolicy
from controller.models.fleet import Role
from controller.services.instances import ONE_SIDED
from controller.services.role_switches import SWITCHED

STAGES = {
    Role.COLLOCATED: "It prefills and decodes: a request stays there from its prompt to its last token.",
    Role.PREFILL: "It only prefills: each request's KV cache then moves to an instance that decodes.",
    Role.DECODE: "It only decodes: requests come to it with the KV cache that another instance computed.",
}


ROUTED = "What runs there ends where it is. Gateways know within a second; it can be taken back."
TOLD = (
    "Nothing new is sent there until what runs there has ended and its engine has switched; its prefix cache is lost. "
    "The action role_switch ends with a decision; what it could not switch serves on as before."
)


NOT_KNOWN = (
    "A vLLM server must have been started with a KV connector for both sides (kv_both). Its spec does not say that it "
    "was (kv_role), so the scaler leaves its role alone."
)


@dataclass(frozen=True, slots=True)
class Prospect:
    """One role an instance could have. `refused` says why not; then nothing else counts."""

    role: Role
    effects: list[str] = field(default_factory=list)
    refused: str = ""


def prospects(
    row: Instance, others: Iterable[Instance], policies: Mapping[str, ScalingPolicy], handover: bool
) -> list[Prospect]:
    """Each role but the present one. `others`: of the same model, wanted. `handover`: its engine can do stages apart.

    `policies` by role, those that are enabled.
    """
    counts = Counter(Role(each.role) for each in others if each.pk != row.pk)
    return [_prospect(row, role, counts, policies, handover) for role in Role if role != row.role]


def _prospect(
    row: Instance, role: Role, counts: Counter[Role], policies: Mapping[str, ScalingPolicy], handover: bool
) -> Prospect:
    refused = _refused(row, role, counts, handover)
    if refused:
        return Prospect(role, refused=refused)
    effects = [STAGES[role], TOLD if row.backend in SWITCHED else ROUTED]
    if role == Role.PREFILL:
        effects.append(
            f"{counted_instances(counts[Role.DECODE])} of {row.model.name} would take what it has prefilled."
        )
    if role == Role.DECODE:
        feeding = counts[Role.PREFILL]
        effects.append(
            f"{counted_instances(feeding)} of {row.model.name} would hand requests over to it."
            if feeding
            else f"No instance of {row.model.name} only prefills yet: nothing comes to it until one does."
        )
    if role != Role.COLLOCATED and row.backend == "vllm" and not row.kv_role:
        effects.append(NOT_KNOWN)
    effects += _scaling(row, role, counts, policies)
    return Prospect(role, effects)


def _refused(row: Instance, role: Role, counts: Counter[Role], handover: bool) -> str:
    return _engine_cannot(row, role, handover) or _stranded(row, counts + Counter({role: 1}))


def _engine_cannot(row: Instance, role: Role, handover: bool) -> str:
    if row.desired_state == Instance.Desired.STOPPED:
        return "It is stopped, or about to be: a stopped instance stays as it was."
    if role != Role.COLLOCATED and not handover:
        return f"A {row.backend} engine cannot hand requests over."
    if ONE_SIDED.get(row.kv_role) == role:
        return f"It was started with kv_role {row.kv_role}: it cannot {role}."
    if row.backend in SWITCHED and Role.COLLOCATED in (row.role, role):
        return (
            f"SGLang cannot switch from {row.role} to {role} while it runs: its switch knows prefill and decode only."
        )
    return ""


def _stranded(row: Instance, after: Counter[Role]) -> str:
    """What is left must be able to begin every request, and to end every one that is prefilled apart."""
    model = row.model.name
    if not after[Role.PREFILL] + after[Role.COLLOCATED]:
        return f"It is the last instance of {model} that prefills: nothing could begin any more."
    if after[Role.DECODE] or not after[Role.PREFILL]:
        return ""
    if row.role == Role.DECODE:
        apart = counted_instances(after[Role.PREFILL])
        return f"It is the last that decodes for {apart} of {model} that only prefill: change those first."
    return f"No instance of {model} decodes for others: what it prefilled could not go on. Make one decode first."


def _scaling(row: Instance, role: Role, counts: Counter[Role], policies: Mapping[str, ScalingPolicy]) -> list[str]:
    """What the scaler makes of it: it counts each role by itself."""
    said = []
    left, taken = policies.get(row.role), policies.get(role)
    if left is not None and counts[Role(row.role)] < left.min_instances:
        said.append(
            f"The scaling policy of {row.role} wants at least {left.min_instances}: it starts or turns another one."
        )
    if taken is None:
        said.append(f"No scaling policy looks after {role.value} instances of {row.model.name}.")
    elif counts[role] + 1 > taken.max_instances:
        said.append(f"The scaling policy of {role.value} allows {taken.max_instances}: it drains one too many.")
    return said


def counted_instances(count: int) -> str:
    return "1 instance" if count == 1 else f"{count} instances"
