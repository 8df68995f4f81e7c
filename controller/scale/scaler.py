"""The threshold scaler: HyperFlexis (sec. 6, Alg. 3), with worked example H11.

Load above `upper` adds an instance; load below `lower` for `sustain_s` removes one. Both at once are impossible. The
hold restarts after a decision and after a tick that is not below `lower`. The scaler decides how many instances there
are; which ones come and go is the capacity plan's part (`controller.scale.capacity_plan`).

Ours, where the paper says nothing:

- Bounds. A cool-down after each change, during which nothing is added. Nothing is added either while the instances that
  still start would carry the load.
- Scale-in drains before it stops, one instance at a time, the one with the least to do. A drain is taken back before
  anything is started.
- An instance is removed only after load was low for as long as another one takes to start, where that is longer than
  `sustain_s` (decision 208): a lull that ends before pays for a start that it did not need.
- An instance that alone can keep the targets of recent requests is not removed for low load (decisions 292, 296). Its
  drain is taken back, it is woken if it sleeps (decision 297), and one like it is started if it was stopped (303).
- An instance is removed only if the rest would stay below `upper` with its load, and not more than full where `upper`
  tolerates that. What gateways have not counted for long yet is not taken for low load (decision 309). The last one
  (`min_instances` 0) is removed if no requests arrive: with none left the same arrivals would be overload, and the
  first of them would start an instance again.

A tick stands for the interval that ends with it, so `sustain_s` = 3 at an interval of 1 s means three ticks. There is a
Decision for each tick that acts and for each change of mind (it would act but may not; the telemetry is stale; the need
has passed). Cost: O(instances) a tick.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from controller.core.decisions import Decision, Figure
from controller.core.load import FULL
from controller.core.staleness import STALE_PERIODS
from controller.scale.config import ScalingConfig
from controller.scale.load import FleetObservation, Member
from controller.scale.role_changes import spare_since

STEADY = "steady"
MOST_BELIEVED = 2.0  # bounds growth: at most this over `upper` times what serves, until the first of it serves too
_EPSILON_S = 0.05  # jitter of Celery beat must not cost a whole tick


class ScaleOut(NamedTuple):
    """The stage needs this many more instances. `needed`: one like a stopped instance that recent requests need."""

    instances: int
    needed: bool = False


class Drain(NamedTuple):
    """The stage can do without this instance. Send nothing new there, and stop it once it is empty."""

    instance_id: str


class Undrain(NamedTuple):
    """Take the drain of this instance back."""

    instance_id: str


ScaleAction = ScaleOut | Drain | Undrain


@dataclass(frozen=True, slots=True)
class ScalerMemory:
    """What one tick hands to the next, as plain JSON values. Times on the caller's clock, one clock for all ticks."""

    ticks: int = 0
    seen_at: float | None = None  # last tick whose telemetry was not stale
    low_since: float | None = None
    low_peak: float = 0.0  # highest load since then
    changed_at: float | None = None  # last action
    mind: str = STEADY
    calm_since: float | None = None  # since when it has been steady again, while `mind` is still the old one
    load: float | None = None
    spare_since: float | None = None  # since when it could have given an instance to the other stage

    def after_giving(self, now: float) -> ScalerMemory:
        """The memory of a stage that has just given an instance to the other: its hold and its cool-down start over, as
        after a change of its own, so that what remains is judged before it gives or removes another."""
        return replace(self, low_since=None, changed_at=now, spare_since=None)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> ScalerMemory:
        return cls(**{name: raw[name] for name in cls.__dataclass_fields__ if name in raw})


class _Choice(NamedTuple):
    mind: str
    actions: list[ScaleAction]
    kind: str
    rejected: Mapping[str, Figure] = {}


class Scaler:
    """One decision method. All memory is in the state that it is given and returns."""

    def decide(
        self, config: ScalingConfig, state: ScalerMemory, seen: FleetObservation, now: float
    ) -> tuple[ScalerMemory, list[ScaleAction], Decision | None]:
        state = _without_future(replace(state, ticks=state.ticks + 1), now)
        state = replace(state, spare_since=spare_since(state.spare_since, config, seen, now))
        if not seen.stale:
            state = _watched(config, state, seen, now)
        choice = _judge(config, state, seen, now)
        if choice.actions:
            acted = replace(state, low_since=None, changed_at=now, mind=STEADY, calm_since=None)
            return acted, choice.actions, _decision(config, state, seen, choice, now)
        state, changed = _change_mind(config, state, choice.mind, now)
        return state, [], _decision(config, state, seen, choice, now) if changed else None


