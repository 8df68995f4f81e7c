"""What can be wrong between an engine's scheduler and its driver."""

from controller.core.errors import SlacklineError


class ProtocolError(SlacklineError):
    """The driver broke the protocol (a result for no step, one id twice, KV that was never announced)."""
