"""Preemption policies: when a running sequence is replaced by a better one.

Importing this package registers all of them.
"""

from controller.policies.preemption import cost_aware
from controller.policies.preemption.base import (
    PREEMPTIONS,
    Preemption,
    PreemptionChoice,
    PreemptionCosts,
    SequenceStanding,
)

__all__ = ["PREEMPTIONS", "Preemption", "PreemptionChoice", "PreemptionCosts", "SequenceStanding", "cost_aware"]
