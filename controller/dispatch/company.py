"""Beside which answers a request decodes.

Each sequence makes the decode steps of an instance longer, and each prompt stalls them. Where that costs a TPOT, a
request that can wait does not go there now: not where an answer would miss its TPOT for it (`crowds`), nor where its
own steps would be too long (`too_slow`). And requests that are content with long steps go together, so that another
instance stays free for those that are not (`joins_others`); eq. 5 and 7 bound prefill work, and say nothing of this.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

from controller.core.types import Request
from controller.dispatch.queue import Entry
from controller.dispatch.shadow_state import ShadowInstance

NEAR = 0.85  # of a TPOT: a longer step leaves too little for the prompts that come between


class Company(NamedTuple):
    """Where else a request may go, and the tightest TPOT that may arrive next (seconds)."""

    others: Collection[ShadowInstance] = ()
    tight_s: float = math.inf


def patient_until(entry: Entry, share: float) -> float:
    """When less than this share is left of the time in which the request must be sent."""
    return entry.hopeless_at - share * (entry.hopeless_at - entry.request.arrival)


def too_slow(request: Request, instance: ShadowInstance) -> bool:
    """Whether its decode steps there would be longer than its TPOT."""
    return request.output_tokens > 1 and instance.decode_with(request.prompt_tokens) > request.targets.tpot_s


def crowds(entry: Entry, instance: ShadowInstance, now: float) -> bool:
    """Whether an answer there that keeps its mean TPOT would miss it for this prompt and one more sequence.

    Cost: O(1) where neither is near, O(batch) else.
    """
    prefill_s = entry.cost.prefill_s
    before, after = instance.decode_s(), instance.decode_with(entry.request.prompt_tokens)
    if after <= NEAR * instance.tightest_tpot() and prefill_s <= instance.stall_s(now):
        return False
    for sent in instance.running.values():
        waits = sent.waits_until(after)
        if waits is not None and waits[0] - now < prefill_s and (sent.waits_until(before) or waits)[0] > now:
            return True
    for sent in instance.waiting.values():
        tpot_s = sent.request.targets.tpot_s
        if sent.binds and before <= tpot_s and (sent.to_come - 1) * (tpot_s - after) < prefill_s:
            return True
    return False


def joins_others(entry: Entry, instance: ShadowInstance, company: Company, margin: float, now: float) -> bool:
    """Whether another instance that has more to do should have the request, since its steps here would be near the
    tightest TPOT of recent traffic, and it has time for steps that are `margin` times those of the other."""
    request, tight_s = entry.request, company.tight_s
    if request.targets.tpot_s * NEAR <= tight_s or instance.decode_with(request.prompt_tokens) <= NEAR * tight_s:
        return False
    pace_s = request.targets.tpot_s
    if request.targets.deadline_s is not None:
        left_s = request.arrival + request.targets.deadline_s - now - entry.cost.prefill_s
        pace_s = min(pace_s, left_s / max(1, request.output_tokens))
    return any(
        other is not instance
        and other.takes
        and other.free_slots > 0
        and other.outstanding > instance.outstanding
        and margin * other.decode_with(request.prompt_tokens) <= pace_s
        for other in company.others
    )
