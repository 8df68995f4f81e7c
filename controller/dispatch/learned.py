"""What a dispatcher learned of an instance beside its profile, for the gateway's next process: its step latency, the
errors of its first tokens, and the shares of prompts that it finds in its prefix cache."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from controller.core.types import LatencyCoefficients
from controller.predict.latency import ErrorsByKind, LatencyModel, OnlineFit
from controller.predict.lengths import CachedShares

UNLIKE = 1.5  # predictions that differ by more are of another machine
TYPICAL_TOKENS = 1_000


class Learner(Protocol):
    id: str
    latency: LatencyModel
    mature_at: float
    changes: int
    fit: OnlineFit
    first_tokens: ErrorsByKind
    cached: CachedShares

    def refitted(self) -> None:
        """Predict with the fit as it is now."""
        ...


def learned(instance: Learner) -> dict[str, Any] | None:
    """As JSON can hold it; None before anything was measured."""
    if not instance.fit.samples:
        return None
    return {
        "fit": instance.fit.state(),
        "first_tokens": instance.first_tokens.state(),
        "cached": instance.cached.state(),
    }


def learned_states(instances: Iterable[Learner]) -> dict[str, dict[str, Any]]:
    """Of those of which something was measured, by id."""
    return {each.id: state for each in instances if (state := learned(each)) is not None}


def relearn(instance: Learner, state: Mapping[str, Any]) -> None:
    """Go on from what an earlier process learned. If the instance had another profile then, all of it is of another
    machine, and nothing changes. Raises KeyError, TypeError or ValueError for anything else than such a state."""
    first_tokens, cached = ErrorsByKind.from_state(state["first_tokens"]), CachedShares.of(state["cached"])
    if instance.fit.restore(state["fit"]):
        instance.first_tokens, instance.cached = first_tokens, cached
        instance.refitted()


def believe(instance: Learner, coefficients: LatencyCoefficients) -> None:
    """Predict with these from now on.

    If they are of another machine than those before, so is the time until which decodes there are owed steps for
    prefills that ended. With a profile four times too slow each prefill was to be followed by up to a second of steps,
    and these seconds added up and held requests back until long after the refit.
    """
    before = _typical_s(instance.latency)
    instance.latency.coefficients = coefficients
    instance.changes += 1
    pairs = zip(before, _typical_s(instance.latency), strict=True)
    if any(max(old, new) > UNLIKE * min(old, new) for old, new in pairs):
        instance.mature_at = -math.inf


def _typical_s(latency: LatencyModel) -> tuple[float, float]:
    return latency.prefill_sums(TYPICAL_TOKENS, TYPICAL_TOKENS**2), latency.decode(1, TYPICAL_TOKENS)
