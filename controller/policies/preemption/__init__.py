"""When a running sequence gives way to a better one. Importing this package registers the built-in rules."""

from controller.policies.preemption import cost_aware
from controller.policies.preemption.base import PREEMPTIONS, Choice, Preemption, Standing

__all__ = ["PREEMPTIONS", "Choice", "Preemption", "Standing", "cost_aware"]
