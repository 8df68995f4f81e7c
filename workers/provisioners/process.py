"""Reference engines on this machine. It writes each desired engine to a file, and the supervisor of `make up` starts
it.

A file outlives the worker that wrote it, so the engine starts even if the task is killed. The engine ends with `make
up`. `workers.supervisor.engine_processes` owns the processes and describes the files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from controller.core.errors import ConfigError
from controller.scale.provisioning import PROCESS
from workers.provisioners.base import PROVISIONERS, LogTail, Observed, checked_id
from workers.provisioners.logs import tail_of
from workers.supervisor.engine_processes import DESIRED, STATE, STOP
from workers.supervisor.ports import write_json

WAITS = "waits for the supervisor of make up to start it"


@PROVISIONERS.register(PROCESS)
class ProcessProvisioner:
    """`folder`: DATA_DIR/engines of the supervisor on this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def here(cls, data_dir: Path) -> ProcessProvisioner | None:
        folder = data_dir / "engines"
        return cls(folder) if folder.is_dir() else None

    def observe(self) -> list[Observed]:
        """Engines that the supervisor has not started yet are pending. Raises OSError if the folder is gone."""
        if not self.folder.is_dir():
            raise FileNotFoundError(f"{self.folder} does not exist")
        found = {state["id"]: _observed(state) for state in map(_read, self.folder.glob(f"*{STATE}")) if state}
        for desired in self.folder.glob(f"*{DESIRED}"):
            instance_id = desired.name.removesuffix(DESIRED)
            found.setdefault(instance_id, Observed(instance_id, "pending", error=WAITS))
        return sorted(found.values(), key=lambda observed: observed.id)

    def start(self, id: str, spec: Mapping[str, object]) -> None:
        if not self.folder.is_dir():
            raise ConfigError(f"{self.folder} does not exist: process instances need `make up` on this machine", "id")
        desired = self.folder / f"{checked_id(id)}{DESIRED}"
        if not desired.exists():
            write_json(desired, dict(spec))

    def stop(self, id: str, grace_s: float) -> None:
        desired = self.folder / f"{checked_id(id)}{DESIRED}"
        if desired.exists():  # the grace first, since the supervisor acts as soon as the desired engine's file is gone
            write_json(self.folder / f"{id}{STOP}", {"grace_s": grace_s})
            desired.unlink(missing_ok=True)

    def log(self, id: str) -> LogTail | None:
        """The supervisor writes it without the secrets that it gave to the engine."""
        return tail_of(self.folder.parent / "logs" / f"engine-{checked_id(id)}.log")


def _read(path: Path) -> dict[str, Any] | None:
    """None if the file was removed between listing and reading."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return content if isinstance(content, dict) and "id" in content else None


def _observed(state: Mapping[str, Any]) -> Observed:
    names = ("id", "state", "url", "pid", "started_at", "exit_code", "error", "steps")
    return Observed(**{name: state[name] for name in names if state.get(name) is not None})
