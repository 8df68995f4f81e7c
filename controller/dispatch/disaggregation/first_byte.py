"""How long after its prefill the client of a disaggregated request has its first byte, for the dispatcher's chances.

The first byte comes from the decode engine, so a request needs more than its prefill within its TTFT: it waits for a
decode instance, its KV moves, and the decode engine answers. The scheduler tells the dispatcher what to expect.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from controller.core import events as ev
from controller.core.types import Role
from controller.dispatch.disaggregation.link_book import LinkBook
from controller.dispatch.disaggregation.transfers import DecodeTransfer
from controller.dispatch.shadow_state import Worker

NEWEST = 0.2  # least weight of the newest sample in a mean
FORGETS_S = 5.0  # after a pause of about this long the newest sample is what counts
TELL_EVERY_S = 2.0  # what is told may have the whole queue judged again
SAME_PART = 0.3  # a change by less than this part of what was told last is not told,
SAME_S = 0.02  # nor one by less than this


class FirstBytes:
    """Learns what follows a prefill, by model; what KV takes on measured links is known for each prefill instance.

    `workers` and `links` are the migrator's. `now` in seconds.
    """

    def __init__(self, workers: Mapping[str, Worker], links: LinkBook) -> None:
        self._workers = workers
        self._links = links
        self._rest: dict[str, tuple[float, float]] = {}  # by model: seconds beyond the expected transfer, and when seen
        self._told: dict[str, tuple[float, float]] = {}
        self._tell_at = 0.0
        self._learned = True  # or there may be measured links

    def came(self, transfer: DecodeTransfer, now: float) -> None:
        """The first byte came from its decode instance. One that was hopeless waited for all others, so it can only
        show that the delay is smaller."""
        request = transfer.request
        begun = transfer.due if transfer.paired else transfer.stage.first_at
        tokens = transfer.kv_tokens or request.prompt_tokens
        move_s = self._links.move_s((transfer.source, transfer.target), tokens)
        rest = max(0.0, now - begun) - (move_s or 0.0)
        before, at = self._rest.get(request.model, (0.0, -math.inf))
        if transfer.hopeless and rest > before:
            return
        weight = max(NEWEST, 1.0 - math.exp((at - now) / FORGETS_S))
        self._rest[request.model] = (before + weight * (rest - before), now)
        self._learned = True

    def news(self, now: float) -> list[ev.Event]:
        """What the dispatcher should know and was not told yet."""
        if not self._learned or now < self._tell_at:
            return []
        self._learned, self._tell_at = False, now + TELL_EVERY_S
        found: list[ev.Event] = []
        for worker in self._workers.values():
            if worker.spec.role is not Role.PREFILL:
                continue
            delay = self._after(worker)
            if _differs(delay, self._told.get(worker.id, (0.0, 0.0))):
                self._told[worker.id] = delay
                found.append(ev.FirstByteDelay(worker.id, *delay))
        return found

    def forget(self, instance_id: str) -> None:
        """It is gone, and one of the same name begins with nothing told."""
        self._told.pop(instance_id, None)

    def _after(self, source: Worker) -> tuple[float, float]:
        """Seconds after its prefills: of any request, and of each token of its prompt."""
        model = source.spec.model
        targets = [w.id for w in self._workers.values() if w.spec.model == model and w.spec.role is Role.DECODE]
        latency_s, s_a_token = self._links.mean_move(source.id, targets)
        return latency_s + self._rest.get(model, (0.0, 0.0))[0], s_a_token


def _differs(new: tuple[float, float], told: tuple[float, float]) -> bool:
    return any(
        abs(mine - old) * tokens > max(SAME_S, SAME_PART * abs(old) * tokens)
        for mine, old, tokens in zip(new, told, (1, 1_000), strict=True)
    )
