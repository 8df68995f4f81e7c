"""The provisioners and what each of them can do. A provisioner starts and stops engines on a kind of host, or only
observes engines that somebody else runs.

This is the only place that names them. All other code asks for an ability, so that a new provisioner needs an entry
here and its implementation in `workers/provisioners`, which registers itself under the same name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from controller.core.errors import UnknownName
from controller.core.registry import Registry


class Hosts(StrEnum):
    """Where its engines run: on the machine of the workers, wherever their owner runs them, or on the nodes of a
    cluster that places them."""

    THIS_MACHINE = "this_machine"
    ANY = "any"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a provisioner can do.

    `starts`: it can start another engine like an existing one, so that the scaler and replacements use it. `stops`: a
    stop ends the engine itself. `logs`: it can show what an engine printed. `devices`: it gives an engine the devices
    that the instance holds. `hosts`: where its engines run. `registers`: the URL of an engine is registered by a
    person. `observe_s`: how long one look may take; later, its instances count as last seen.
    """

    starts: bool = False
    stops: bool = False
    logs: bool = False
    devices: bool = False
    hosts: Hosts = Hosts.ANY
    registers: bool = False
    observe_s: float = 2.0


PROCESS = "process"  # engines that the supervisor of `make up` starts on its machine
STATIC = "static"  # endpoints that a person registered
RAY = "ray"  # jobs of Ray clusters that exist
UNKNOWN = Abilities()

DECLARED: Registry[Abilities] = Registry("provisioner")
DECLARED.register(PROCESS)(
    Abilities(starts=True, stops=True, logs=True, devices=True, hosts=Hosts.THIS_MACHINE, observe_s=2.0)
)
DECLARED.register(STATIC)(Abilities(registers=True, observe_s=3.0))
DECLARED.register(RAY)(Abilities(starts=True, stops=True, logs=True, hosts=Hosts.CLUSTER, observe_s=4.5))


def source_of(name: str, cluster: str) -> str:
    """What is observed on its own: a provisioner, or one of its clusters (`ray/default`)."""
    return f"{name}/{cluster}" if abilities(name).hosts == Hosts.CLUSTER else name


def abilities(name: str) -> Abilities:
    """Those of the provisioner, or of the provisioner of a source (`source_of`); none for a name that this version does
    not know."""
    try:
        return DECLARED[name.partition("/")[0]]
    except UnknownName:
        return UNKNOWN


def named(able: Callable[[Abilities], bool]) -> tuple[str, ...]:
    """Names of the provisioners with these abilities, sorted."""
    return tuple(name for name in DECLARED if able(DECLARED[name]))


def starters() -> tuple[str, ...]:
    """Names of the provisioners that start engines."""
    return named(lambda each: each.starts)
