"""What to do about each instance, from what is wanted and what is seen.

Level-triggered: the same look twice, or after a crash in the middle, leads to the same end.

Marks are written first (they are the record), calls to the provisioner follow and are repeated by the next look until
they show. A process that exits is not started again under its id: it failed, and another takes its place, after a pause
that grows with the number of recent failures. An endpoint that somebody else runs is never replaced, only unreachable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

START_TIMEOUT_S = 180.0  # from the wish to ready
DRAIN_TIMEOUT_S = 120.0  # then what still runs is cut
SETTLE_S = 2.0  # a gateway polls its configuration twice a second: before that a drain may be unknown to it
STOP_GRACE_S = 15.0
SETTINGS_REFUSED = 2  # exit code of a command line that cannot be followed
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """One live instance row. `since`: when the wish last changed; `run`: start of the run the row knows of.

    `replaceable`: its provisioner makes processes. `outstanding` None: nobody knows how much it still has to do.
    """

    id: str
    desired: str  # running | draining | stopped
    state: str  # as recorded: pending | starting | ready | draining | unreachable | failed | stopped
    since: float
    url: str = ""
    run: float | None = None
    replaceable: bool = True
    outstanding: int | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """One instance as its provisioner sees it: starting | ready | stopping | exited. `awake`: of one that sleeps by its
    row, the version of that row if it says that it is awake."""

    state: str
    url: str = ""
    started_at: float | None = None
    exit_code: int | None = None
    error: str = ""
    awake: int | None = None


class Mark(NamedTuple):
    """Record that the instance is now in `state`; `again`: it is a new run under the same id."""

    id: str
    state: str
    reason: str
    url: str = ""
    error: str = ""
    started_at: float | None = None
    again: bool = False


class FoundAwake(NamedTuple):
    """It sleeps by its row, of this version, and says that it is awake."""

    id: str
    version: int


class Replace(NamedTuple):
    """The instance failed; put another with the same specification in its place. `refused`: what its process said
    against its settings, if that is why it ended."""

    id: str
    reason: str
    error: str
    refused: str = ""


class StopWanted(NamedTuple):
    """A drain has come to its end: the wish becomes `stopped`."""

    id: str
    reason: str


class CallStart(NamedTuple):
    id: str


class CallStop(NamedTuple):
    id: str
    grace_s: float


Step = Mark | FoundAwake | Replace | StopWanted | CallStart | CallStop


def converge(wanted: Iterable[Wanted], seen: Mapping[str, Seen], now: float) -> list[Step]:
    """All steps of one look, in order of ids. What is seen but belongs to no live row is stopped. O(n log n)."""
    rows = {row.id: row for row in wanted}
    steps: list[Step] = []
    for id, row in sorted(rows.items()):
        look = {"running": _running, "draining": _draining, "stopped": _stopped}[row.desired]
        steps += look(row, seen.get(id), now)
    return steps + [CallStop(id, STOP_GRACE_S) for id in sorted(seen.keys() - rows.keys())]


def pause_before_start(recent_failures: int) -> float:
    """Seconds a replacement waits: 0 after the first failure, then 1, 2, 4 ... up to a minute."""
    return 0.0 if recent_failures <= 1 else min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (recent_failures - 2))


def _running(row: Wanted, seen: Seen | None, now: float) -> list[Step]:
    if seen is None:
        return [CallStart(row.id)] if now >= row.since else []
    if seen.state == "exited":
        return _lost(row, seen)
    if seen.state == "stopping":  # wanted again while it stops: its end comes first
        return []
    if seen.state == "ready":
        awake = [] if seen.awake is None else [FoundAwake(row.id, seen.awake)]
        return [*_up(row, seen, "ready"), *awake]
    late = now - max(row.since, seen.started_at or row.since) > START_TIMEOUT_S
    if row.replaceable and late:
        return [Replace(row.id, "start_timeout", f"not ready within {START_TIMEOUT_S:.0f} s"), CallStop(row.id, 0.0)]
    state = "starting" if row.replaceable else "unreachable"
    return [] if row.state == state and not _again(row, seen) else [_mark(row, seen, state, state)]


def _up(row: Wanted, seen: Seen, state: str) -> list[Step]:
    if row.state == state and row.url == seen.url and not _again(row, seen):
        return []
    reason = "healthy" if not _again(row, seen) else "new_run"
    return [_mark(row, seen, state, reason)]


def _lost(row: Wanted, seen: Seen) -> list[Step]:
    if not row.replaceable:
        return [] if row.state == "unreachable" else [_mark(row, seen, "unreachable", "no_answer")]
    code = seen.exit_code
    how = "" if code is None else f"was killed by signal {-code}" if code < 0 else f"exit code {code}"
    refused = (seen.error or how) if code == SETTINGS_REFUSED else ""
    error = ": ".join(part for part in (how, seen.error) if part)
    return [Replace(row.id, "exited", error, refused), CallStop(row.id, 0.0)]


def _draining(row: Wanted, seen: Seen | None, now: float) -> list[Step]:
    if seen is None or (seen.state == "exited" and row.replaceable):
        return [StopWanted(row.id, "ended_while_draining")]
    waited = now - row.since
    if waited >= SETTLE_S and row.outstanding == 0:
        return [StopWanted(row.id, "drained")]
    if waited >= DRAIN_TIMEOUT_S:
        return [StopWanted(row.id, "drain_timeout")]
    return _up(row, seen, "draining") if seen.state == "ready" else []


def _stopped(row: Wanted, seen: Seen | None, now: float) -> list[Step]:
    gone = seen is None or not row.replaceable
    if not gone:
        return [CallStop(row.id, STOP_GRACE_S)]  # also clears what an exited one left
    return [Mark(row.id, "stopped", "stopped"), CallStop(row.id, 0.0)]


def _again(row: Wanted, seen: Seen) -> bool:
    """Seen with another start than the one on record: it was started again over the same id."""
    return row.run is not None and seen.started_at is not None and seen.started_at > row.run + 1.0


def _mark(row: Wanted, seen: Seen, state: str, reason: str) -> Mark:
    return Mark(row.id, state, reason, seen.url, seen.error, seen.started_at, _again(row, seen))
