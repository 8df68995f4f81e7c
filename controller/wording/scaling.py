"""Why the fleet has its size, in one sentence, from what the scaler recorded at an evaluation."""

from __future__ import annotations

from typing import Protocol

from controller.core.load import FULL
from controller.wording.sentences import UNBOUNDED


class StoredPolicy(Protocol):
    """A stored scaling policy."""

    enabled: bool
    upper: float
    lower: float
    min_instances: int
    max_instances: int
    sustain_s: float
    warm: int | None


class StoredSample(Protocol):
    """A stored point of the scaler's line: what it saw at one evaluation, and what it wanted (`mind`)."""

    load: float | None
    ready: int
    starting: int
    draining: int
    mind: str
    low_for_s: float
    cooldown_left_s: float
    start_s: float | None


class PoolState(Protocol):
    """Warm spares of a policy (`controller.selectors.fleet.scaling.WarmPool`)."""

    @property
    def ready(self) -> int: ...

    @property
    def starting(self) -> int: ...

    @property
    def held_by(self) -> str: ...


# Why the scaler does not do what it wants, by its state of mind.
HELD = {
    "at_max": "{load} is above {upper:g} %, but the maximum of {max} is reached",
    "settling": "{load} calls for a change, but the last one has not settled yet: {cooldown:.0f} s of cooldown "
    "left, {starting} starting{start}, {draining} draining",
    "telemetry_stale": "the telemetry is stale, and nothing is changed on stale telemetry",
    "nothing_to_start": "another instance is needed, but there is no managed instance to start a copy of",
    "template_paused": "another instance is needed, but the launch template of its instances is paused, since starts "
    "from it failed",
    "no_device": "another instance is needed, but no device is free",
    "nothing_to_stop": "there is one instance too many, but every instance is managed externally",
    "rest_would_exceed_upper": "{load} is low, but with one instance fewer it would rise above {rest:g} %",
    "needed_for_targets": "{load} is low, but each instance that could be stopped is the only one that can meet the "
    "targets of some recent request",
}
LAST_ONE = "{load} is low, but requests arrive and no instance would be left to serve them"
# The same for what it wanted some evaluations ago: a state of mind ends only after the load was calm for a while.
WANTED = {
    "at_max": "{load} is no longer above {upper:g} %; while it was, the maximum of {max} was reached",
    "settling": "{load} is between {lower:g} % and {upper:g} % again; before that, the last change had not settled",
}
# States of mind that come from the load, which does not count while the number is set by hand.
BY_LOAD = ("", "steady", "at_max", "rest_would_exceed_upper", "needed_for_targets")
# Steps of a new instance until it serves, as the pages of a scale-out and of the instance name them.
STEPS_TO_SERVICE = {
    "decision": "Decided",
    "order": "Requested",
    "process": "Process running",
    "weights": "Weights loaded",
    "ready": "Ready",
    "first_token": "First token",
}
# Steps of an engine's start, as its log tells them (`controller.engine.start_steps`).
START_STEPS = {
    "process": "Process started",
    "weights": "Weights loaded",
    "graphs": "Graphs captured",
    "cache": "KV cache allocated",
    "listening": "API listening",
    "ready": "Health check passed",
}
# Steps that no decision records.
WAITED_FOR = {
    "started": "cold start: a new process",
    "weights_ordered": "warm spare: a weight load",
    "wake_ordered": "sleeping instance: a wake-up",
    "weights": "in progress",
    "ready": "not ready yet",
    "takes_requests": "weights loaded; it receives requests",
    "first_token": "no request served yet",
}
# Why the warm pool is smaller than the policy wants it.
POOL_HELD = {"no_device": "no device is free", "nothing_to_start": "there is no managed instance to start a copy of"}


def warm_in_words(policy: StoredPolicy, pool: PoolState | None) -> str:
    """How many warm spares there are of those wanted; `pool` None: not on record for that time."""
    if pool is None:
        return "as many as free devices allow" if policy.warm is None else f"{policy.warm} required"
    starting = f", {pool.starting} starting" if pool.starting else ""
    if policy.warm is None:
        return f"{pool.ready}{starting}; as many as free devices allow"
    if not policy.warm and not pool.ready and not pool.starting:
        return "none"
    if not policy.enabled:
        return f"{pool.ready} of {policy.warm}{starting}: the policy is disabled"
    held = f": {POOL_HELD[pool.held_by]}" if pool.held_by else ""
    return f"{pool.ready} of {policy.warm}{starting}{held}"


def why(policy: StoredPolicy, sample: StoredSample, held: int | None = None) -> str:
    """Why nothing was (or something was) scaled at the moment of the sample. `held`: the number of instances that an
    operator had set by hand."""
    if not policy.enabled:
        return "the policy is disabled"
    if held is not None and sample.mind in BY_LOAD:
        load = UNBOUNDED if sample.load is None else f"load {sample.load * 100:,.0f} %"
        if sample.ready == held:
            return f"{load}, but the number of instances is set to {held} by hand"
        return f"{load}; the number of instances goes from {sample.ready} to {held}, as set by hand"
    known = {
        "load": UNBOUNDED if sample.load is None else f"load {sample.load * 100:,.0f} %",
        "upper": policy.upper * 100,
        "rest": min(policy.upper, FULL) * 100,
        "lower": policy.lower * 100,
        "max": "1 instance" if policy.max_instances == 1 else f"{policy.max_instances} instances",
        "cooldown": sample.cooldown_left_s,
        "starting": sample.starting,
        "start": _start_takes(sample) if sample.starting else "",
        "draining": sample.draining,
    }
    words = WANTED if sample.mind in WANTED and _calm(policy, sample) else HELD
    pattern = LAST_ONE if _kept_the_last(sample) else words.get(sample.mind)
    said = pattern.format_map(known) if pattern else _steady(policy, sample)
    return said if sample.ready else f"no instance is up; {said}"


def _calm(policy: StoredPolicy, sample: StoredSample) -> bool:
    """Whether the load no longer calls for what the last state of the scaler says."""
    least = policy.lower if sample.mind == "settling" else 0.0
    return sample.load is not None and least <= sample.load <= policy.upper


def _kept_the_last(sample: StoredSample) -> bool:
    """Of a fleet that may go down to none: no load can be given for what is left."""
    return sample.mind == "rest_would_exceed_upper" and sample.ready == 1


def _steady(policy: StoredPolicy, sample: StoredSample) -> str:
    load = sample.load
    if load is None:
        return "the load is unknown: requests arrive and none finish"
    said, upper, lower = f"load {load * 100:.0f} %", f"{policy.upper * 100:g} %", f"{policy.lower * 100:g} %"
    if load > policy.upper:
        return f"{said} is above {upper}: the scaler acted in this evaluation"
    if load >= policy.lower:
        return f"{said} is between {lower} and {upper}: no change is needed"
    if sample.ready <= policy.min_instances:
        return f"{said} is below {lower}, but {policy.min_instances} is the minimum"
    start_s = sample.start_s or 0.0
    hold = f"{policy.sustain_s:g} s" if start_s <= policy.sustain_s else f"{start_s:.0f} s, the time a start takes,"
    low_s = min(sample.low_for_s, max(policy.sustain_s, start_s))
    return f"{said} has been below {lower} for {low_s:.0f} s; after {hold} one instance is removed"


def _start_takes(sample: StoredSample) -> str:
    return "" if sample.start_s is None else f" (a start takes about {sample.start_s:.0f} s)"
