"""Effects of changing an instance's role, in sentences for the confirmation page, or why it is not possible."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from django.utils import timezone

from controller.models import Instance, ScalingPolicy
from controller.models.fleet import Role
from controller.services.fleet.instances import ONE_SIDED
from controller.services.fleet.role_switches import CANNOT_DO_BOTH, must_be_told

STAGES = {
    Role.COLLOCATED: "It prefills and decodes: requests stay on it from prompt to last token.",
    Role.PREFILL: "It only prefills: the KV cache of each request is then transferred to a decode instance.",
    Role.DECODE: "It only decodes: it receives requests with the KV cache that a prefill instance computed.",
}


ROUTED = "Running requests finish on it. Gateways use the new role within a second. You can change it back."
TOLD = (
    "It receives no new requests until its running requests finish and the engine has switched. If the engine cannot "
    "switch, it keeps its current role."
)
NOT_KNOWN = (
    "A vLLM server must be started with a KV connector for both roles (kv_both). The spec of this instance does not "
    "name it (kv_role), so the scaler will not change its role."
)


@dataclass(frozen=True, slots=True)
class Prospect:
    """One possible role. `refused`: why the change is not possible; `effects` is then empty."""

    role: Role
    effects: list[str] = field(default_factory=list)
    refused: str = ""


def prospects(
    row: Instance, others: Iterable[Instance], policies: Mapping[str, ScalingPolicy], disaggregates: bool
) -> list[Prospect]:
    """Each role but the current one. `others`: running instances of the same model.

    `policies`: enabled ones, by role. `disaggregates`: its backend can prefill and decode on separate instances.
    """
    counts = Counter(Role(each.role) for each in others if each.pk != row.pk)
    return [_prospect(row, role, counts, policies, disaggregates) for role in Role if role != row.role]


def _prospect(
    row: Instance, role: Role, counts: Counter[Role], policies: Mapping[str, ScalingPolicy], disaggregates: bool
) -> Prospect:
    refused = _refused(row, role, counts, disaggregates)
    if refused:
        return Prospect(role, refused=refused)
    effects = [STAGES[role], TOLD if must_be_told(row) else ROUTED]
    if role == Role.PREFILL:
        effects.append(f"{counted_instances(counts[Role.DECODE])} of {row.model.name} can decode what it prefills.")
    if role == Role.DECODE:
        feeding = counts[Role.PREFILL]
        effects.append(
            f"{counted_instances(feeding)} of {row.model.name} can send requests to it."
            if feeding
            else f"{row.model.name} has no prefill instance yet, so it receives no requests until it has one."
        )
    if role != Role.COLLOCATED and row.backend == "vllm" and not row.kv_role:
        effects.append(NOT_KNOWN)
    effects += _scaling(row, role, counts, policies)
    return Prospect(role, effects)


def _refused(row: Instance, role: Role, counts: Counter[Role], disaggregates: bool) -> str:
    return _engine_cannot(row, role, disaggregates) or _stranded(row, counts + Counter({role: 1}))


def _engine_cannot(row: Instance, role: Role, disaggregates: bool) -> str:
    if row.desired_state == Instance.Desired.STOPPED:
        return "The instance is stopped or stopping. The role of a stopped instance cannot change."
    if role != Role.COLLOCATED and not disaggregates:
        return f"The {row.backend} backend does not support disaggregation."
    if ONE_SIDED.get(row.kv_role) == role:
        return f"It was started with kv_role {row.kv_role}, so it cannot {role}."
    if row.backend in CANNOT_DO_BOTH and Role.COLLOCATED in (row.role, role):
        return f"SGLang cannot switch from {row.role} to {role} while running, only between prefill and decode."
    return ""


def _stranded(row: Instance, after: Counter[Role]) -> str:
    """The remaining instances must be able to prefill every request, and to decode every one that is disaggregated."""
    model = row.model.name
    if not after[Role.PREFILL] + after[Role.COLLOCATED]:
        return f"This is the last instance of {model} that prefills. Without it, no request can start."
    if after[Role.DECODE] or not after[Role.PREFILL]:
        return ""
    if row.role == Role.DECODE:
        prefill = f"{after[Role.PREFILL]} prefill instance{'' if after[Role.PREFILL] == 1 else 's'}"
        return f"This is the last decode instance for {prefill} of {model}. Change those first."
    return f"{model} has no decode instance that could continue its requests. Change another instance to decode first."


def _scaling(row: Instance, role: Role, counts: Counter[Role], policies: Mapping[str, ScalingPolicy]) -> list[str]:
    """What the scaler will do: it counts the instances of each role separately."""
    said = []
    left, taken = policies.get(row.role), policies.get(role)
    now = timezone.now()
    least_instances = 0 if left is None else left.bounds(now)[0]
    if counts[Role(row.role)] < least_instances:
        least = f"The scaling policy for {row.role} requires at least {least_instances}"
        said.append(f"{least}, so the scaler starts or switches another.")
    if taken is None:
        said.append(f"{row.model.name} has no scaling policy for {role.value} instances.")
    elif counts[role] + 1 > (most := taken.bounds(now)[1]):
        said.append(f"The scaling policy for {role.value} allows at most {most}, so the scaler drains one.")
    return said


def counted_instances(count: int) -> str:
    return "1 instance" if count == 1 else f"{count} instances"
