"""What an operator can do with an instance now, and the question before it is done.

Before an instance is put to sleep, that names who else serves its model and what each level keeps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from django.utils import timezone

from console.panels.role_change import counted_instances
from controller.models import Instance, ScalingPolicy
from controller.models.fleet import Role, Weights
from controller.selectors import catalogue
from controller.services.fleet.actions import weights_load_order
from controller.services.fleet.instances import instance_drain, instance_stop, instance_undrain
from controller.services.fleet.sleeping import LEVELS, can_sleep, sleep_order, wake_order, without_sleep_mode

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


class InstanceAction(NamedTuple):
    """An action of an operator. `done`: the message afterwards, which must stay true once the action has ended."""

    service: Callable[..., Any]
    done: str
    button: str = ""
    question: str = ""  # asked before it is run; {id}: of the instance
    effect: str = ""


class ActionChoice(NamedTuple):
    """A button of the instance's page with the question to confirm."""

    action: str
    button: str
    question: str
    confirm: str
    effect: str


# A registered server is not ours to stop: only the requests to it end.
STOP_SENDING = InstanceAction(
    instance_stop,
    "receives no more requests. Its server keeps running.",
    "Stop sending",
    "Stop sending requests to {id}?",
    "Slackline did not start this server and does not stop it: it only stops sending requests to it. Requests running "
    "there are cut off; to let them finish, drain it first. To use the server again, register it again.",
)


SLEEP_BUTTONS = {"sleep": "Sleep", "sleep_2": "Sleep (level 2)"}  # by level
# Sleep has its effects from `sleep_choices`: what it does to the fleet depends on the other instances.
ACTIONS: dict[str, InstanceAction] = {
    "load": InstanceAction(
        weights_load_order,
        "is loading its weights. It serves requests once they are loaded.",
        "Load weights",
        "Load the weights of {id}?",
        "The weights are loaded from the nearest source that has them: a peer, the host copy or the disk. It serves "
        "requests once they are loaded.",
    ),
    "sleep": InstanceAction(
        sleep_order, "will sleep once its running requests finish. Its weights stay in host memory."
    ),
    "sleep_2": InstanceAction(
        partial(sleep_order, level=2), "will sleep once its running requests finish. Its weights are discarded."
    ),
    "wake": InstanceAction(
        wake_order,
        "is waking up. It serves requests once its weights are loaded.",
        "Wake",
        "Wake {id}?",
        "Its weights are loaded back to the device. Then it serves requests.",
    ),
    "drain": InstanceAction(
        instance_drain,
        "is draining: it receives no new requests.",
        "Drain",
        "Drain {id}?",
        "It receives no new requests and finishes those it is running. You can cancel the drain.",
    ),
    "undrain": InstanceAction(
        instance_undrain,
        "receives requests again.",
        "Cancel drain",
        "Cancel the drain of {id}?",
        "It receives new requests within a second.",
    ),
    "stop": InstanceAction(
        instance_stop,
        "is stopping.",
        "Stop",
        "Stop {id} now?",
        "Running requests are cut off. A stopped instance cannot be started again. To let requests finish, drain it "
        "first.",
    ),
}


def action_of(name: str, row: Instance) -> InstanceAction | None:
    """None if there is no such action."""
    return STOP_SENDING if name == "stop" and not row.abilities.stops else ACTIONS.get(name)


def actions_for(row: Instance) -> list[str]:
    """Actions possible now. A stopped instance stays stopped; only a warm one waits for an order to load weights."""
    by_desired = {Instance.Desired.RUNNING: ["drain", "stop"], Instance.Desired.DRAINING: ["undrain", "stop"]}
    found = by_desired.get(Instance.Desired(row.desired_state), [])
    first = {"warm": ["load"], "asleep": ["wake"]}.get(row.shown_state, ["sleep"] if can_sleep(row) else [])
    return [*first, *found]


def choices(row: Instance) -> list[ActionChoice]:
    """The actions possible now as buttons; sleep has one for each level."""
    found = []
    for name in actions_for(row):
        action = action_of(name, row) or ACTIONS[name]
        if name == "sleep":
            found += sleep_choices(row)
        else:
            question = action.question.format(id=row.pk)
            found.append(ActionChoice(name, action.button, question, action.button, action.effect))
    return found


def sleep_choices(row: Instance) -> list[ActionChoice]:
    """Each sleep level with its effects, without those that its engine was found to have no sleep mode for. Three
    queries."""
    without = {level for _, level in without_sleep_mode([row])}
    others = Counter(Role(role) for role in _serving_beside(row))
    policy = catalogue.scaling_policies().filter(model=row.model, role=row.role, enabled=True).first()
    left = [who_is_left(row, others, policy)]
    names = dict(zip(LEVELS, SLEEP_BUTTONS.items(), strict=True))
    question = f"Put {row.pk} to sleep?"
    return [
        ActionChoice(*names[level], question, "Sleep", " ".join([*left, *_effects(row, level)]))
        for level in LEVELS
        if level not in without
    ]


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
    least_instances = 0 if policy is None else policy.bounds(timezone.now())[0]
    if others.get(Role(row.role), 0) < least_instances:
        least = f"The scaling policy for {row.role} requires at least {least_instances}"
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
