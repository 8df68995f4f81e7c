"""Beside which answers a request decodes.

Each sequence makes the decode steps of an instance longer, and each prompt stalls them. Where that costs a TPOT, a
request that can wait does not go there now: not where an answer would miss its TPOT for it (`spare_s`), nor where its
own steps would be too long. And requests that are content with long steps go together, so that another instance stays
free for those that are not (`joins_others`); eq. 5 and 7 bound prefill work, and say nothing of this.

Passes ask for each waiting request and instance, so what depends on the instance alone is computed once (decision 280).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from controller.dispatch.queue import Entry
from controller.dispatch.shadow_state import ShadowInstance

NEAR = 0.85  # of a TPOT: a longer step leaves too little for the prompts that come between
SPARE_AGAIN_S = 0.05  # two decode steps: until answers are looked at again, if none comes or goes


class _Busy(NamedTuple):
    outstanding: int
    step_s: float  # beside one more sequence
    instance: ShadowInstance


class _Spare(NamedTuple):
    at: float
    sequences: tuple[int, int, int]
    seconds: float


class Company:
    """Of the instances of one lane. `able`: whether an instance could take a request now."""

    def __init__(self, able: Callable[[Entry, ShadowInstance], bool]) -> None:
        self._able = able
        self._busiest: list[_Busy] | None = None
        self._spare: dict[str, _Spare] = {}
        self.tight_s = math.inf  # the tightest TPOT that may arrive next

    def begin(self, tight_s: float) -> None:
        """A pass begins, or something was sent."""
        self._busiest, self.tight_s = None, tight_s

    def spare_s(self, instance: ShadowInstance, now: float) -> float:
        """Seconds of prefill work that all answers there which keep their mean TPOT can wait through beside one more
        sequence, and still keep it; infinite where none is bound to one. Cost: O(batch) when it is computed."""
        sequences = instance.sent_total, len(instance.waiting), len(instance.running)
        known = self._spare.get(instance.id)
        if known is None or known.sequences != sequences or now >= known.at + SPARE_AGAIN_S:
            known = self._spare[instance.id] = _Spare(now, sequences, _spare_s(instance, now))
        return known.seconds

    def joins_others(self, entry: Entry, instance: ShadowInstance, step_s: float, margin: float, now: float) -> bool:
        """Whether an able instance that has more to do should have the request: its steps here (`step_s`) would be near
        the tightest TPOT of recent traffic, and it has time for steps that are `margin` times those of the other."""
        targets = entry.request.targets
        if targets.tpot_s * NEAR <= self.tight_s or step_s <= NEAR * self.tight_s:
            return False
        pace_s = targets.tpot_s
        if targets.deadline_s is not None:
            left_s = entry.request.arrival + targets.deadline_s - now - entry.cost.prefill_s
            pace_s = min(pace_s, left_s / max(1, entry.request.output_tokens))
        here = instance.outstanding
        return any(
            busy.outstanding > here
            and margin * busy.step_s <= pace_s
            and busy.instance is not instance
            and self._able(entry, busy.instance)
            for busy in self._busiest or ()
        )

    def know(self, instances: Iterable[ShadowInstance]) -> None:
        """Look at their steps, unless that was done since the pass began."""
        if self._busiest is None:
            self._busiest = [_Busy(each.outstanding, _step_beside(each), each) for each in instances]

    def leave(self, instance: ShadowInstance) -> None:
        self._spare.pop(instance.id, None)


def patient_until(entry: Entry, share: float) -> float:
    """When less than this share is left of the time in which the request must be sent. Some admissions know no such
    time: then it does not wait."""
    if math.isinf(entry.hopeless_at):
        return -math.inf
    return entry.hopeless_at - share * (entry.hopeless_at - entry.request.arrival)


def too_slow(entry: Entry, instance: ShadowInstance, step_s: float) -> bool:
    """Whether its decode steps there would be longer than its TPOT, and would not be if it were alone."""
    request = entry.request
    tpot_s = request.targets.tpot_s
    return request.output_tokens > 1 and step_s > tpot_s >= instance.latency.decode(1, request.prompt_tokens)


def _step_beside(instance: ShadowInstance) -> float:
    """A decode step with one more sequence like those there."""
    ours = len(instance.waiting) + len(instance.running)
    return instance.decode_with((instance.context_tokens + instance.waiting_tokens) // max(1, ours))


def _spare_s(instance: ShadowInstance, now: float) -> float:
    before, after = instance.decode_s(), _step_beside(instance)
    spare = math.inf
    for sent in instance.running.values():
        waits = sent.waits_until(after)
        if waits is not None and waits[0] - now < spare and (sent.waits_until(before) or waits)[0] > now:
            spare = waits[0] - now
    for sent in instance.waiting.values():
        tpot_s = sent.request.targets.tpot_s
        if sent.binds and before <= tpot_s:
            spare = min(spare, (sent.to_come - 1) * (tpot_s - after))
    return spare
