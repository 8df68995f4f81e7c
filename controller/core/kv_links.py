"""Links as engines report them: a link is a kept connection over which one engine pulls KV from another."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

INT64 = 2**63  # integers in JSON messages and in the database are smaller
MOST_PAUSES = 8  # of a transfer that are told
OTHER_MODEL = "other_model"  # the engines are incompatible peers: neither can use the KV of the other


class LinkState(StrEnum):
    CONNECTING = "connecting"  # no answer yet
    UP = "up"
    DEGRADED = "degraded"  # answers, but a transfer failed lately or it is far slower than before
    DOWN = "down"  # no answer


class LinkReport(NamedTuple):
    """State of one link, reported by the engine that pulls; `peer` is the id of the instance at the other end.

    Seconds, bytes and bytes/s. Counts start when the link is made; `bandwidth_bytes_s` and `latency_s` are recent
    means, None before the first measurement.
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
    """The inverse of `_asdict` after JSON.

    Keys of newer engines are ignored. Raises KeyError, TypeError or ValueError, also for a figure that is negative, not
    finite or too large: all of the fleet count with it.
    """
    known = {name: raw[name] for name in LinkReport._fields if name in raw}
    for name in _FIGURES & known.keys():
        if known[name] is not None and not 0 <= known[name] < INT64:
            raise ValueError(f"{name} is {str(known[name])[:30]}")
    return LinkReport(**{**known, "state": LinkState(raw["state"])})


_FIGURES = {"latency_s", "bandwidth_bytes_s", "bytes", "transfers", "failures", "port"}


class KvMoved(NamedTuple):
    """Figures of one KV transfer, measured by the engine that pulled it.

    - `tokens` were received, `cached` were already there. `reserved`: blocks were reserved.
    - `seconds`: the whole transfer. `busy_s`: of these, while the engine computed for other requests. `waited_s`: of
      these, while KV was not computed yet. `span_s`: of these, from the first KV to the end; 0: not told.
    - `pauses`: the longest times after the first KV in which none came, MOST_PAUSES at most. Three numbers for each,
      the earliest first: how many seconds before the end of the transfer it began and ended, and the share of the KV
      that had come before.
    - `bytes`: all that was received. `early_bytes`: of these, sent while the prompt was still being computed.
    - With flow scheduling `flow` is `scheduled`, or why it was not; otherwise it is empty. `held_s`: of `seconds`,
      while the source might not send. `level`: its last one, 1 the most urgent. `promotions`: levels that it rose by.
    - `error`: with a `reason`, what happened, for people. Only of an engine that then computed the prompt itself: the
      answers of others are errors, which say it.
    """

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
    held_s: float = 0.0
    promotions: int = 0
    level: int = 0
    flow: str = ""
    error: str = ""
    span_s: float = 0.0
    pauses: tuple[float, ...] = ()

    @property
    def moving_s(self) -> float:
        """Seconds without those in which it was held: what says how fast the link is."""
        return max(0.0, self.seconds - self.held_s)


def moved_from_json(raw: Any) -> KvMoved | None:
    """The inverse of `_asdict` after JSON; None unless it is such an object."""
    if not isinstance(raw, Mapping):
        return None
    try:
        found = {name: type(default)(raw[name]) for name, default in _MOVED.items() if name in raw}
        found["pauses"] = _pauses(found.get("pauses", ()))
    except (TypeError, ValueError, OverflowError):
        return None
    too_large = any(isinstance(value, int) and abs(value) >= INT64 for value in found.values())
    return None if too_large else KvMoved(**found)


_MOVED: Mapping[str, Any] = KvMoved()._asdict()


def _pauses(raw: tuple[Any, ...]) -> tuple[float, ...]:
    """Raises TypeError or ValueError unless these are pauses that do not overlap, and shares that do not fall."""
    found = tuple(float(each) for each in raw)
    before = [at for pair in zip(found[::3], found[1::3], strict=False) for at in pair]
    fall = all(one >= other for one, other in itertools.pairwise((INT64, *before, 0.0)))
    rise = all(one <= other for one, other in itertools.pairwise((0.0, *found[2::3], 1.0)))
    if len(found) % 3 or len(found) > 3 * MOST_PAUSES or not (fall and rise):
        raise ValueError(f"{str(raw)[:30]} are no pauses")
    return found


class BorrowedKv(NamedTuple):
    """The KV of the beginning of a prompt, copied from the engine `source`, which had it cached. With a `reason` in
    `moved` the copy ended early, and the prompt was computed instead."""

    source: str
    moved: KvMoved

    def as_json(self) -> dict[str, Any]:
        return {"source": self.source, **self.moved._asdict()}


def borrowed_from_json(raw: Any) -> BorrowedKv | None:
    """The inverse of `as_json` after JSON; None unless it is such an object."""
    moved, source = moved_from_json(raw), raw.get("source") if isinstance(raw, Mapping) else None
    return BorrowedKv(source, moved) if moved is not None and isinstance(source, str) else None
