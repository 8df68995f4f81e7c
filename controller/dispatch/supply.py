"""What the instances of a lane are predicted to begin per second, for orderings that plan ahead."""

from __future__ import annotations

from collections.abc import Iterable

from controller.core.policy import Supply
from controller.dispatch.shadow_state import ShadowInstance

LEAST_KEPT = 0.05  # of an instance's time is left for prefills, however close its decodes are to their TPOT
MOST_PREFILLING = 0.8  # of an instance's time goes to prefills, when a decode step is predicted


def supply_of(instances: Iterable[ShadowInstance], now: float) -> Supply:
    """The sum over the instances. Prefills get what eq. 5 leaves them; steps of full slots take as long as eq. 2 says,
    and longer by the share of time that went to prefills lately.
    """
    count = free_slots = 0
    prefill_rate = backlog_s = step_s = token_rate = constant_s = 0.0
    for each in instances:
        count += 1
        prefill_rate += each.share * max(LEAST_KEPT, each.kept_for_prefills())
        backlog_s += each.waiting_prefill_s()
        constant_s = max(constant_s, each.latency.coefficients.prefill_a)
        if each.decodes:
            free_slots += max(0, each.free_slots)
            step = each.full_step_s() / (1.0 - min(MOST_PREFILLING, each.prefilling(now)))
            token_rate += each.slots / step
            step_s += step
    return Supply(prefill_rate, token_rate, backlog_s, free_slots, step_s / max(1, count), constant_s)
