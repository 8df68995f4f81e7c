"""SCORPIO's TTFT guard: in deadline order, whoever cannot make it behind those before it is refused, or put off.

Tang et al., "SCORPIO: Serving the Right Requests at the Right Time for Heterogeneous SLOs in LLM Inference", 2025,
https://arxiv.org/abs/2505.23022; read from its abstract and its public scheduler (github.com/MisterBrookT/Scorpio,
`vllm/core/scheduler.py`). With the queue in least-deadline-first order (`earliest_deadline_first`), the first token of
a request is predicted from the prompt tokens up to and including its own, and 50 ms are added; a deadline before that
refuses it, and its tokens no longer count for those behind it. `refuse` off is that code's "delay": it is served after
everybody who can make it.

Deviation: one queue for several engines, so the tokens ahead are shared by the engines that take requests, and the
prefill work that waits in the least loaded engine comes before them (theirs is one engine with all its waiting prompts
in the queue). `margin_s` 0.05 is theirs. Cost: O(n) in waiting requests a pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

from controller.core.errors import ConfigError
from controller.core.policy import ADMISSIONS, AdmissionResult, Cost, Stateless, WorkerView
from controller.core.types import Request
from controller.policies.ordering.earliest_deadline_first import due


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
        """Ids of those that cannot make it. `waiting` in the order of service; `prefill_s` of a number of tokens."""
        out: list[str] = []
        ahead = 0
        for request in waiting:
            first = now + backlog_s + prefill_s(ahead // engines + request.prompt_tokens) + self.config.margin_s
            if first > due(request):
                out.append(request.id)
            else:
                ahead += request.prompt_tokens
        return out

    def judge(self, request: Request, cost: Cost, worker: WorkerView, backlog_s: float, now: float) -> AdmissionResult:
        return AdmissionResult(True, 1.0, "attainable")

    def hopeless_at(self, request: Request, cost: Cost) -> float:
        return math.inf
