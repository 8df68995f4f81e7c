"""Role transitions: an instance of the stage that has too little to do joins the one that has too much.

HyperFlexis sec. 6 sizes prefill and decode apart and reassigns workers across roles when their demand diverges, which
avoids starting one instance while another is stopped. The paper gives no rule. Ours: when a stage's scaler asks for an
instance, the other stage gives one that it could have spared (`spare`, the test for giving it up at all) all through
its own hold, `sustain_s`: a moment's calm at one stage while work has yet to reach it must not move an instance. If it
can spare none a new instance is started. Only what can serve the other stage is given (`Member.turns`), whoever runs
it. What runs there ends there: where a role is routing the new one holds at once, an engine that must be told is
emptied first. Cost: O(instances).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from controller.core.decisions import Decision, Figure
from controller.scale.config import ScalingConfig
from controller.scale.load import FleetObservation, Member


class SwitchRole(NamedTuple):
    """From now on only requests of `role`'s stage are sent to the instance; what it has it finishes."""

    instance_id: str
    role: str


def spare(config: ScalingConfig, seen: FleetObservation) -> Member | None:
    """The instance that a stage can do without: the one with least to do, if the rest stays below `upper`.

    None while one of its instances starts or drains (the last change has not shown yet), at the minimum, on stale
    telemetry, and where none can serve the other stage.
    """
    ready = seen.having("ready")
    if seen.stale or len(ready) < len(seen.members) or len(ready) <= max(1, config.min_instances):
        return None
    if seen.load * len(ready) / (len(ready) - 1) > config.upper:
        return None
    able = [member for member in ready if member.turns]
    return min(able, key=lambda member: (member.outstanding, member.utilisation, member.id), default=None)


def spare_since(before: float | None, config: ScalingConfig, seen: FleetObservation, now: float) -> float | None:
    """Since when the stage could do without an instance, all the time; None: it cannot now."""
    if spare(config, seen) is None:
        return None
    return now if before is None else min(before, now)


def switch(
    giving: ScalingConfig,
    giving_seen: FleetObservation,
    since: float | None,
    wanting: ScalingConfig,
    wanting_load: float,
    now: float,
) -> tuple[SwitchRole, Decision] | None:
    """The role transition that `wanting` gets from `giving`, and its Decision; None if it can spare none.

    `since`: what `spare_since` said at the last look.
    """
    member = spare(giving, giving_seen)
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
