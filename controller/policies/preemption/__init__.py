"""When a running sequence gives way to a better one. Importing this package registers the built-in rules."""

from controller.policies.preemption import cost_aware
from controller.policies.preemption.base import PREEMPTIONS, Preemption, PreemptionChoice, SequenceStanding

__all__ = ["PREEMPTIONS", "Preemption", "PreemptionChoice", "SequenceStanding", "cost_aware"]
