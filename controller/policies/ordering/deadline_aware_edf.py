"""D-EDF: FlowPrefill's ablation of S-EDF, with sgn(deadline - now) in place of sgn(slack).

"FlowPrefill: Decoupling Preemption from Prefill Scheduling Granularity", sec. 6. A request moves back only after its
deadline has passed, so time is still spent on requests that can no longer be in time. Cost per decision: O(1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from controller.core.policy import ORDERINGS, Cost, Rank, Stateless
from controller.core.types import Request
from controller.policies.ordering.slack_aware_edf import slack_key


@dataclass(frozen=True, slots=True)
class Config:
    """No settings."""


@ORDERINGS.register("deadline_aware_edf")
class DeadlineAwareEdf(Stateless):
    name: ClassVar[str] = "deadline_aware_edf"

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or Config()

    def rank(self, request: Request, cost: Cost, now: float) -> Rank:
        key = slack_key(request.ttft_due, 0.0, now)
        valid_until = None if key[0] else math.nextafter(request.ttft_due, math.inf)
        return Rank((*key, request.arrival), valid_until)
