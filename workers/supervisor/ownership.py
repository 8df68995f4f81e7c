"""Ensures that one supervisor uses a data folder, and ends the processes that a killed supervisor left."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import psutil

from controller.core.errors import ConfigError
from workers.supervisor.child import marked
from workers.supervisor.engine_processes import MARK
from workers.supervisor.ports import write_json

LOCK, OWNER, LEDGER = "supervisor.lock", "supervisor.json", "processes.json"
# Other users of the machine cannot list it, but may pass: started by root, PostgreSQL runs as another user below it.
PRIVATE = 0o711
SAME_START_S = 0.5  # a process with the same pid and another start time is a different one


class Ownership:
    """A lock on the data folder, held until `release`. Raises ConfigError if another supervisor holds it."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        try:
            data_dir.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
            self._lock: IO[str] = open(data_dir / LOCK, "w")  # noqa: SIM115 (held until release)
        except OSError as error:
            raise ConfigError(f"DATA_DIR: {error}; expected a writable folder", "DATA_DIR") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            owner = running_owner(data_dir)
            who = f" (pid {owner.pid})" if owner else ""
            raise ConfigError(
                f"Slackline already runs with {data_dir}{who}: stop it with `make down`, or choose another DATA_DIR",
                "DATA_DIR",
            ) from None
        write_json(data_dir / OWNER, {"pid": os.getpid(), "started_at": psutil.Process().create_time()})

    def record(self, running: Iterable[tuple[str, int]]) -> None:
        """Store our processes (name and pid), so that the start after a `kill -9` can end them."""
        rows = []
        for name, pid in running:
            with contextlib.suppress(psutil.Error):
                rows.append({"name": name, "pid": pid, "started_at": psutil.Process(pid).create_time()})
        write_json(self.data_dir / LEDGER, rows)

    def release(self, *, all_ended: bool) -> None:
        """Release the folder. If not `all_ended`, the list of processes stays, and the next start ends those left."""
        for name in (OWNER, LEDGER) if all_ended else (OWNER,):
            (self.data_dir / name).unlink(missing_ok=True)
        self._lock.close()


def clear_leftovers(data_dir: Path) -> list[str]:
    """End the processes that a killed supervisor left, with their sessions; returns their names. The caller must hold
    the folder."""
    cleared = []
    for row in _read(data_dir / LEDGER) or []:
        process = _same_process(row)
        left = _session(row["pid"]) if process is not None else _orphans(row, data_dir)
        if not left:
            continue
        for one in left:
            with contextlib.suppress(psutil.Error):
                one.kill()
        psutil.wait_procs(left, timeout=5)
        cleared.append(f"{row['name']} (pid {row['pid']})")
    return [*cleared, *_clear_engines(data_dir / "engines")]


def _clear_engines(folder: Path) -> list[str]:
    """End what engines started in sessions of their own; returns their names."""
    cleared = []
    for pid, found in list(marked(f"{MARK}={folder}/")):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            cleared.append(f"a process of engine {found.rpartition('/')[2]} (pid {pid})")
    return cleared


def _session(leader: int) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
            if os.getsid(process.pid) == leader:
                found.append(process)
    return found


def _orphans(row: dict[str, Any], data_dir: Path) -> list[psutil.Process]:
    """Processes of a session whose leader has ended (such as prefork children of a killed worker), if their environment
    names this data folder.

    A process with the leader's pid is a different one, since a pid is not reused while it names a session; the session
    is then a new one. If that new leader has ended too, we may be in its session ourselves, so this process and its
    parents are left out.
    """
    if psutil.pid_exists(row.get("pid", 0)):
        return []
    found, us = [], {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    for process in _session(row.get("pid", 0)):
        with contextlib.suppress(psutil.Error):
            if (
                process.pid not in us
                and process.environ().get("DATA_DIR") == str(data_dir)
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
    return found


def running_owner(data_dir: Path) -> psutil.Process | None:
    row = _read(data_dir / OWNER)
    return _same_process(row) if isinstance(row, dict) else None


def stop_owner(data_dir: Path, timeout_s: float) -> str:
    """`make down`: stop the supervisor, as Ctrl-C would, and wait for it. Raises ConfigError if it does not end."""
    owner = running_owner(data_dir)
    if owner is None:
        return f"no supervisor runs with DATA_DIR {data_dir}"
    owner.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while owner.is_running() and owner.status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            raise ConfigError(f"pid {owner.pid} still runs after {timeout_s:.0f} s; see {data_dir}/logs", "DATA_DIR")
        time.sleep(0.1)
    return f"stopped (pid {owner.pid})"


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None


def _same_process(row: dict[str, Any]) -> psutil.Process | None:
    try:
        process = psutil.Process(row["pid"])
        same = abs(process.create_time() - row["started_at"]) < SAME_START_S
    except (psutil.Error, KeyError, TypeError):
        return None
    return process if same and process.status() != psutil.STATUS_ZOMBIE else None
