"""Kairos' choice of decodes (Alg. 3) as printed, one step at a time: what the product's incremental form is held to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from controller.policies.batching.kairos_step_table import StepTable


class Active(NamedTuple):
    """A decoding sequence: `generated` decode tokens since the one that prefill gave, `left` until its cap. Order: by
    length, then id."""

    length: int
    id: str
    first_token_at: float
    generated: int
    tpot_s: float
    left: int = 1_000_000


def slack(active: Active, reserved_s: float, now: float) -> float:
    """Eq. 2, seconds."""
    return active.tpot_s * (active.generated + 1) - (now - active.first_token_at) - reserved_s


def least_slack(ordered: Sequence[Active], table: StepTable, now: float, reserve: str) -> float:
    if reserve != "longest":
        batch = len(ordered) if reserve == "active" else 1
        return min((slack(each, table.seconds(batch, each.length), now) for each in ordered), default=math.inf)
    step_s = table.seconds(len(ordered), ordered[-1].length) if ordered else 0.0
    slacks = [(slack(each, step_s, now), max(0.0, each.tpot_s - step_s) * each.left) for each in ordered]
    return min([s for s, gain in slacks if s + gain >= 0] or [s for s, _ in slacks], default=math.inf)


def choose(actives: Sequence[Active], table: StepTable, now: float, reserve: str = "active") -> list[Active]:
    """Alg. 3: who decodes in this step, ascending by length. Never empty while anybody is active."""
    ordered = sorted(actives)
    least = least_slack(ordered, table, now, reserve)
    joined: list[Active] = []
    throughput = 0.0
    for each in ordered:
        step = table.seconds(len(joined) + 1, each.length)
        if step <= least and (len(joined) + 1) / step > throughput:
            joined.append(each)
            throughput = len(joined) / step
    return joined or ordered
