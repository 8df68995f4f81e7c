"""SCORPIO's TPOT guard as a pacing: an engine gets one more request while its virtual batch keeps the tightest TPOT.

Source as in controller/policies/admission/scorpio_ttft_guard.py. With credit-based batching a sequence decodes in
(tightest TPOT) / (its own TPOT) of the steps, so the sum of these shares, the virtual batch size, is what a step
carries. A request is sent if a step of the virtual batch with it, times `inefficiency`, stays below the tightest TPOT;
the first that is not sent blocks those behind it (`scan_limit` 1 in the policy set).

Deviations: the new request counts as 1, not by its share (too careful by less than one sequence, for loose targets
only); and the order must not be lost in the engine's own queue, so no more than one step's prompt tokens wait there,
which is what their scheduler takes from its queue at once. `batch_tokens` 2048: an engine's max_num_batched_tokens.
`inefficiency` 1.0 is theirs (a factor for the steps that prompts take). Cost: O(batch) for each request.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from controller.core.errors import ConfigError
from controller.dispatch.pacing import PACINGS, EventOnly, RecentDemand, Room
from controller.dispatch.shadow_state import ShadowInstance


@PACINGS.register("virtual_batch")
class VirtualBatch(EventOnly):
    """SCORPIO's TPOT guard: room while a step of the virtual batch stays below the tightest TPOT."""

    name: ClassVar[str] = "virtual_batch"

    @dataclass(frozen=True, slots=True)
    class Config:
        inefficiency: float = 1.0
        batch_tokens: int = 2048

        def __post_init__(self) -> None:
            if not self.inefficiency > 0:
                raise ConfigError("inefficiency must be positive", field="inefficiency")
            if self.batch_tokens < 1:
                raise ConfigError("batch_tokens must be at least 1 token", field="batch_tokens")

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()

    def ready(self, instance: ShadowInstance, now: float) -> bool:
        return instance.free_slots > 0 and instance.waiting_tokens < self.config.batch_tokens

    def room(self, instance: ShadowInstance, demand: RecentDemand, tpot_s: float, now: float) -> Room:
        if not instance.outstanding:
            return Room(math.inf, 1, 0.0)
        if self.step_s(instance, tpot_s) * self.config.inefficiency >= tpot_s:
            return Room(0.0, 0, instance.waiting_prefill_s())
        left = self.config.batch_tokens - instance.waiting_tokens
        tokens = left + 1 if instance.waiting_tokens else math.inf
        return Room(tokens, 1 if left > 0 else 0, instance.waiting_prefill_s())

    def step_s(self, instance: ShadowInstance, tightest_s: float) -> float:
        """A step of the virtual batch with one more of the tightest target, seconds."""
        sents = [*instance.waiting.values(), *instance.running.values()]
        if math.isinf(tightest_s) or not sents:
            return 0.0
        size = 1.0 + sum(min(1.0, tightest_s / sent.request.targets.tpot_s) for sent in sents)
        mean = (instance.context_tokens + instance.waiting_tokens + instance.expected_tokens / 2) / len(sents)
        k = instance.latency.coefficients
        return k.decode_a + k.decode_b * mean * size + k.decode_c * size

    def spare(self, instance: ShadowInstance, demand: RecentDemand, now: float) -> bool:
        return self.ready(instance, now) and not instance.waiting
