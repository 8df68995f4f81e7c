"""The base classes of all errors. `field` names what the caller must change."""

from __future__ import annotations


class SlacklineError(Exception):
    """Base class of every error that Slackline raises."""


class Unseen(SlacklineError):
    """Something that is to be looked at does not answer as it should; the text says why, for people."""


class ConfigError(SlacklineError, ValueError):
    """A setting or a stored policy choice is wrong."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class UnknownName(ConfigError):
    """A name that is not registered; the message lists the valid ones."""
