"""ALADDIN's constraints as a pacing: a request fits an instance if its predicted worst case keeps every target there.

Source as in controller/policies/routing/best_fit.py. Four constraints, each on predictions: (a) the prompts that wait
there and the new one are prefilled within the TTFT; (b) the stall that they cause is no longer than the tightest
decode is ahead of its mean TPOT; (c) a decode step of the batch with every sequence at its full length stays within
the TPOT; (d) prompts and whole answers fit into the KV cache (the dispatcher's own check).

Ours: on a fleet that cannot scale out, a request that fits nowhere waits, in order of arrival. `ttft_share` and
`tpot_share` (1.0) leave room for the error of the predictions. Cost: O(batch) for each request.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from controller.core.errors import ConfigError
from controller.dispatch.pacing import PACINGS, EventOnly, RecentDemand, Room
from controller.dispatch.shadow_state import ShadowInstance


@PACINGS.register("worst_case_fit")
class WorstCaseFit(EventOnly):
    """ALADDIN: room while prefill, stall, decode step and KV keep every target in the worst case."""

    name: ClassVar[str] = "worst_case_fit"

    @dataclass(frozen=True, slots=True)
    class Config:
        ttft_share: float = 1.0
        tpot_share: float = 1.0

        def __post_init__(self) -> None:
            for name in ("ttft_share", "tpot_share"):
                if not 0 < getattr(self, name) <= 1:
                    raise ConfigError(f"{name} must lie in (0, 1]", field=name)

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or self.Config()

    def ready(self, instance: ShadowInstance, now: float) -> bool:
        return instance.free_slots > 0

    def room(self, instance: ShadowInstance, demand: RecentDemand, tpot_s: float, now: float) -> Room:
        waiting = instance.waiting_prefill_s()
        if not instance.outstanding:
            return Room(math.inf, 1, 0.0)
        tpot = self.config.tpot_share * tpot_s
        whole = instance.context_tokens + instance.waiting_tokens + instance.expected_tokens
        if instance.latency.decode(instance.outstanding + 1, whole) > tpot:
            return Room(0.0, 0, waiting)
        seconds = min(self.config.ttft_share * demand.ttft_s, self._in_hand(instance, now))
        k = instance.latency.coefficients
        if math.isinf(seconds) or k.prefill_b <= 0:
            return Room(math.inf, 1, waiting)
        left = seconds - waiting - (0.0 if instance.waiting else k.prefill_a)
        return Room(max(0.0, left / k.prefill_b), 1, waiting)

    def _in_hand(self, instance: ShadowInstance, now: float) -> float:
        """Seconds by which the tightest decode is ahead of its pace, with one step of its own."""
        hand = math.inf
        for sent in instance.running.values():
            if sent.first_at is not None and sent.request.output_tokens > 1:
                tpot = self.config.tpot_share * sent.request.targets.tpot_s
                hand = min(hand, sent.first_at + max(1, sent.produced) * tpot - now)
        return hand

    def spare(self, instance: ShadowInstance, demand: RecentDemand, now: float) -> bool:
        return self.ready(instance, now) and not instance.waiting
