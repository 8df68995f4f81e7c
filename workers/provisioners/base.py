"""What starts and stops instances. Level-triggered: `observe` is the truth, start and stop may be said twice.

Synchronous, since Celery tasks call it. The caller gives the id, so that a start repeated after a crash is harmless.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from controller.core.errors import ConfigError
from controller.core.registry import Registry

ID_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


@dataclass(frozen=True, slots=True)
class Observed:
    """One instance as it is. `state`: starting | ready | stopping | exited. Times are epoch seconds.

    `awake`: of an endpoint that sleeps by its row, the version of that row if it says that it is awake.
    """

    id: str
    state: str
    url: str = ""
    pid: int | None = None
    started_at: float | None = None
    exit_code: int | None = None
    error: str = ""
    awake: int | None = None


class Provisioner(Protocol):
    """`observe` lists what exists, whoever asked for it; what is not listed does not exist."""

    def observe(self) -> list[Observed]: ...

    def start(self, id: str, spec: Mapping[str, object]) -> None:
        """Return at once; readiness shows in `observe`. Raises ConfigError when the spec cannot be met."""
        ...

    def stop(self, id: str, grace_s: float) -> None:
        """Running requests get `grace_s`. Harmless for an id that is gone."""
        ...


PROVISIONERS: Registry[type[Provisioner]] = Registry("provisioner")


def checked_id(id: str) -> str:
    """An id becomes a file name and a label: refuse what could be read as a path."""
    if not ID_PATTERN.fullmatch(id) or ".." in id:
        raise ConfigError(f"instance id {id!r}: use letters, digits, '.', '_' and '-', at most 63", "id")
    return id
