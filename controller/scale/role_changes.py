"""Role changes: an instance of the stage that has too little to do joins the stage that has too much.

HyperFlexis (sec. 6) scales prefill and decode independently and reassigns instances across roles when their demand
diverges, which avoids starting one instance while another is stopped. The paper gives no rule. Ours: when a stage's
scaler asks for an instance, the other stage gives one if it could have done without it (`instance_to_give`) for the
whole of its own hold, `sustain_s`. A short calm at one stage, while work has yet to reach it, must not move an
instance. Only an instance that can serve both stages is given (`Member.takes_both_roles`), whoever runs it.

Requests that run there end there. Where a role only changes routing, the new role takes effect at once; an engine that
has to be told of its role is emptied first. Cost: O(instances).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from controller.core.decisions import Decision, Figure
from controller.core.load import FULL
from controller.scale.config import ScalingConfig
from controller.scale.load import FleetObservation, Member


class SwitchRole(NamedTuple):
    """Send only requests of `role`'s stage to the instance from now on; what runs there finishes."""

    instance_id: str
    role: str


def instance_to_give(config: ScalingConfig, seen: FleetObservation) -> Member | None:
    """The instance with the least to do, if the stage stays at or below `upper` without it, and not more than full.

    None is given that alone can keep the targets of recent requests. None while one of its instances starts or drains
    (the last change has not shown yet), at the minimum, on stale telemetry, and where no instance can serve the other
    stage.
    """
    ready = seen.having("ready")
    if seen.stale or len(ready) < len(seen.members) or len(ready) <= max(1, config.min_instances):
        return None
    able = [member for member in ready if member.takes_both_roles and not member.needed]
    able = [member for member in able if seen.load_without(member) <= min(config.upper, FULL)]
    return min(able, key=lambda member: (member.outstanding, member.utilisation, member.id), default=None)


def spare_since(before: float | None, config: ScalingConfig, seen: FleetObservation, now: float) -> float | None:
    """Since when, without a break, the stage could have given an instance; None if it cannot give one now."""
    if instance_to_give(config, seen) is None:
        return None
    return now if before is None else min(before, now)


def role_change(
    giving: ScalingConfig,
    giving_seen: FleetObservation,
    since: float | None,
    wanting: ScalingConfig,
    wanting_load: float,
    now: float,
) -> tuple[SwitchRole, Decision] | None:
    """The instance that `wanting` gets from `giving`, with its Decision; None if `giving` can spare none.

    `since`: what `spare_since` returned at the giving stage's last tick. `wanting_load` is recorded, not judged: the
    Scaler has decided already that the stage needs an instance.
    """
    member = instance_to_give(giving, giving_seen)
    if member is None or since is None or now - since + giving.interval_s < giving.sustain_s:
        return None
    figures: Mapping[str, Figure] = {
        **giving_seen.figures(),
        "from": giving.role,
        "to": wanting.role,
        "wanting_load": round(wanting_load, 4) if wanting_load < float("inf") else None,
        "instance": member.id,
    }
    action = SwitchRole(member.id, wanting.role)
    return action, Decision("role_change", "demand_diverged", f"{giving.model}/{giving.role}", now, figures)
