"""FlowPrefill's S-EDF: requests with slack first, earliest deadline first; then the others, latest deadline first.

"FlowPrefill: Decoupling Preemption from Prefill Scheduling Granularity", eq. 3: priority = sgn(slack) / deadline,
sorted descending, slack = deadline - now - predicted time to the first token. Our reading: the prediction is the time
*still* needed, because with the whole prediction a half-finished prefill would look hopeless. Slack 0 counts as
positive. Among negative slacks the latest deadline comes first, as the formula says. The key is (slack < 0, +-deadline)
instead of the quotient, which makes near deadlines equal on an epoch clock and divides by zero at time 0. The slack of
a queued request shrinks only with time, so its rank is valid until the slack becomes negative. Cost per decision: O(1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from controller.core.policy import ORDERINGS, Cost, Rank, Stateless
from controller.core.types import Request


@dataclass(frozen=True, slots=True)
class Config:
    """No settings."""


def slack_key(deadline: float, needed_s: float, now: float) -> tuple[float, float]:
    """The sort key; smaller goes first."""
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
        # The first moment with negative slack, not the last one with zero slack.
        turns = math.nextafter(request.ttft_due - cost.prefill_s, math.inf)
        return Rank((*key, request.arrival), max(turns, math.nextafter(now, math.inf)))
