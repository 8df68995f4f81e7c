"""Which gateways use which version of what is learned from records, since when, and which are behind; and what became
of earlier versions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from controller.core.messages import MOST_LEARNED, FleetMessage, LearnedMessage
from controller.core.staleness import is_fresh
from controller.models import GraphVersion, LearnedTakeover, LengthVersion

Version = LengthVersion | GraphVersion

TAKEOVER_S = 10.0  # gateways look every two seconds, and read for at most eight

CURRENT, COMING, BEHIND, SILENT, UNKNOWN = "current", "coming", "behind", "silent", "unknown"


@dataclass(frozen=True, slots=True)
class Takeover:
    """One gateway. `state`: CURRENT, it uses the version in force; COMING, that was published a moment ago; BEHIND, it
    uses another one or none; SILENT, its report is stale; UNKNOWN, it reports nothing of this. `version` None: it uses
    none, or that is unknown. `seconds`: from the training of the version in force until the gateway used it; None: it
    does not."""

    gateway: str
    state: str
    reported_at: datetime
    version: int | None = None
    digest: str = ""
    taken_at: datetime | None = None
    seconds: float | None = None
    problem: str = ""


def takeovers(
    fleets: Iterable[FleetMessage],
    what: str,
    subject: str,
    in_force: Version | None,
    now: datetime,
) -> list[Takeover]:
    """By name of the gateway. `what`: LENGTHS or GRAPHS, `subject`: model or tenant."""
    return [_of(fleet, what, subject, in_force, now) for fleet in sorted(fleets, key=lambda fleet: fleet["gateway"])]


def _of(fleet: FleetMessage, what: str, subject: str, in_force: Version | None, now: datetime) -> Takeover:
    reported = [each for each in fleet.get("learned", []) if each["what"] == what]
    said = next((each for each in reported if each["subject"] == subject), None)
    reported_at = datetime.fromtimestamp(fleet["at"], UTC)
    state = _state(said, in_force, now)
    if said is None and ("learned" not in fleet or len(reported) >= MOST_LEARNED):
        state = UNKNOWN
    if not is_fresh(fleet["at"], fleet["period_s"], now.timestamp()):
        state = SILENT
    if said is None:
        return Takeover(fleet["gateway"], state, reported_at)
    taken_at = None if said["taken_at"] is None else datetime.fromtimestamp(said["taken_at"], UTC)
    same = in_force is not None and said["digest"] == in_force.digest
    took_s = (taken_at - in_force.trained_at).total_seconds() if same and taken_at and in_force else None
    return Takeover(
        fleet["gateway"], state, reported_at, said["version"], said["digest"], taken_at, took_s, said["problem"]
    )


def _state(said: LearnedMessage | None, in_force: Version | None, now: datetime) -> str:
    if in_force is None:
        return CURRENT if said is None or said["version"] is None else BEHIND
    if said is not None and said["version"] is not None and said["digest"] == in_force.digest:
        return CURRENT
    problem = said is not None and said["problem"]
    return COMING if not problem and (now - in_force.trained_at).total_seconds() <= TAKEOVER_S else BEHIND


@dataclass(frozen=True, slots=True)
class GatewayOutcome:
    """What a gateway did with a version: it took it over, or not because of a `problem`. `seconds`: from the training
    until it first did. `times` is above 1 where it did so again, the last time at `last_at`: after restarts."""

    gateway: str
    problem: str
    first_at: datetime
    last_at: datetime
    times: int
    seconds: float


def outcomes_of(what: str, subject: str, versions: Sequence[Version]) -> Mapping[int, Sequence[GatewayOutcome]]:
    """By version, in the order in which they first came. One query."""
    trained = {row.version: row.trained_at for row in versions}
    rows = LearnedTakeover.objects.filter(what=what, subject=subject, version__in=trained)
    found: dict[int, list[GatewayOutcome]] = {}
    for row in rows.order_by("first_at", "id"):
        seconds = (row.first_at - trained[row.version]).total_seconds()
        one = GatewayOutcome(row.gateway, row.problem, row.first_at, row.last_at, row.times, seconds)
        found.setdefault(row.version, []).append(one)
    return found
