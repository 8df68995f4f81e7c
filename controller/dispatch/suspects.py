"""Which request ends engines: what several deaths have in common. Pure, for gateway and simulator alike.

An engine that dies takes all its requests along, and all but one are innocent. Each that had no token yet is queued
again as a suspect and is computed alone: until its first token no other request of this gateway waits for one at the
same instance (`Lane.may_go`). If an instance dies then, there is no doubt which request it was; those that get their
token are cleared. At most `most_engines_ended` engines later the one at fault fails, and the same request is refused
for `quarantine_s`: clients repeat what fails. Decode stages are placed by the migrator and are not alone; there the
one that was at an earlier death is at fault, if it is the only one. Decision 176.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from controller.core import events as ev
from controller.core.decisions import Figure
from controller.core.types import Request
from controller.dispatch.lane import refuse

SAME_DEATH_S = 5.0  # between a failed call and the news that its instance is down
HOLD_S = 2.0  # before a suspect whose call failed is sent again: by then it is known whether that engine died
MOST_QUARANTINED = 1_000
RETRY_AFTER_S = 1.0  # without quarantine


class Present(NamedTuple):
    """A request at an instance without a token at its client. `computing`: it may be what the instance computes. A
    request that is not streamed shows no token: of that the end of the prefill is predicted."""

    request: Request
    computing: bool


class Death:
    """One death of an instance, which may be news before it is certain. `accused`: what it computed then; else what
    was there."""

    __slots__ = ("accused", "at", "certain", "victims")

    def __init__(self, at: float, accused: frozenset[str]) -> None:
        self.at = at
        self.accused = accused
        self.victims: dict[str, Request] = {}
        self.certain = False


class Suspects:
    """Requests that were at engines when they died, and the quarantine. Times are the scheduler's.

    `deaths` and `quarantine` are empty in most fleets at most times, and nobody needs to ask anything then. Of those in
    quarantine some may be past their time."""

    def __init__(self, most_ended: int = 2, quarantine_s: float = 600.0) -> None:
        self._most_ended = most_ended
        self._quarantine_s = quarantine_s
        self.deaths: dict[str, Death] = {}
        self._failed: dict[str, dict[str, tuple[float, Request]]] = {}  # by instance: calls that failed lately
        self.quarantine: dict[str, tuple[float, str]] = {}  # by fingerprint: until when, and the engines

    # ---- deaths ----------------------------------------------------------------------------------------------------

    def lost(self, request: Request, instance_id: str, present: Callable[[], Iterable[Present]], now: float) -> bool:
        """Its connection broke, or its instance went down. Whether it is at fault."""
        death = self._death(instance_id, present, now)
        self._count(request, instance_id, death)
        return self._guilty(request, death)

    def failed(self, request: Request, instance_id: str, now: float) -> float:
        """Its call failed at an engine that answered. For how many seconds it is not sent again.

        Some engines answer with an error before they go down (`down`).
        """
        calls = self._failed.setdefault(instance_id, {})
        for name, (at, _) in list(calls.items()):
            if at < now - SAME_DEATH_S:
                del calls[name]
        calls[request.id] = now, request
        return HOLD_S if request.ended else 0.0

    def down(self, instance_id: str, present: Callable[[], Iterable[Present]], now: float) -> list[Request]:
        """The instance died. Those at fault among the requests that it lost or whose calls failed there just before."""
        calls = [request for at, request in self._failed.pop(instance_id, {}).values() if at >= now - SAME_DEATH_S]
        both = [*(Present(request, True) for request in calls), *present()]
        death = self._death(instance_id, lambda: both, now)
        death.certain = True
        for request in calls:
            self._count(request, instance_id, death)
        return [request for request in death.victims.values() if self._guilty(request, death)]

    def alive(self, instance_id: str, observed_at: float) -> None:
        """Telemetry came, so a broken connection was no death."""
        death = self.deaths.get(instance_id)
        if death is None or death.certain or observed_at <= death.at:
            return
        del self.deaths[instance_id]
        for request in death.victims.values():
            kept = list(request.ended)
            if instance_id in kept:
                kept.remove(instance_id)
            request.ended = tuple(kept)

    def certain(self, instance_id: str, now: float) -> bool:
        """Whether it died just now."""
        death = self.deaths.get(instance_id)
        return death is not None and death.certain and now - death.at <= SAME_DEATH_S

    def _death(self, instance_id: str, present: Callable[[], Iterable[Present]], now: float) -> Death:
        death = self.deaths.get(instance_id)
        if death is None or now - death.at > SAME_DEATH_S:
            there = list(present())
            accused = frozenset(each.request.id for each in there if each.computing)
            accused = accused or frozenset(each.request.id for each in there)
            death = self.deaths[instance_id] = Death(now, accused)
        return death

    @staticmethod
    def _count(request: Request, instance_id: str, death: Death) -> None:
        if request.id not in death.victims:
            death.victims[request.id] = request
            request.ended += (instance_id,)

    def _guilty(self, request: Request, death: Death) -> bool:
        return len(request.ended) >= self._most_ended and death.accused == {request.id}

    # ---- what follows ----------------------------------------------------------------------------------------------

    def convict(self, request: Request, now: float) -> ev.Refuse:
        """It fails, and the same one is refused for a while."""
        engines = ", ".join(request.ended)
        quarantined = self._quarantine_s > 0 and bool(request.fingerprint)
        if quarantined:
            while len(self.quarantine) >= MOST_QUARANTINED:
                del self.quarantine[next(iter(self.quarantine))]  # the oldest
            self.quarantine[request.fingerprint] = now + self._quarantine_s, engines
        figures: dict[str, Figure] = {"died": engines, "attempts": len(request.ended)}
        if quarantined:
            figures["quarantine_s"] = self._quarantine_s
        retry_after_s = self._quarantine_s if quarantined else RETRY_AFTER_S
        return refuse(request, "ends_engines", "ended_engines", retry_after_s, now, figures)

    def refusal(self, request: Request, now: float) -> ev.Refuse | None:
        """Of a request that arrives, if it is in quarantine."""
        until, engines = self.quarantine.get(request.fingerprint, (0.0, ""))
        if not engines:
            return None
        if until <= now:
            del self.quarantine[request.fingerprint]
            return None
        figures: dict[str, Figure] = {"died": engines, "quarantine_s": until - now}
        return refuse(request, "ends_engines", "quarantined", until - now, now, figures)
