"""What stands for a session where its key must not be: in the table, on pages, in Redis."""

from __future__ import annotations

from hashlib import sha256


def digest_of(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def group_of(digest: str) -> str:
    """Channel-layer group of the sockets of one session."""
    return f"session.{digest[:32]}"
