"""What the instances that serve a queue are predicted to begin, and those that are starting."""

from __future__ import annotations

from collections.abc import Iterable

from controller.core.policy import Supply
from controller.dispatch.shadow_state import ShadowInstance

LEAST_KEPT = 0.05  # of an instance's time is left for prefills, however close its decodes are to their TPOT
MOST_PREFILLING = 0.8  # of an instance's time goes to prefills, when a decode step is predicted
LATE_S = 5.0  # a start may be later than predicted, and a gateway hears of it seconds after it has ended
SOON_S = 0.5  # when one that is late is taken to serve


def supply_of(instances: Iterable[ShadowInstance], now: float, serving_at: Iterable[float] = ()) -> Supply:
    """The sum over the instances. Prefills get what eq. 5 leaves them; steps of full slots take as long as eq. 2 says,
    and longer by the share of time that went to prefills lately. Slots count with this gateway's share of them.
    Prefills count whole where decodes show what the other gateways prefill: eq. 5 leaves that out already (decision
    153). An instance that only prefills has none, and its prefills count with this gateway's share (decision 239).

    `serving_at`: when instances that are starting are likely to serve. The prediction is a median and ends with the
    engine's start, of which gateways hear a little later, so one that is late counts for `LATE_S` as one that serves
    soon: else what it is to keep would be deferred just before it comes. After that nobody knows when it will serve.
    """
    count = free_slots = slots = 0
    prefill_rate = backlog_s = step_s = token_rate = constant_s = 0.0
    for each in instances:
        count += 1
        prefill_rate += max(LEAST_KEPT, each.kept_for_prefills()) * (1.0 if each.decodes else each.share)
        backlog_s += each.waiting_prefill_s()
        constant_s = max(constant_s, each.latency.coefficients.prefill_a)
        if each.decodes:
            free_slots += max(0, each.free_slots)
            slots += each.slots
            step = each.full_step_s() / (1.0 - min(MOST_PREFILLING, each.prefilling(now)))
            token_rate += each.slots / step
            step_s += step
    coming = tuple(sorted(max(SOON_S, at - now) for at in serving_at if at > now - LATE_S))
    step_s /= max(1, count)
    return Supply(prefill_rate, token_rate, backlog_s, free_slots, step_s, constant_s, count, slots, coming)
