"""Why the fleet is as large as it is, in one sentence, from what the scaler recorded."""

from __future__ import annotations

from typing import Protocol


class Policy(Protocol):
    """A stored scaling policy."""

    enabled: bool
    upper: float
    lower: float
    min_instances: int
    max_instances: int
    sustain_s: float
    warm: int | None


class Sample(Protocol):
    """A stored point of the scaler's line: what it saw at one evaluation, and what it wanted (`mind`)."""

    load: float | None
    ready: int
    starting: int
    draining: int
    mind: str
    low_for_s: float
    cooldown_left_s: float


class Pool(Protocol):
    """Warm spares of a policy (`controller.selectors.warm_pool.WarmPool`)."""

    @property
    def ready(self) -> int: ...

    @property
    def starting(self) -> int: ...

    @property
    def held_by(self) -> str: ...


# Wants to, but may not: the scaler's own word for it, and ours.
HELD = {
    "at_max": "load {load} is above {upper:g}, but {max} the limit",
    "settling": "load {load} asks for a change, but the last one has not settled: {cooldown:.0f} s of cool-down left, "
    "{starting} starting, {draining} draining",
    "telemetry_stale": "no current figures of the fleet: nothing is changed on old ones",
    "nothing_to_start": "it wants another instance, but there is no instance to make it like",
    "no_device": "it wants another instance, but no device is free for it",
    "nothing_to_stop": "it wants one instance less, but all are run by somebody else",
    "rest_would_exceed_upper": "load {load} is low, but with one instance less it would rise above {upper:g}",
}
LAST_ONE = "load {load} is low, but requests come, and nothing would be left that takes them"
# The same of what it wanted some looks ago: a mind is given up only after the load was calm for a while.
WANTED = {
    "at_max": "load {load} is no longer above {upper:g}; it was, and {max} the limit",
    "settling": "load {load} lies between {lower:g} and {upper:g} again; before, the last change had not settled",
}
# Steps of an instance to its service, as the pages of a scale-out and of the instance name them.
STEPS_TO_SERVICE = {
    "decision": "Decided",
    "order": "Ordered",
    "process": "Process up",
    "weights": "Weights",
    "ready": "Ready",
    "first_token": "First token",
}
# What is said where no decision says it.
WAITED_FOR = {
    "started": "a new process was asked for",
    "weights_ordered": "it was warm: its weights were ordered",
    "wake_ordered": "it slept: it was told to wake up",
    "weights": "on their way",
    "ready": "not ready yet",
    "takes_requests": "its weights are there: requests are sent to it",
    "first_token": "no request has been served by it yet",
}
# Why the warm pool is smaller than the policy wants it.
POOL_HELD = {"no_device": "no device is free", "nothing_to_start": "there is no instance to make it like"}


def warm_in_words(policy: Policy, pool: Pool | None) -> str:
    """What stands by of what is wanted; `pool` None: how it was then is not on record."""
    if pool is None:
        return "as free devices allow" if policy.warm is None else f"{policy.warm} wanted"
    starting = f", {pool.starting} starting" if pool.starting else ""
    if policy.warm is None:
        return f"{pool.ready}{starting}; as free devices allow"
    if not policy.warm and not pool.ready and not pool.starting:
        return "none wanted"
    if not policy.enabled:
        return f"{pool.ready} of {policy.warm}{starting}: the policy is switched off"
    held = f": {POOL_HELD[pool.held_by]}" if pool.held_by else ""
    return f"{pool.ready} of {policy.warm}{starting}{held}"


def why(policy: Policy, sample: Sample) -> str:
    """Why nothing was (or something was) scaled at the moment of the sample."""
    if not policy.enabled:
        return "the policy is switched off"
    known = {
        "load": "without bound (requests come and none is finished)" if sample.load is None else f"{sample.load:.2f}",
        "upper": policy.upper,
        "lower": policy.lower,
        "max": "1 instance is" if policy.max_instances == 1 else f"{policy.max_instances} instances are",
        "cooldown": sample.cooldown_left_s,
        "starting": sample.starting,
        "draining": sample.draining,
    }
    held = WANTED if sample.mind in WANTED and _calm(policy, sample) else HELD
    pattern = LAST_ONE if _kept_the_last(sample) else held.get(sample.mind)
    said = pattern.format_map(known) if pattern else _steady(policy, sample)
    return said if sample.ready else f"no engine is up; {said}"


def _calm(policy: Policy, sample: Sample) -> bool:
    """Does the load ask for nothing any more of what the mind still says?"""
    least = policy.lower if sample.mind == "settling" else 0.0
    return sample.load is not None and least <= sample.load <= policy.upper


def _kept_the_last(sample: Sample) -> bool:
    """Of a fleet that may go down to none: no load can be given for what is left."""
    return sample.mind == "rest_would_exceed_upper" and sample.ready == 1


def _steady(policy: Policy, sample: Sample) -> str:
    load = sample.load
    if load is None:
        return "the load is not known: requests arrive and none is finished"
    if load > policy.upper:
        return f"load {load:.2f} is above {policy.upper:g}: it acted in this look"
    if load >= policy.lower:
        return f"load {load:.2f} lies between {policy.lower:g} and {policy.upper:g}: nothing to do"
    if sample.ready <= policy.min_instances:
        return f"load {load:.2f} is below {policy.lower:g}, but {policy.min_instances} is the least allowed"
    low = min(sample.low_for_s, policy.sustain_s)
    return f"load {load:.2f} is below {policy.lower:g} for {low:.0f} s; after {policy.sustain_s:g} s one instance goes"
