"""FlowPrefill's S-EDF: the earliest deadline among those with slack first, then the others, latest deadline first.

"FlowPrefill: Decoupling Preemption from Prefill Scheduling Granularity", eq. 3: priority = sgn(slack) / deadline,
sorted descending, slack = deadline - now - predicted time to the first token. Read as follows. The prediction is the
time *still* needed (the prefill of a queued request; with the full prediction of one half done it would look hopeless).
Slack 0 counts as positive. Among negative slacks the latest deadline comes first: that is what the formula says. The
key is (slack < 0, +-deadline) rather than the quotient, which makes close deadlines on an epoch clock equal and divides
by zero at the start of others. Slack of a queued request shrinks with time alone, so the rank is valid until it turns
negative. Cost per decision: O(1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from controller.core.policy import ORDERINGS, Cost, Rank, Stateless
from controller.core.types import Request


@dataclass(frozen=True, slots=True)
class Config:
    """Nothing to set."""


def slack_key(deadline: float, needed_s: float, now: float) -> tuple[float, float]:
    """Smaller goes first."""
    late = deadline - needed_s < now
    return (1.0, -deadline) if late else (0.0, deadline)


@ORDERINGS.register("slack_aware_edf")
class SlackAwareEdf(Stateless):
    name: ClassVar[str] = "slack_aware_edf"

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or Config()

    def rank(self, request: Request, cost: Cost, now: float) -> Rank:
        key = slack_key(request.ttft_due, cost.prefill_s, now)
        if key[0]:
            return Rank((*key, request.arrival))
        # The first moment at which the slack is negative, not the last at which it is zero.
        turns = math.nextafter(request.ttft_due - cost.prefill_s, math.inf)
        return Rank((*key, request.arrival), max(turns, math.nextafter(now, math.inf)))