def _watched(config: ScalingConfig, state: ScalerMemory, seen: FleetObservation, now: float) -> ScalerMemory:
    """The hold counts observed time only: a gap (no telemetry, or the system was off) restarts it."""
    gap = state.seen_at is None or now - state.seen_at > STALE_PERIODS * config.interval_s
    low_since = None if gap or state.low_since is None else state.low_since
    # Clients that caused a start from zero come back once an instance serves; until then a low load means nothing.
    from_none = config.min_instances == 0 and not seen.having("ready")
    if seen.load >= config.lower or from_none:
        low_since = None
    elif low_since is None:
        low_since = now
    load = round(seen.load, 4) if math.isfinite(seen.load) else None
    low_peak = 0.0 if low_since is None or load is None else max(load, state.low_peak if low_since < now else 0.0)
    return replace(state, seen_at=now, low_since=low_since, low_peak=low_peak, load=load)


def _judge(config: ScalingConfig, state: ScalerMemory, seen: FleetObservation, now: float) -> _Choice:
    if seen.stale:
        return _Choice("telemetry_stale", [], "scale_hold")
    count = len(seen.members) - len(seen.having("draining"))
    if count < config.min_instances:
        return _start("below_min", config.min_instances - count, seen)
    if count > config.max_instances:
        return _drain(seen, "above_max")
    if seen.load > config.upper:
        return _out(config, state, seen, count, now)
    if count < config.max_instances and (choice := _needed(config, state, seen, now)) is not None:
        return choice
    return _at_ease(config, state, seen, count, now)


def _needed(config: ScalingConfig, state: ScalerMemory, seen: FleetObservation, now: float) -> _Choice | None:
    """Bring one back that recent requests need."""
    if draining := [member for member in seen.having("draining") if member.needed]:
        return _Choice("needed_draining", [Undrain(min(draining, key=_best_kept).id)], "scale_out")
    if _settling(config, state, seen, now):
        return None
    if seen.needed_asleep:
        return _start("needed_asleep", 1, seen)
    return _Choice("needed_stopped", [ScaleOut(1, needed=True)], "scale_out") if seen.needed_stopped else None


def _at_ease(config: ScalingConfig, state: ScalerMemory, seen: FleetObservation, count: int, now: float) -> _Choice:
    """Nothing has to be added."""
    hold_s = max(config.sustain_s, seen.start_s or 0.0, _EPSILON_S) - _EPSILON_S
    low = _low_for(config, state, now) >= hold_s and seen.whole_load < config.lower
    if low and count > config.min_instances:
        return _in(config, state, seen, count, now)
    return _Choice(STEADY, [], "scale_hold")


def _out(config: ScalingConfig, state: ScalerMemory, seen: FleetObservation, count: int, now: float) -> _Choice:
    if count >= config.max_instances:
        return _Choice("at_max", [], "scale_hold")
    if draining := seen.having("draining"):  # faster and cheaper than a new instance, so no cool-down applies
        kept = min(draining, key=_best_kept)
        return _Choice("load_above_upper", [Undrain(kept.id)], "scale_out")
    if _cooldown_left(config, state, now) > 0 or _starting_suffice(config, seen):
        return _Choice("settling", [], "scale_hold")
    return _start("load_above_upper", 1, seen)


def _settling(config: ScalingConfig, state: ScalerMemory, seen: FleetObservation, now: float) -> bool:
    """Whether what was added last does not serve yet, or could not show yet."""
    return bool(seen.having("starting")) or _cooldown_left(config, state, now) > 0


def _starting_suffice(config: ScalingConfig, seen: FleetObservation) -> bool:
    """Whether the load would be at most `upper` once the instances that start share it. The load is believed up to
    MOST_BELIEVED, since a long wait says that capacity is missing, not how much."""
    ready, starting = len(seen.having("ready")), len(seen.having("starting"))
    return starting > 0 and min(seen.load, MOST_BELIEVED) * ready <= config.upper * (ready + starting)


