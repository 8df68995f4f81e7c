"""The interface of provisioners, which start and stop engines on a kind of host.

Provisioners are level-triggered: `observe` is the truth, and `start` and `stop` are idempotent. They are synchronous,
since Celery tasks call them. The caller chooses the id, so that a start can be repeated after a crash.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from controller.core.errors import ConfigError
from controller.core.registry import Registry

ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


@dataclass(frozen=True, slots=True)
class Observed:
    """One instance as its provisioner sees it. Times are epoch seconds.

    `state`: pending (it waits for something, which `error` names) | starting (its process runs) | ready | unhealthy (it
    was ready and fails its health checks) | stopping | lost (its engine may still run, but the provisioner cannot tell)
    | exited (its engine has ended for certain, so another one may take its place and its devices).

    `steps`: when its engine reached each step of its start. `awake`: for an instance that sleeps according to its row,
    the version of that row if the engine reports that it is awake.
    """

    id: str
    state: str
    url: str = ""
    pid: int | None = None
    started_at: float | None = None
    exit_code: int | None = None
    error: str = ""
    awake: int | None = None
    steps: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class LogTail:
    """The end of what an engine printed, without colours and other control characters. `cut`: there is more before it.
    `written_at`: epoch seconds of the last line."""

    text: str
    cut: bool
    written_at: float


class Provisioner(Protocol):
    """What it can do is declared in `controller.scale.provisioning`, under the name that it registers."""

    @classmethod
    def here(cls, data_dir: Path) -> Provisioner | Mapping[str, Provisioner] | None:
        """The provisioner for a worker with this DATA_DIR; None if it cannot work there; one for each cluster, by
        source (`source_of`), if it asks clusters. Called in each round of the reconciler, in a thread that may use the
        database."""
        ...

    def observe(self) -> list[Observed]:
        """Every instance of ours that exists, whoever started it. An instance that is not listed does not exist, so it
        raises if it cannot tell. It must end at some time by itself, and uses no database: it runs in a thread of its
        own, for `Abilities.observe_s` at most."""
        ...

    def start(self, id: str, spec: Mapping[str, object]) -> None:
        """Start an engine and return at once; `observe` shows when it is ready. Raises ConfigError if the spec cannot
        be met."""
        ...

    def stop(self, id: str, grace_s: float) -> None:
        """Stop an engine; its running requests get `grace_s` seconds. An unknown id is ignored."""
        ...

    def log(self, id: str) -> LogTail | None:
        """What the engine printed, also after its end. None: nothing of it is kept here. Asked only with the ability
        `logs`. Raises OSError if it cannot be read."""
        ...


PROVISIONERS: Registry[type[Provisioner]] = Registry("provisioner")


def checked_id(id: str) -> str:
    """The id. Raises ConfigError for an id that could be read as a path, since it becomes a file name and a label."""
    if not ID_PATTERN.fullmatch(id) or ".." in id:
        raise ConfigError(f"instance id {id!r}: use letters, digits, '.', '_' and '-', at most 63", "id")
    return id


def sources(data_dir: Path, only: str = "") -> dict[str, Provisioner]:
    """What can be looked at from this machine, by source. `only`: a source whose provisioner alone is asked."""
    found: dict[str, Provisioner] = {}
    for name in PROVISIONERS:
        if only and only.partition("/")[0] != name:
            continue
        made = PROVISIONERS[name].here(data_dir)
        if isinstance(made, Mapping):
            found |= made
        elif made is not None:
            found[name] = made
    return found
