"""Looks at all provisioners at once, each by itself: one that raises, hangs or is away does not delay the others, and
its instances stay as they were last seen."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass

from controller.core.errors import Unseen
from controller.scale.provisioning import abilities
from workers.provisioners.base import Observed, Provisioner


@dataclass(frozen=True, slots=True)
class Observation:
    """What one provisioner has; `seen` None: it could not be seen, because of `error`."""

    seen: tuple[Observed, ...] | None
    error: str = ""


class Observer:
    """Kept between the rounds of one process. A provisioner that is late is not asked again until its call has ended,
    and nobody waits for it until then. Not thread-safe."""

    def __init__(self, limit_s: Callable[[str], float] = lambda name: abilities(name).observe_s) -> None:
        self._limit_s = limit_s
        self._late: dict[str, tuple[Future[list[Observed]], float]] = {}

    def at(self, by_name: Mapping[str, Provisioner]) -> dict[str, Observation]:
        """One look at each. Takes as long as the longest limit of those that are not late already."""
        began = time.monotonic()
        calls = {name: self._begun(name, each) for name, each in by_name.items() if name not in self._running()}
        found = {name: self._outcome(name, future, began) for name, future in calls.items()}
        for name in by_name.keys() - calls.keys():
            late_s = began - self._late[name][1]
            found[name] = Observation(None, f"has not responded for {late_s:.0f} s")
        return {name: found[name] for name in by_name}

    def _running(self) -> set[str]:
        self._late = {name: call for name, call in self._late.items() if not call[0].done()}
        return set(self._late)

    def _begun(self, name: str, provisioner: Provisioner) -> Future[list[Observed]]:
        future: Future[list[Observed]] = Future()
        threading.Thread(target=_observe, args=(provisioner, future), name=f"observe-{name}", daemon=True).start()
        return future

    def _outcome(self, name: str, future: Future[list[Observed]], began: float) -> Observation:
        limit_s = self._limit_s(name)
        wait([future], max(0.0, began + limit_s - time.monotonic()))
        if not future.done():
            self._late[name] = (future, began)
            return Observation(None, f"has not responded within {limit_s:g} s")
        error = future.exception()
        if error is not None:
            return Observation(None, str(error) if isinstance(error, Unseen) else f"{type(error).__name__}: {error}")
        return Observation(tuple(future.result()))


def _observe(provisioner: Provisioner, future: Future[list[Observed]]) -> None:
    try:
        future.set_result(provisioner.observe())
    except BaseException as error:
        future.set_exception(error)
