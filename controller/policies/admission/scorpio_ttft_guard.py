"""SCORPIO's TTFT guard: in deadline order, refuse or postpone what cannot meet its TTFT behind the requests before it.

Tang et al., "SCORPIO: Serving the Right Requests at the Right Time for Heterogeneous SLOs in LLM Inference", 2025,
https://arxiv.org/abs/2505.23022; from its abstract and its public scheduler (github.com/MisterBrookT/Scorpio,
`vllm/core/scheduler.py`). The queue is in least-deadline-first order (`earliest_deadline_first`). The first token of a
request is predicted from the prompt tokens up to and including its own, plus 50 ms. If its deadline is earlier, the
request is refused, and its tokens no longer count for those behind it. `refuse` off is that code's "delay": the request
is served after all that can meet their TTFT.

Deviation: one queue feeds several engines, so the tokens ahead are divided by the engines that take requests, and the
prefill work that waits in the least loaded engine is added (SCORPIO has one engine with all waiting prompts in its
queue). `margin_s` 0.05 is theirs. Cost: O(n) in waiting requests, per pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

from controller.core.errors import ConfigError
from controller.core.policy import ADMISSIONS, AdmissionResult, Cost, InstanceView, Stateless
from controller.core.types import Request


@dataclass(frozen=True, slots=True)
class Config:
    margin_s: float = 0.05
    refuse: bool = True

    def __post_init__(self) -> None:
        if not math.isfinite(self.margin_s):
            raise ConfigError("margin_s must be a number of seconds", field="margin_s")


@ADMISSIONS.register("scorpio_ttft_guard")
class ScorpioTtftGuard(Stateless):
    name: ClassVar[str] = "scorpio_ttft_guard"

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or Config()

    @property
    def refuses(self) -> bool:
        return self.config.refuse

    def screen(
        self, waiting: Iterable[Request], prefill_s: Callable[[int], float], backlog_s: float, engines: int, now: float
    ) -> list[str]:
        """Ids of requests that cannot meet their TTFT.

        `waiting`: in order of service. `prefill_s`: seconds for a number of tokens.
        """
        out: list[str] = []
        ahead = 0
        for request in waiting:
            first = now + backlog_s + prefill_s(ahead // engines + request.prompt_tokens) + self.config.margin_s
            if first > request.due:
                out.append(request.id)
            else:
                ahead += request.prompt_tokens
        return out

    def judge(
        self, request: Request, cost: Cost, instance: InstanceView, backlog_s: float, now: float
    ) -> AdmissionResult:
        return AdmissionResult(True, 1.0, "attainable")

    def hopeless_at(self, request: Request, cost: Cost) -> float:
        return math.inf
