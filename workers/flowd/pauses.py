"""How long the transfer daemon only hears what comes in before it steps again."""

from __future__ import annotations

from collections import deque

STEP_PAUSES = 2.0  # between long steps, in lengths of a step
LONG_STEP_S = 0.002
LONG_STEPS = 4  # in a row


class StepPauses:
    """With very many transfers that send at once each step takes long, and steps without a pause would take the whole
    of a processor that engines need. A few long steps are no reason: they are those of a host that took the processor
    away, or that has much to catch up with, and a pause would make everybody who waits even later."""

    def __init__(self) -> None:
        self._steps_s: deque[float] = deque(maxlen=LONG_STEPS)

    def after(self, step_s: float) -> float:
        """Seconds to pause after a step that took `step_s` of processor time."""
        self._steps_s.append(step_s)
        usual_s = min(self._steps_s)
        return STEP_PAUSES * usual_s if len(self._steps_s) == LONG_STEPS and usual_s >= LONG_STEP_S else 0.0
