"""Links between engines as engines report them: a kept connection over which one pulls KV from another."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

INT64 = 2**63  # JSON here and the database hold less
OTHER_MODEL = "other_model"  # what one of the two engines computes is no KV for the other, whatever way it takes


class LinkState(StrEnum):
    CONNECTING = "connecting"  # no answer yet
    UP = "up"
    DEGRADED = "degraded"  # answers, but something failed on it lately, or it is far slower than it was
    DOWN = "down"  # no answer


class LinkReport(NamedTuple):
    """What the engine that pulls says of its link from `peer` (an instance's id). Seconds, bytes, bytes a second.

    Counts are since the link was made; `bandwidth_bytes_s` and `latency_s` are recent means, None before there is one.
    """

    peer: str
    state: LinkState
    latency_s: float | None = None
    bandwidth_bytes_s: float | None = None
    bytes: int = 0
    transfers: int = 0
    failures: int = 0
    last_error: str = ""
    host: str = ""
    port: int = 0


def report_from_json(raw: Mapping[str, Any]) -> LinkReport:
    """The inverse of `_asdict` after a trip through JSON. Raises KeyError, TypeError or ValueError; keys it does not
    know are a newer engine's and left out."""
    known = {name: raw[name] for name in LinkReport._fields if name in raw}
    return LinkReport(**{**known, "state": LinkState(raw["state"])})


class KvMoved(NamedTuple):
    """How one KV transfer went, as the engine that pulled it measured it. `busy_s`: of `seconds`, how long the engine
    computed for others meanwhile. `tokens` came, `cached` were there already. `reserved`: blocks were taken.
    `early_bytes`: of `bytes`, what was sent while the prompt was still being computed; `waited_s`: of `seconds`, what
    was spent on waiting for it."""

    bytes: int = 0
    layers: int = 0
    tokens: int = 0
    cached: int = 0
    seconds: float = 0.0
    busy_s: float = 0.0
    reserved: bool = False
    reason: str = ""  # why it ended early: unreachable, refused, other_model, kv_lost, cut, corrupt, timeout
    early_bytes: int = 0
    waited_s: float = 0.0


def moved_from_json(raw: Any) -> KvMoved | None:
    """None for what is no such object."""
    if not isinstance(raw, Mapping):
        return None
    try:
        found = {name: type(default)(raw[name]) for name, default in _MOVED.items() if name in raw}
    except (TypeError, ValueError, OverflowError):
        return None
    too_large = any(isinstance(value, int) and abs(value) >= INT64 for value in found.values())
    return None if too_large else KvMoved(**found)


_MOVED: Mapping[str, Any] = KvMoved()._asdict()