def _start(reason: str, instances: int, seen: FleetObservation) -> _Choice:
    if not seen.startable:
        return _Choice(seen.held_by, [], "scale_hold")
    return _Choice(reason, [ScaleOut(instances)], "scale_out")


def _in(config: ScalingConfig, state: ScalerMemory, seen: FleetObservation, count: int, now: float) -> _Choice:
    if seen.having("draining") or _settling(config, state, seen, now):
        return _Choice("settling", [], "scale_hold")
    if count <= 1 and seen.arrival_rate > 0:
        return _Choice("rest_would_exceed_upper", [], "scale_hold")
    return _drain(seen, "load_below_lower", min(config.upper, FULL) if count > 1 else math.inf, state.low_peak)


def _drain(seen: FleetObservation, reason: str, most: float = math.inf, peak: float = 0.0) -> _Choice:
    """The instance with the least to do, one that still starts before any that serves. Fixed instances stay, and those
    that are needed leave last. `most`: load that the rest may have; `peak`: the highest load of late."""
    candidates = [member for member in seen.members if member.state != "draining" and not member.fixed]
    if candidates and math.isfinite(most):
        candidates = [member for member in candidates if seen.load_without(member, peak) <= most]
        if not candidates:
            return _Choice("rest_would_exceed_upper", [], "scale_hold")
    if reason == "load_below_lower" and candidates and all(member.needed for member in candidates):
        return _Choice("needed_for_targets", [], "scale_hold")
    if not candidates:
        return _Choice(STEADY if reason == "load_below_lower" else "nothing_to_stop", [], "scale_hold")
    victim = min(candidates, key=_least_loss)
    rejected: dict[str, Figure] = {m.id: m.outstanding for m in candidates if m.id != victim.id}
    return _Choice(reason, [Drain(victim.id)], "scale_in", rejected)


def _best_kept(member: Member) -> tuple[bool, int, str]:
    return (not member.needed, -member.outstanding, member.id)


def _least_loss(member: Member) -> tuple[bool, bool, int, float, str]:
    return (member.needed, member.state != "starting", member.outstanding, member.utilisation, member.id)


def _low_for(config: ScalingConfig, state: ScalerMemory, now: float) -> float:
    return -1.0 if state.low_since is None else now - state.low_since + config.interval_s


def _cooldown_left(config: ScalingConfig, state: ScalerMemory, now: float) -> float:
    return 0.0 if state.changed_at is None else max(0.0, state.changed_at + config.cooldown_s - now - _EPSILON_S)


def _change_mind(config: ScalingConfig, state: ScalerMemory, mind: str, now: float) -> tuple[ScalerMemory, bool]:
    """Any other mind is taken at once; steady only after `sustain_s`, or a noisy load would fill the audit log."""
    if mind == state.mind:
        return replace(state, calm_since=None), False
    if mind != STEADY:
        return replace(state, mind=mind, calm_since=None), True
    since = now if state.calm_since is None else state.calm_since
    if now - since + config.interval_s < config.sustain_s - _EPSILON_S:
        return replace(state, calm_since=since), False
    return replace(state, mind=STEADY, calm_since=None), True


def _without_future(state: ScalerMemory, now: float) -> ScalerMemory:
    """A clock set back must not stretch a hold or a cool-down."""
    seen_at, low_since, changed_at, calm_since = (
        None if at is None else min(at, now)
        for at in (state.seen_at, state.low_since, state.changed_at, state.calm_since)
    )
    return replace(state, seen_at=seen_at, low_since=low_since, changed_at=changed_at, calm_since=calm_since)


def _decision(
    config: ScalingConfig, state: ScalerMemory, seen: FleetObservation, choice: _Choice, now: float
) -> Decision:
    figures: dict[str, Figure] = {
        **seen.figures(),
        "upper": config.upper,
        "lower": config.lower,
        "min_instances": config.min_instances,
        "max_instances": config.max_instances,
        "low_for_s": round(max(0.0, _low_for(config, state, now)), 2),
        "sustain_s": config.sustain_s,
        "cooldown_left_s": round(_cooldown_left(config, state, now), 2),
        "tick": state.ticks,
    }
    for action in choice.actions:
        figures["instances" if isinstance(action, ScaleOut) else "instance"] = action[0]
    reason = "relieved" if choice.mind == STEADY else choice.mind
    return Decision(choice.kind, reason, f"{config.model}/{config.role}", now, figures, choice.rejected)
