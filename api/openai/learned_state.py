"""What a gateway has learned, for the next process of its name: lengths of prompts and answers, times of reasoning,
the latency of each instance, what priorities measured, the attainment windows, and where CALM's ordering has got to:
its cutoff with what each value earned, its frame, and what each tenant was sent; and since when Redis remembers.

The state is copied on the loop each second and written in a thread, to a file that is replaced as a whole: a process
that is killed loses a second. Times are written as ages, since the monotonic clock starts again with the host, and the
file tells the wall time at which they were taken. Open workflows are in Redis, which outlives gateways.

A file that is cut, changed, of another version or from the future is not used, nor is a part of it that cannot be read.
The gateway then starts as it did the first time, and the log says why.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from api.openai.gateway import Gateway
from api.openai.state.offloop import Busy, OffLoop
from controller.core import events as ev
from controller.core.types import InstanceSpec
from controller.dispatch.learned import relearn
from controller.dispatch.policy_sets import check_frames
from controller.dispatch.shadow_state import ShadowInstance

log = logging.getLogger(__name__)

VERSION = 1
FRAMES_VERSION = 1  # of the part `frames`, which files of older releases lack
PERIOD_S = 1.0
WRITE_S = 5.0  # then the disk counts as hanging, and the file stays as it was
LATENCY_S = 3600.0  # an instance's latency is measured anew after a longer absence: others may share its device now
FRAMES_S = 3600.0  # what a cutoff earned is of the load at that time
LENGTHS_S = 7 * 86_400.0  # traffic of a week ago says little of today's
FUTURE_S = 60.0  # clocks differ by less
MOST_REQUESTS = 2_000  # of all attainment windows together
MOST_MEASURED = 2_000  # values of all priority mappings together
LEAST_PAUSE = 200.0  # times as long as copying took: large fleets are copied more rarely, for 0.5 % of a processor
UNREADABLE = (KeyError, TypeError, ValueError, AttributeError, OverflowError)


class StoredState(NamedTuple):
    """`age_s`: since it was taken."""

    age_s: float
    parts: Mapping[str, Any]


class LearnedFile:
    """Replaced as a whole. Holds names of tenants and no texts or keys: mode 0600."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def save(self, parts: Mapping[str, Any], at: float) -> None:
        """`at`: epoch seconds at which the state was taken."""
        body = orjson.dumps(parts)
        head = {"version": VERSION, "at": at, "sha256": hashlib.sha256(body).hexdigest()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.touch(mode=0o600)
        part.write_bytes(orjson.dumps(head) + b"\n" + body)
        part.replace(self.path)

    def load(self, wall: float) -> StoredState | None:
        """None without a file, or if it may not be used (which is logged). `wall`: epoch seconds now."""
        try:
            head, _, body = self.path.read_bytes().partition(b"\n")
            said = orjson.loads(head)
            if said["version"] != VERSION:
                raise ValueError(f"it is of version {said['version']}")
            if said["sha256"] != hashlib.sha256(body).hexdigest():
                raise ValueError("it was cut or changed")
            age_s = wall - float(said["at"])
            if not -FUTURE_S <= age_s < math.inf:
                raise ValueError("it is from the future")
            return StoredState(max(0.0, age_s), dict(orjson.loads(body)))
        except FileNotFoundError:
            return None
        except (OSError, *UNREADABLE) as error:
            log.warning("what was learned before is not used, %s: %s", self.path, error)
            return None


def _used(age_s: float, window_s: float) -> str:
    """Which parts of a state of this age are used again, for the log. `window_s`: of the attainment windows."""
    limits = (
        ("attainment windows", window_s),
        ("latencies of instances", LATENCY_S),
        ("frames of the ordering", FRAMES_S),
        ("lengths and times of reasoning", LENGTHS_S),
    )
    used, old = ([name for name, limit in limits if (age_s < limit) is kept] for kept in (True, False))
    if not used:
        return "is too old to be used"
    return "is used again" + (f", but for what is too old: {', '.join(old)}" if old else "")


class LearnedState:
    """Restore before the first instance is announced, then run."""

    def __init__(self, file: LearnedFile, gateway: Gateway, wall: Callable[[], float] = time.time) -> None:
        self.restored_age_s: float | None = None  # of the state that this process began with; None: it had none
        self._file, self._gateway, self._wall = file, gateway, wall
        self._thread = OffLoop("learned", abandon_s=30.0)
        self._stored: StoredState | None = None
        self._stored_at = 0.0  # by the gateway's clock
        self._seen: set[str] = set()  # instances
        self._saved_at: float | None = None
        self._copying_s = 0.0
        self._failing = False

    def age_s(self) -> float | None:
        """Seconds since the file was written; None: not yet."""
        return None if self._saved_at is None else self._gateway.clock() - self._saved_at

    def restore(self) -> None:
        """All but what needs the configuration."""
        stored = self._stored = self._file.load(self._wall())
        if stored is None:
            return
        gateway, now = self._gateway, self._gateway.clock()
        self.restored_age_s, self._stored_at = stored.age_s, now
        if stored.age_s < LENGTHS_S:
            self._part("answers", gateway.answer_lengths.restore)
            self._part("prompts", gateway.prompt_lengths.restore)
            self._part("thinking", gateway.thinking.restore)
        windows = gateway.ledger.windows
        if stored.age_s < windows.window_s:
            self._part("windows", lambda state: windows.restore(state, now, stored.age_s))
        if "workflows" in stored.parts:  # files of older releases lack it
            self._part("workflows", gateway.workflows.restore)
        gateway.fleet.learned = self._of_instance
        log.info("what was learned until %.0f s ago %s", stored.age_s, _used(stored.age_s, windows.window_s))

    def restore_configured(self) -> None:
        """What priorities measured, and the frames of the ordering: once the gateway has its configuration."""
        if (stored := self._stored) is not None:
            now = self._gateway.clock()
            since_s = stored.age_s + now - self._stored_at
            self._part("mappings", lambda state: self._gateway.book.restore(state, now, since_s))
            if "frames" in stored.parts and since_s < FRAMES_S:
                self._part("frames", lambda state: self._restore_frames(state, since_s))

    def _restore_frames(self, state: Mapping[str, Any], since_s: float) -> None:
        """Each is tried first, since the scheduler must not fail."""
        if state["version"] != FRAMES_VERSION:
            raise ValueError(f"it is of version {state['version']}")
        for model, known in state["models"].items():
            if model in self._gateway.named_models:
                check_frames(state["ordering"], known)
                self._gateway.runtime.push(ev.FramesLearned(model, state["ordering"], known, since_s))

    async def run(self) -> None:
        while True:
            await self.save()
            await asyncio.sleep(max(PERIOD_S, LEAST_PAUSE * self._copying_s))

    async def save(self) -> None:
        """A disk that is full or hangs keeps nobody waiting; it is logged once."""
        began, at = time.thread_time(), self._wall()
        parts, now = self._parts(), self._gateway.clock()
        # Of the processor: on a busy machine the loop may be interrupted for so long that nothing would be stored for
        # half a minute.
        self._copying_s = time.thread_time() - began
        try:
            await self._thread.call(lambda: self._file.save(parts, at), WRITE_S)
        except (OSError, TimeoutError, Busy) as error:
            if not self._failing:
                log.warning("what was learned cannot be written to %s: %r", self._file.path, error)
            self._failing = True
            return
        self._failing, self._saved_at = False, now

    def close(self) -> None:
        self._thread.close()

    def _parts(self) -> dict[str, Any]:
        gateway, now = self._gateway, self._gateway.clock()
        learned = gateway.scheduler.learned_state()
        windows = gateway.ledger.windows
        each = max(1, MOST_REQUESTS // max(1, len(windows.kinds())))
        seats = {id: seat.spec for id, seat in gateway.fleet.seats.items() if id in learned}
        return {
            "answers": gateway.answer_lengths.state(),
            "prompts": gateway.prompt_lengths.state(),
            "thinking": gateway.thinking.state(),
            "windows": windows.state(now, each),
            "workflows": gateway.workflows.state(),
            "mappings": gateway.book.state(now, MOST_MEASURED),
            "frames": {
                "version": FRAMES_VERSION,
                "ordering": gateway.scheduler.dispatcher.ordering,
                "models": gateway.scheduler.dispatcher.frames_state(now),
            },
            "instances": {id: [spec.url, spec.model, learned[id]] for id, spec in seats.items()},
            "unseen": self._unseen(now),
        }

    def _unseen(self, now: float) -> dict[str, Any]:
        """What an earlier process learned of instances that this one has not seen yet, with its age: the file of a
        process that is killed right after its start must not have less than the one that it began with."""
        found: dict[str, Any] = {}
        if self._stored is None:
            return found
        parts = (self._stored.parts.get(name) for name in ("instances", "unseen"))
        for id in {id for part in parts if isinstance(part, Mapping) for id in part} - self._seen:
            try:
                url, model, state, age_s = self._earlier(id, now)
            except UNREADABLE:
                continue
            if age_s < LATENCY_S:
                found[id] = [url, model, state, age_s]
        return found

    def _earlier(self, id: str, now: float) -> tuple[str, str, Any, float]:
        """What the file says of an instance, and how many seconds ago that was. Raises one of `UNREADABLE`."""
        assert self._stored is not None
        since_s = self._stored.age_s + now - self._stored_at
        if id in self._stored.parts["instances"]:
            url, model, state = self._stored.parts["instances"][id]
            return url, model, state, since_s
        url, model, state, age_s = self._stored.parts["unseen"][id]  # files of older releases lack it
        if not age_s >= 0:
            raise ValueError(f"its age is {age_s}")
        return url, model, state, since_s + age_s

    def _of_instance(self, spec: InstanceSpec) -> Mapping[str, Any] | None:
        """What was learned of the instance, if it is the same one, when this process sees it first: one that comes back
        later is another process. It is tried here, since the scheduler must not fail."""
        stored = self._stored
        if stored is None or spec.id in self._seen:
            return None
        self._seen.add(spec.id)
        try:
            if spec.id not in stored.parts["instances"] and spec.id not in stored.parts.get("unseen", {}):
                return None
            url, model, state, age_s = self._earlier(spec.id, self._gateway.clock())
            if age_s >= LATENCY_S or (url, model) != (spec.url, spec.model):
                return None
            relearn(ShadowInstance(spec), state)
        except UNREADABLE as error:
            log.warning("what was learned of instance %s is not used: %r", spec.id, error)
            return None
        return dict(state)

    def _part(self, name: str, restore: Callable[[Any], None]) -> None:
        assert self._stored is not None
        try:
            restore(self._stored.parts[name])
        except UNREADABLE as error:
            log.warning("the part %s of what was learned before is not used: %r", name, error)
