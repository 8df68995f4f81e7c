"""When a running sequence gives way to a better one."""

from controller.policies.preemption import cost_aware

__all__ = ["cost_aware"]
