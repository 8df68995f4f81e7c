"""What a translation of an engine's answer gives the relay, for clients that do not speak the engines' API."""

from __future__ import annotations

from typing import Protocol

from workers.backends.base import EngineError


class UnreadableAnswer(EngineError):
    """The engine's answer cannot be translated for the client. Another engine would answer the same."""

    def __init__(self) -> None:
        super().__init__("The engine's answer cannot be read.")


class Translation(Protocol):
    """For a client that does not speak the engines' API (responses)."""

    def translate(self, raw: bytes) -> bytes:
        """The engine's answer, or whole events of it, in the client's API. Raises UnreadableAnswer."""
        ...
