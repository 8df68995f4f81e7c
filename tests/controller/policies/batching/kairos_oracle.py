"""Kairos' choice of decodes (Alg. 3) as printed, one step at a time: what the product's incremental form is held to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from controller.policies.batching.kairos_step_table import StepTable


class Active(NamedTuple):
    """A decoding sequence: `generated` decode tokens since the one that prefill gave. Order: by length, then id."""

    length: int
    id: str
    first_token_at: float
    generated: int
    tpot_s: float


def slack(active: Active, reserved_s: float, now: float) -> float:
    """Eq. 2, seconds."""
    return active.tpot_s * (active.generated + 1) - (now - active.first_token_at) - reserved_s


def choose(actives: Sequence[Active], table: StepTable, now: float, reserve: str = "active") -> list[Active]:
    """Alg. 3: who decodes in this step, ascending by length. Never empty while anybody is active."""
    ordered = sorted(actives)
    batch = len(ordered) if reserve == "active" else 1
    least = min((slack(each, table.seconds(batch, each.length), now) for each in ordered), default=math.inf)
    joined: list[Active] = []
    throughput = 0.0
    for each in ordered:
        step = table.seconds(len(joined) + 1, each.length)
        if step <= least and (len(joined) + 1) / step > throughput:
            joined.append(each)
            throughput = len(joined) / step
    return joined or ordered
