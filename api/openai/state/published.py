"""What a worker has learned and published, in a gateway: the newest versions, looked for every two seconds.

A version that is damaged, of another release or too old is not used, which is logged and told at /metrics. While the
database is unavailable the versions in force stay. What became of each version is stored, once the database takes it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from api.openai.state.offloop import OffLoop
from controller.core.errors import ConfigError
from controller.core.messages import MOST_LEARNED, LearnedMessage
from controller.predict.answer_lengths import MOST_AGE_S, PublishedVersion, VersionOutcome

log = logging.getLogger(__name__)

POLL_S = 2.0
READ_S = 8.0  # then PostgreSQL counts as unavailable
MOST_WHY = 200  # characters, as they are stored
MOST_UNSTORED = 1_000  # outcomes; beyond, the oldest are forgotten

T = TypeVar("T")
Note = Callable[[Sequence[VersionOutcome]], None]
Key = tuple[str, int]  # subject and version


class Used(NamedTuple):
    """A version in force. `digest`: of the content that was read; `taken_at`: epoch seconds."""

    version: int
    digest: str
    taken_at: float


class PublishedFiles(Generic[T]):
    """`what` is published, for messages. `listed`, `content`: blocking reads of the store. `opened`: what content says,
    off the loop; raises ConfigError. `take` is called on the loop with all versions in force, by subject, when they
    change. `note`: a blocking write of what became of versions; written again after an error. `clock`: epoch seconds.

    `refused`: by subject, why its newest version is not in force. `used`: by subject, the one in force."""

    def __init__(
        self,
        what: str,
        listed: Callable[[], Sequence[PublishedVersion]],
        content: Callable[[str, int], bytes | None],
        opened: Callable[[bytes], T],
        take: Callable[[Mapping[str, tuple[int, T]]], None],
        note: Note,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.refused: dict[str, str] = {}
        self.used: dict[str, Used] = {}
        self._what = what
        self._listed = listed
        self._content = content
        self._opened = opened
        self._take = take
        self._note = note
        self._clock = clock
        self._thread = OffLoop(what, abandon_s=30.0)
        self._published: Sequence[PublishedVersion] = ()
        self._read: dict[Key, tuple[T | None, str]] = {}  # or why it cannot be used
        self._in_force: dict[str, tuple[int, T]] = {}
        self._failing = False
        self._unable = False  # to store them
        self._refused_versions: dict[str, int] = {}
        self._unstored: deque[VersionOutcome] = deque(maxlen=MOST_UNSTORED)

    async def run(self) -> None:
        while True:
            await self.poll()
            await asyncio.sleep(POLL_S)

    async def poll(self) -> None:
        """Read what is new and take it over."""
        try:
            self._published = await self._thread.call(self._listed, READ_S)
            for each in self._published:
                key = (each.subject, each.version)
                if key not in self._read:
                    self._read[key] = await self._thread.call(partial(self._load, each), READ_S)
            self._failing = False
        except Exception as error:  # any failure to read keeps the versions in force
            if not self._failing:
                log.warning("%s: published versions cannot be read, the last ones stay: %r", self._what, error)
            self._failing = True
        self._settle()
        await self._store_outcomes()

    async def _store_outcomes(self) -> None:
        if self._failing or not (outcomes := list(self._unstored)):
            return
        try:
            await self._thread.call(partial(self._note, outcomes), READ_S)
        except Exception as error:  # tried again at the next look
            if not self._unable:
                log.warning("%s: what became of versions is not stored yet: %r", self._what, error)
            self._unable = True
            return
        self._unable = False
        for _ in outcomes:
            self._unstored.popleft()

    def _load(self, version: PublishedVersion) -> tuple[T | None, str]:
        """Off the loop: unpacking takes milliseconds."""
        content = self._content(version.subject, version.version)
        if content is None:
            return None, "its content is gone"
        if hashlib.sha256(content).hexdigest() != version.digest:
            return None, "it is damaged: its digest is another one"
        try:
            return self._opened(content), ""
        except ConfigError as error:
            return None, str(error)
        except Exception as error:  # what one subject published must not keep the others from theirs
            return None, f"it cannot be opened: {error!r}"[:MOST_WHY]

    def _settle(self) -> None:
        """Which versions are in force, now that some are new or too old."""
        in_force: dict[str, tuple[int, T]] = {}
        refused: dict[str, str] = {}
        versions = {each.subject: each.version for each in self._published}
        for each in self._published:
            read = self._read.get((each.subject, each.version))
            if read is None:
                if each.subject in self._in_force:  # not read yet
                    in_force[each.subject] = self._in_force[each.subject]
                continue
            found, why = read
            if found is None:
                refused[each.subject] = why
            elif self._clock() - each.trained_at > MOST_AGE_S:
                refused[each.subject] = f"it was trained more than {MOST_AGE_S / 86_400:.0f} days ago"
            else:
                in_force[each.subject] = (each.version, found)
        self._tell(in_force, refused, versions)
        now = {(each.subject, each.version) for each in self._published}
        self._read = {key: found for key, found in self._read.items() if key in now}

    def _tell(self, in_force: dict[str, tuple[int, T]], refused: dict[str, str], versions: Mapping[str, int]) -> None:
        """`versions`: the newest published one of each subject."""
        for subject, why in refused.items():
            if self.refused.get(subject) != why:
                log.warning("the %s of %s is not used: %s", self._what, subject, why)
            if (self.refused.get(subject), self._refused_versions.get(subject)) != (why, versions[subject]):
                self._unstored.append(VersionOutcome(subject, versions[subject], why, self._clock()))
        self.refused = refused
        self._refused_versions = {subject: versions[subject] for subject in refused}
        if {subject: each[0] for subject, each in in_force.items()} != {
            subject: each[0] for subject, each in self._in_force.items()
        }:
            self._in_force = in_force
            self._take(in_force)
            self._date()

    def _date(self) -> None:
        """Since when each version is in force; one that stays keeps its time."""
        now = self._clock()
        digests = {(each.subject, each.version): each.digest for each in self._published}
        used = {}
        for subject, (version, _) in self._in_force.items():
            before = self.used.get(subject)
            same = before is not None and before.version == version
            used[subject] = before if same and before else Used(version, digests.get((subject, version), ""), now)
            if used[subject] is not before:
                self._unstored.append(VersionOutcome(subject, version, "", now))
        self.used = used

    def report(self, what: str) -> list[LearnedMessage]:
        """What is in force and what is not used, those that changed last first, MOST_LEARNED at most."""
        used = sorted(self.used.items(), key=lambda item: -item[1].taken_at)
        refused = [(subject, why) for subject, why in self.refused.items() if subject not in self.used]
        told = [
            LearnedMessage(what=what, subject=subject, version=None, digest="", taken_at=None, problem=why)
            for subject, why in refused
        ] + [
            LearnedMessage(what=what, subject=subject, version=version, digest=digest, taken_at=at, problem="")
            for subject, (version, digest, at) in used
        ]
        return told[:MOST_LEARNED]

    def close(self) -> None:
        self._thread.close()
