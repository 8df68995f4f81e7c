"""The forests that a gateway asks for the lengths of answers: newest published versions, looked for every two seconds.

A version that is damaged, of another release or too old is not used, which is logged and told at /metrics; the model is
then predicted by the mean of its kind of traffic. While the database is unavailable the versions in force stay.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from api.openai.state.offloop import OffLoop
from controller.core.errors import ConfigError
from controller.predict.answer_lengths import FEATURES, MOST_AGE_S, LengthsInForce, PublishedVersion
from controller.predict.length_forest import LengthForest

log = logging.getLogger(__name__)

POLL_S = 2.0
READ_S = 8.0  # then PostgreSQL counts as unavailable

Key = tuple[str, int]  # model and version


class ForestStore(Protocol):
    """Blocking reads of published versions."""

    def length_versions(self) -> Sequence[PublishedVersion]: ...

    def length_content(self, model: str, version: int) -> bytes | None: ...


class LengthForests:
    """`take` is called on the loop with all versions in force, when they change. `clock`: epoch seconds.

    `refused`: by model, why its newest version is not in force."""

    def __init__(
        self,
        store: ForestStore,
        take: Callable[[Mapping[str, LengthsInForce]], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.refused: dict[str, str] = {}
        self._store = store
        self._take = take
        self._clock = clock
        self._thread = OffLoop("length forests", abandon_s=30.0)
        self._published: Sequence[PublishedVersion] = ()
        self._read: dict[Key, LengthForest | str] = {}  # or why it cannot be used
        self._in_force: dict[str, LengthsInForce] = {}
        self._failing = False

    async def run(self) -> None:
        while True:
            await self.poll()
            await asyncio.sleep(POLL_S)

    async def poll(self) -> None:
        """Read what is new and take it over."""
        try:
            self._published = await self._thread.call(self._store.length_versions, READ_S)
            for each in self._published:
                key = (each.model, each.version)
                if key not in self._read:
                    self._read[key] = await self._thread.call(partial(self._load, each), READ_S)
            self._failing = False
        except Exception as error:  # any failure to read keeps the versions in force
            if not self._failing:
                log.warning("length forests cannot be read, the last ones stay: %r", error)
            self._failing = True
        self._settle()

    def _load(self, version: PublishedVersion) -> LengthForest | str:
        """Off the loop: unpacking takes milliseconds."""
        content = self._store.length_content(version.model, version.version)
        if content is None:
            return "its content is gone"
        if hashlib.sha256(content).hexdigest() != version.digest:
            return "it is damaged: its digest is another one"
        try:
            forest = LengthForest.from_bytes(content)
        except ConfigError as error:
            return str(error)
        if forest.names != FEATURES:
            return "it is of another release: it needs other features"
        forest.prepare()
        return forest

    def _settle(self) -> None:
        """Which versions are in force, now that some are new or too old."""
        in_force: dict[str, LengthsInForce] = {}
        refused: dict[str, str] = {}
        for each in self._published:
            found = self._read.get((each.model, each.version))
            if found is None:
                if each.model in self._in_force:  # not read yet
                    in_force[each.model] = self._in_force[each.model]
            elif isinstance(found, str):
                refused[each.model] = found
            elif self._clock() - each.trained_at > MOST_AGE_S:
                refused[each.model] = f"it was trained more than {MOST_AGE_S / 86_400:.0f} days ago"
            else:
                in_force[each.model] = LengthsInForce(each.version, found)
        self._tell(in_force, refused)
        now = {(each.model, each.version) for each in self._published}
        self._read = {key: found for key, found in self._read.items() if key in now}

    def _tell(self, in_force: dict[str, LengthsInForce], refused: dict[str, str]) -> None:
        for model, why in refused.items():
            if self.refused.get(model) != why:
                log.warning("the length forest of %s is not used: %s", model, why)
        self.refused = refused
        if {model: each.version for model, each in in_force.items()} != {
            model: each.version for model, each in self._in_force.items()
        }:
            self._in_force = in_force
            self._take(in_force)

    def close(self) -> None:
        self._thread.close()
