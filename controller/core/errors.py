"""One error tree. `field` names what the caller must change."""

from __future__ import annotations


class SlacklineError(Exception):
    """Base of every error of ours."""


class ConfigError(SlacklineError, ValueError):
    """A setting or a stored policy choice is wrong."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class UnknownName(ConfigError):
    """A name nobody registered; the message lists the valid ones."""
