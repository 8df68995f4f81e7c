"""How long after its prefill the client of a disaggregated request has its first byte at the earliest, for the
dispatcher's chances, and how long decoding takes then, for orderings that rank by instance.

The first byte comes from the decode engine, so a request needs more than its prefill within its TTFT: its KV moves, and
the decode engine answers. How long others waited for a decode instance does not count: those whose first byte is due
first are placed first, so under load all waits approach the TTFT, and every new request would look hopeless (decision
142). The scheduler tells the dispatcher what to expect.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from controller.core import events as ev
from controller.core.types import Role
from controller.dispatch.disaggregation.link_book import LinkBook
from controller.dispatch.disaggregation.transfers import DecodeTransfer
from controller.dispatch.lane import steps_of
from controller.dispatch.shadow_state import ShadowInstance

WINDOW_S = 5.0  # the least delay of this window and of the one before counts
TELL_EVERY_S = 2.0  # what is told may have the whole queue judged again
SAME_PART = 0.3  # a change by less than this part of what was told last is not told,
PACE_PART = 0.05  # the same of how fast decoding is, which has nothing judged again
SAME_S = 0.02  # nor one by less than this


class FirstBytes:
    """Learns what follows a placement, by model; what KV takes on measured links is known for each prefill instance.

    `instances` and `links` are the migrator's. `now` in seconds.
    """

    def __init__(self, instances: Mapping[str, ShadowInstance], links: LinkBook) -> None:
        self._instances = instances
        self._links = links
        self._rest: dict[str, Recent] = {}  # by model: seconds beyond the expected transfer
        self._told: dict[str, tuple[float, float]] = {}
        self._paces: dict[str, tuple[float, float, float]] = {}  # told likewise
        self._tell_at = 0.0
        self._learned = True  # or there may be measured links

    def came(self, transfer: DecodeTransfer, now: float) -> None:
        """The first byte came from its decode instance."""
        request = transfer.request
        begun = max(transfer.stage.first_at, transfer.placed_at)
        tokens = transfer.kv_tokens or request.prompt_tokens
        move_s = self._links.move_s((transfer.source, transfer.target), tokens)
        rest = max(0.0, now - begun) - (move_s or 0.0)
        self._rest.setdefault(request.model, Recent()).add(rest, now)
        self._learned = True

    def news(self, now: float) -> list[ev.Event]:
        """What the dispatcher should know and was not told yet."""
        if not self._learned or now < self._tell_at:
            return []
        self._learned, self._tell_at = False, now + TELL_EVERY_S
        found: list[ev.Event] = []
        paces = {model: self._pace(model) for model in {each.spec.model for each in self._instances.values()}}
        for instance in self._instances.values():
            if instance.spec.role is not Role.PREFILL:
                continue
            delay = self._after(instance)
            if _differs(delay, self._told.get(instance.id, (0.0, 0.0))):
                self._told[instance.id] = delay
                found.append(ev.FirstByteDelay(instance.id, *delay))
            pace = paces[instance.spec.model]
            if pace is not None and _changed(pace, self._paces.get(instance.id)):
                self._paces[instance.id] = pace
                found.append(ev.DecodePace(instance.id, *pace))
        return found

    def forget(self, instance_id: str) -> None:
        """It is gone, and one of the same name begins with nothing told."""
        self._told.pop(instance_id, None)
        self._paces.pop(instance_id, None)

    def _after(self, source: ShadowInstance) -> tuple[float, float]:
        """Seconds after its prefills: of any request, and of each token of its prompt."""
        model = source.spec.model
        targets = [
            each.id for each in self._instances.values() if each.spec.model == model and each.spec.role is Role.DECODE
        ]
        latency_s, s_a_token = self._links.mean_move(source.id, targets)
        recent = self._rest.get(model)
        return latency_s + (recent.least if recent is not None else 0.0), s_a_token

    def _pace(self, model: str) -> tuple[float, float, float] | None:
        """Of its decode instances: seconds of a step, of the quickest one, and sequences for each prefill instance."""
        ours = [each for each in self._instances.values() if each.spec.model == model]
        decoding = [each for each in ours if each.takes_decodes]
        if not decoding:
            return None
        steps, quickest = zip(*map(steps_of, decoding), strict=True)
        prefilling = sum(each.spec.role is Role.PREFILL for each in ours)
        return sum(steps) / len(steps), min(quickest), sum(each.outstanding for each in decoding) / max(1, prefilling)


class Recent:
    """The least of recent samples."""

    __slots__ = ("_before", "_ends_at", "_now")

    def __init__(self) -> None:
        self._now = self._before = math.inf
        self._ends_at = -math.inf

    def add(self, sample: float, now: float) -> None:
        if now >= self._ends_at:
            self._before = self._now if now < self._ends_at + WINDOW_S else math.inf
            self._now, self._ends_at = math.inf, now + WINDOW_S
        self._now = min(self._now, sample)

    @property
    def least(self) -> float:
        """0 before the first sample."""
        least = min(self._now, self._before)
        return 0.0 if math.isinf(least) else least


def _changed(new: tuple[float, ...], told: tuple[float, ...] | None) -> bool:
    return told is None or any(abs(mine - old) > PACE_PART * abs(old) for mine, old in zip(new, told, strict=True))


def _differs(new: tuple[float, float], told: tuple[float, float]) -> bool:
    return any(
        abs(mine - old) * tokens > max(SAME_S, SAME_PART * abs(old) * tokens)
        for mine, old, tokens in zip(new, told, (1, 1_000), strict=True)
    )
