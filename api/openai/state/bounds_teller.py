"""Tells engines the bounds of running answers that were predicted again: one call at a time for each instance, with all
that came since. Nothing waits for it, and bounds that an engine did not take are not sent again: newer ones follow with
the next 50 tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from workers.backends.base import Backend, EngineError

MOST_BOUNDS = 5_000  # of one call; beyond that they are not told
AGAIN_S = 60.0  # how long an engine that refused them is not told any
FAILED_AGAIN_S = 5.0  # the same, of an engine that did not take them for another reason
REFUSED = (403, 404)  # no fleet's token, or an older engine

log = logging.getLogger(__name__)


class BoundsTeller:
    """`spawn`: runs a call as a task. `refused`: engines that took none the last time, and until when they are not told
    any. An engine that fails is logged when that begins, when its error changes, and when it takes bounds again."""

    def __init__(
        self,
        backends: Mapping[str, Backend],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        clock: Callable[[], float],
    ) -> None:
        self._backends = backends
        self._spawn = spawn
        self._clock = clock
        self._next: dict[str, dict[str, tuple[int, int]]] = {}  # by instance: for its next call
        self._calling: set[str] = set()
        self.refused: dict[str, float] = {}
        self._errors: dict[str, str] = {}  # by instance: of its last call, as logged

    def add(self, instance_id: str, request_id: str, bounds: tuple[int, int]) -> None:
        """The newest bounds of a request replace those that wait."""
        backend = self._backends.get(instance_id)
        if backend is None or not backend.capabilities.takes_bounds:
            return
        if self.refused.get(instance_id, self._clock()) > self._clock():
            return
        waiting = self._next.setdefault(instance_id, {})
        if request_id in waiting or len(waiting) < MOST_BOUNDS:
            waiting[request_id] = bounds

    def send(self) -> None:
        """One call to each instance that has none under way."""
        for instance_id in [each for each in self._next if each not in self._calling]:
            bounds, backend = self._next.pop(instance_id), self._backends.get(instance_id)
            if backend is not None:
                self._calling.add(instance_id)
                self._spawn(self._tell(instance_id, backend, bounds))

    async def _tell(self, instance_id: str, backend: Backend, bounds: Mapping[str, tuple[int, int]]) -> None:
        try:
            await backend.tell_bounds(bounds)
            self.refused.pop(instance_id, None)
            if self._errors.pop(instance_id, None) is not None:
                log.info("instance %s takes the bounds of answers again", instance_id)
        except EngineError as error:
            again_s = AGAIN_S if error.status in REFUSED else FAILED_AGAIN_S
            self.refused[instance_id] = self._clock() + again_s
            self._next.pop(instance_id, None)  # what came during the call would be sent at once
            if self._errors.get(instance_id) != str(error):
                self._errors[instance_id] = str(error)
                log.info("instance %s was not told the bounds of %d answers: %s", instance_id, len(bounds), error)
        finally:
            self._calling.discard(instance_id)
