"""Admit a request if it is likely enough to meet its TTFT: calculate_p against theta in HyperFlexis Alg. 1.

t_remaining = arrival + TTFT - (now + expected prefill + what follows it until the client's first byte, where another
instance decodes). The paper gives neither the curve nor theta. Ours is the normal distribution of the prediction error,
p = Phi((t_remaining - backlog - lateness) / sigma). `backlog` is prefill work that already waits in the instance.
Lateness and sigma are the mean and the deviation of how much later than that first tokens of the request's tenant and
class came from the instance lately (`measured`): steps shared with decodes, the network, and what the fit has not
learned yet. Without `measured`, lateness is 0 and sigma = error x (expected prefill + backlog). The chance stays within
[0, 1], never falls with the time left, and is 1 or 0 without a deviation. Cost per decision: O(1).

`theta` 0.5 (as likely as not), `error` 0.15 (the profiles' p95 relative error).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from controller.core.errors import ConfigError
from controller.core.policy import ADMISSIONS, AdmissionResult, Cost, InstanceView, Stateless
from controller.core.types import Request


@dataclass(frozen=True, slots=True)
class Config:
    theta: float = 0.5
    error: float = 0.15
    measured: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.theta < 1:
            raise ConfigError("theta must lie between 0 and 1", field="theta")
        if self.error < 0:
            raise ConfigError("error must not be negative", field="error")


def probability(time_left_s: float, spread_s: float) -> float:
    """Phi(time left / spread); without spread a step, which is 1 at zero (exactly in time is in time)."""
    if spread_s <= 0:
        return 1.0 if time_left_s >= 0 else 0.0
    return 0.5 * (1.0 + math.erf(time_left_s / (spread_s * math.sqrt(2.0))))


@ADMISSIONS.register("ttft_probability")
class TtftProbability(Stateless):
    name: ClassVar[str] = "ttft_probability"

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or Config()

    def judge(
        self, request: Request, cost: Cost, instance: InstanceView, backlog_s: float, now: float
    ) -> AdmissionResult:
        config = self.config
        needed_s = cost.prefill_s + cost.first_byte_s + backlog_s
        left, spread_s = request.due - now - needed_s, config.error * needed_s
        if config.measured:
            late_s, spread_s = instance.first_token_error(request)
            left -= late_s
        p = probability(left, spread_s)
        if p >= config.theta:
            return AdmissionResult(True, p, "likely_in_time")
        return AdmissionResult(False, p, "unlikely_on_this_instance")

    def hopeless_at(self, request: Request, cost: Cost) -> float:
        """When p on an idle engine falls below theta; with a deadline, when even the answer alone would end too
        late.
        """
        first_s = cost.prefill_s + cost.first_byte_s
        at = request.due - first_s
        if request.targets.deadline_s is not None:
            alone = first_s + max(0, request.surest_tokens - 1) * cost.decode_step_s
            at = min(at, request.arrival + request.targets.deadline_s - alone)
        return at
