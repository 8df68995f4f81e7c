"""The latency profiles that come with Slackline, as an experiment uses them. Paths are not accepted, since specs come
from users."""

from __future__ import annotations

from typing import Any

from controller.core.errors import UnknownName
from workers.engine.profiles import shipped_profiles


def shipped_profile(name: str) -> dict[str, Any]:
    """Coefficients and KV capacity by id or alias. Raises UnknownName with the valid names."""
    known = shipped_profiles()
    if name not in known:
        raise UnknownName(f"unknown profile {name[:80]!r}; valid: {', '.join(profile_names())}", field="profile")
    profile = known[name]
    return {**profile.coefficients._asdict(), "kv_capacity_tokens": profile.kv_capacity_tokens}


def profile_names() -> list[str]:
    """The short names, without the ids that they stand for."""
    known = shipped_profiles()
    return sorted(name for name in known if name != known[name].id)
