"""Errors between an engine's scheduler and its driver."""

from controller.core.errors import SlacklineError


class ProtocolError(SlacklineError):
    """The driver broke the protocol (a result without a step, a duplicate id, KV without a reservation)."""
