"""What the reconciler does about each instance, from its desired state and its observed state.

Level-triggered: looking twice, or again after a crash in the middle, leads to the same result.

Marks are written first, since they are the record. Calls to the provisioner follow, and every look repeats them until
they show. A process that exits is not started again under its id: the instance has failed, and another one replaces it
after a pause that grows with the number of recent failures. An endpoint that somebody else runs is never replaced, only
marked unreachable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from controller.core.types import LONGEST_ANSWER_S

START_TIMEOUT_S = 180.0  # from the change of the desired state to ready
SETTLE_S = 2.0  # a gateway polls its configuration twice a second, so it may not know of a younger drain yet
STOP_GRACE_S = 15.0
SETTINGS_REFUSED = 2  # exit code of an engine that does not accept its command line
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """One live instance as the database has it. `since`: when its desired state last changed; `run`: start of the run
    that the row knows of. Times are epoch seconds.

    `replaceable`: its provisioner starts processes. `start_limit_s`: from its start until it is ready. `outstanding`:
    requests that run or wait there, or whose KV it keeps; None: unknown.
    """

    id: str
    desired: str  # running | draining | stopped
    state: str  # as recorded; see Instance.Observed
    since: float
    url: str = ""
    error: str = ""
    run: float | None = None
    replaceable: bool = True
    start_limit_s: float = START_TIMEOUT_S
    outstanding: int | None = None


@dataclass(frozen=True, slots=True)
class Seen:
    """One instance as its provisioner sees it. `state`: pending | starting | ready | unhealthy | stopping | lost |
    exited. `awake`: the version of its row, where that row says that it sleeps and the engine says that it is awake."""

    state: str
    url: str = ""
    started_at: float | None = None
    exit_code: int | None = None
    error: str = ""
    awake: int | None = None


class Mark(NamedTuple):
    """Record that the instance is now in `state`. `again`: this is a new run under the same id."""

    id: str
    state: str
    reason: str
    url: str = ""
    error: str = ""
    started_at: float | None = None
    again: bool = False


class FoundAwake(NamedTuple):
    """The row of this version says that it sleeps, and the engine says that it is awake."""

    id: str
    version: int


class Replace(NamedTuple):
    """The instance failed: start another one with the same specification. `refused`: why its process did not accept its
    settings, if that is why it exited."""

    id: str
    reason: str
    error: str
    refused: str = ""


class StopWanted(NamedTuple):
    """The drain has ended: the desired state becomes `stopped`."""

    id: str
    reason: str


class CallStart(NamedTuple):
    id: str


class CallStop(NamedTuple):
    id: str
    grace_s: float


Step = Mark | FoundAwake | Replace | StopWanted | CallStart | CallStop


def converge(
    wanted: Iterable[Wanted], seen: Mapping[str, Seen], now: float, drain_timeout_s: float = LONGEST_ANSWER_S
) -> list[Step]:
    """All steps of one look, in order of ids. A process that belongs to no live row is stopped. O(n log n).

    `drain_timeout_s`: requests that still run this long after the drain began are cut off."""
    rows = {row.id: row for row in wanted}
    steps: list[Step] = []
    for id, row in sorted(rows.items()):
        if row.desired == "draining":
            steps += _draining(row, seen.get(id), now, drain_timeout_s)
        else:
            steps += (_running if row.desired == "running" else _stopped)(row, seen.get(id), now)
    return steps + [CallStop(id, STOP_GRACE_S) for id in sorted(seen.keys() - rows.keys())]


def pause_before_start(recent_failures: int) -> float:
    """Seconds before a replacement starts: 0 after the first failure, then 1, 2, 4 and so on up to a minute."""
    return 0.0 if recent_failures <= 1 else min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (recent_failures - 2))


def _running(row: Wanted, seen: Seen | None, now: float) -> list[Step]:
    if seen is None:
        return [CallStart(row.id)] if now >= row.since else []
    match seen.state:
        case "pending":  # it waits for room, which is no failure of the instance, so no limit applies
            waits = row.state == "pending" and row.error == seen.error
            return [] if waits else [_mark(row, seen, "pending", "waits")]
        case "unhealthy" | "lost":
            return _in_doubt(row, seen)
        case "ready":
            awake = [] if seen.awake is None else [FoundAwake(row.id, seen.awake)]
            return [*_up(row, seen, "ready"), *awake]
        case "starting":
            return _starting(row, seen, now)
        case _:  # one that is stopping should run again, but has to end first
            return _lost(row, seen) if seen.state == "exited" else []


def _starting(row: Wanted, seen: Seen, now: float) -> list[Step]:
    late = now - max(row.since, seen.started_at or row.since) > row.start_limit_s
    if row.replaceable and late:
        return [Replace(row.id, "start_timeout", f"not ready within {row.start_limit_s:.0f} s"), CallStop(row.id, 0.0)]
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


def _in_doubt(row: Wanted, seen: Seen) -> list[Step]:
    """It may still run, so it gets no requests and is not replaced: another one under its address or on its devices
    would meet it. Its provisioner reports `exited` once it has certainly ended."""
    reason = "failed_checks" if seen.state == "unhealthy" else "out_of_sight"
    return [] if row.state == seen.state else [_mark(row, seen, seen.state, reason)]


def _draining(row: Wanted, seen: Seen | None, now: float, timeout_s: float) -> list[Step]:
    if seen is None or (seen.state == "exited" and row.replaceable):
        return [StopWanted(row.id, "ended_while_draining")]
    waited = now - row.since
    if waited >= SETTLE_S and row.outstanding == 0:
        return [StopWanted(row.id, "drained")]
    if waited >= timeout_s:
        return [StopWanted(row.id, "drain_timeout")]
    return _up(row, seen, "draining") if seen.state == "ready" else []


def _stopped(row: Wanted, seen: Seen | None, now: float) -> list[Step]:
    gone = seen is None or not row.replaceable
    if not gone:
        return [CallStop(row.id, STOP_GRACE_S)]  # also clears what an exited process left behind
    return [Mark(row.id, "stopped", "stopped"), CallStop(row.id, 0.0)]


def _again(row: Wanted, seen: Seen) -> bool:
    """It was started again under the same id: its start is later than the one on record."""
    return row.run is not None and seen.started_at is not None and seen.started_at > row.run + 1.0


def _mark(row: Wanted, seen: Seen, state: str, reason: str) -> Mark:
    return Mark(row.id, state, reason, seen.url, seen.error, seen.started_at, _again(row, seen))
