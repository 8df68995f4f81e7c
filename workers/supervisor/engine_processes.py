"""Engine processes of the supervisor. The process provisioner orders them through files in DATA_DIR/engines.

`<id>.desired.json`: the engine should run, with these options. `<id>.stop.json` (optional): its grace once that file is
gone. `<id>.state.json`: its state, written by the supervisor. A crashed engine is *not* restarted under its id: its
state is `exited`, and the reconciler decides. Files are used because an engine must outlive the worker that ordered it
and end with `make up`.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from controller.core.errors import ConfigError
from controller.engine.process_spec import BLOCK_SIZE, FLAGS, OPTIONS
from controller.engine.start_steps import PROCESS, READY, steps_said
from workers.engine.weights.host_copy import sweep
from workers.http.fleet_proof import KEY_VARIABLE, made_key
from workers.supervisor.child import Child, Spec, stop_all
from workers.supervisor.health_watch import HealthWatch
from workers.supervisor.launching import Launch, launch_from
from workers.supervisor.own_calls import opened
from workers.supervisor.ports import HOST, free_port, write_json

DESIRED, STOP, STATE = ".desired.json", ".stop.json", ".state.json"
FORMER_DESIRED = ".wish.json"  # as versions before this one called it
LOGGED = re.compile(r"\d{4}-\d\d-\d\d \S+ (?P<level>[A-Z]+) \S+ (?P<message>.*)")
GRACE_S = 15.0
HEALTH_PATH, HEALTH_TIMEOUT_S = "/health", 0.3
MOST_READ, LONGEST_LINE = 1 << 20, 4096  # bytes of a log at one look, characters of a line
MARK = "SLACKLINE_ENGINE"  # in the environment of an engine and of all that it starts
VISIBLE = "CUDA_VISIBLE_DEVICES"


def engine_argv(port: int, options: Mapping[str, object]) -> list[str]:
    """The command line of a reference engine with these options. Keys that are not options of the engine are
    ignored."""
    argv = [sys.executable, "-m", "workers.engine", "--host", HOST, "--port", str(port)]
    capacity = options.get("kv_capacity_tokens")
    if isinstance(capacity, int) and "kv_blocks" not in options:
        options = {**options, "kv_blocks": max(1, capacity // int(str(options.get("block_size") or BLOCK_SIZE)))}
    if options.get("weights") == "absent":  # the delay emulates a weight load, which a warm spare does later
        options = {**options, "startup_delay": None}
    for name in OPTIONS:
        if options.get(name) is not None:
            value = options[name]
            argv += [f"--{name.replace('_', '-')}", json.dumps(value) if isinstance(value, dict) else str(value)]
    argv += [f"--{name.replace('_', '-')}" for name in FLAGS if options.get(name) is True]
    return argv


def engine_env(env: Mapping[str, str], options: Mapping[str, object]) -> dict[str, str]:
    """The environment of an engine, in which it sees only the devices that it holds. Their indexes count the devices
    that this process itself may use.

    Raises ConfigError if this process may not use one of them.
    """
    held = options.get("device_indexes")
    if not isinstance(held, list) or not held:
        return dict(env)
    mine = [name for name in env.get(VISIBLE, "").split(",") if name]
    if missing := [index for index in held if mine and index >= len(mine)]:
        raise ConfigError(f"device {missing[0]} is not among the {len(mine)} of {VISIBLE}={env[VISIBLE]}", "device")
    return {**env, VISIBLE: ",".join(mine[index] if mine else str(index) for index in held)}


class StartSteps:
    """The steps of an engine's startup that its log shows, in epoch seconds by step, read as the log grows."""

    def __init__(self, backend: str, child: Child) -> None:
        self._backend, self._log = backend, child.spec.log
        self._read = child.log_from  # what is before that, an earlier process of this id printed
        self._rest = ""
        self.reached: dict[str, float] = {PROCESS: child.started_at}
        self._began = child.began

    def look(self) -> bool:
        """Whether another step was reached."""
        with self._log.open("rb") as file:
            self._read = self._read if file.seek(0, os.SEEK_END) >= self._read else 0  # it was rotated
            file.seek(self._read)
            new = file.read(MOST_READ)
        self._read += len(new)
        *lines, self._rest = (self._rest + new.decode(errors="replace")).split("\n")
        self._rest = self._rest[-LONGEST_LINE:]
        fresh = [each for each in steps_said(self._backend, "\n".join(lines)) if each not in self.reached]
        self.reached |= dict.fromkeys(fresh, self._now())
        return bool(fresh)

    def done(self) -> None:
        self.look()
        self.reached[READY] = self._now()

    def _now(self) -> float:
        """As the process started, so that a clock that is set meanwhile makes no start longer or shorter."""
        return self.reached[PROCESS] + time.monotonic() - self._began


class EngineProcess:
    """The process of one engine, and the state that was last written for it."""

    def __init__(self, engine_id: str, child: Child, port: int, launch: Launch | None = None) -> None:
        self.id, self.child, self.port = engine_id, child, port
        self.health_path = launch.health_path if launch else HEALTH_PATH
        self.headers = launch.headers if launch else {}
        self.steps = StartSteps(launch.backend, child) if launch else None
        self.ready = self.stopping = self.reported_exit = False
        self.watch: HealthWatch | None = None  # once it is ready
        self.failing = ""  # why its health checks fail
        self.copies = ""  # the folder of the copy of weights that it shares with other engines

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def failed(self, now: float) -> bool:
        """Whether its health checks began or ceased to fail. It is ready; `now`: of a monotonic clock."""
        if self.watch is None:
            self.watch = HealthWatch(self.port, self.health_path, self.headers, now)
        before, self.failing = self.failing, self.watch.error(now)
        return before != self.failing

    def unwatch(self) -> None:
        if self.watch is not None:
            self.watch.close()
        self.watch, self.failing = None, ""

    def state(self) -> dict[str, Any]:
        code = self.child.exit_code()
        lives = "starting" if not self.ready else "unhealthy" if self.failing else "ready"
        name = "exited" if code is not None else "stopping" if self.stopping else lives
        return {
            "id": self.id,
            "state": name,
            "pid": self.child.pid,
            "port": self.port,
            "url": self.url,
            "started_at": self.child.started_at,
            "exit_code": code,
            "error": self.failing if code is None else last_error(self.child.spec.log),
            "at": time.time(),
            **({"steps": self.steps.reached} if self.steps else {}),
        }


class EngineFolder:
    """Makes the processes match the files. `sync` never waits longer than one health check."""

    def __init__(self, folder: Path, logs: Path, env: Mapping[str, str]) -> None:
        self.folder, self.logs, self.env = folder, logs, env
        self.engines: dict[str, EngineProcess] = {}
        self.refused: set[str] = set()  # ordered, but their options are invalid
        folder.mkdir(parents=True, exist_ok=True)
        for former in folder.glob(f"*{FORMER_DESIRED}"):  # after an upgrade, the fleet of the last run starts again
            former.rename(folder / (former.name.removesuffix(FORMER_DESIRED) + DESIRED))
        for left in folder.glob(f"*{STATE}"):  # states of an earlier run
            left.unlink()

    def sync(self) -> None:
        ordered = {path.name.removesuffix(DESIRED): path for path in self.folder.glob(f"*{DESIRED}")}
        for engine_id in ordered.keys() - self.engines.keys():
            self._start(engine_id, ordered[engine_id])
        for engine_id, engine in list(self.engines.items()):
            if engine_id in ordered and not engine.stopping:  # one ordered again while it stops ends first, then starts
                self._watch(engine)
            else:
                self._stop(engine)
        for engine_id in self.refused - ordered.keys():
            self.refused.discard(engine_id)
            (self.folder / f"{engine_id}{STATE}").unlink(missing_ok=True)

    def stop_all(self, hurry: Callable[[], bool]) -> None:
        """Stop all engines. The files that order them stay, so that the next start has the same fleet."""
        stop_all([engine.child for engine in self.engines.values()], hurry)
        for engine in self.engines.values():
            self._ended(engine)
            self._write(engine)
        self.engines.clear()

    def pids(self) -> list[tuple[str, int]]:
        return [(f"engine {e.id}", e.child.pid) for e in self.engines.values() if e.child.exit_code() is None]

    def _start(self, engine_id: str, path: Path) -> None:
        options = _read(path)
        if options is None:
            return self._refuse(engine_id, path, f"{path.name} is not a JSON object")
        port = self._port()
        key = made_key(self.env.get("FLEET_TOKEN", ""), engine_id)
        log = self.logs / f"engine-{engine_id}.log"
        try:
            spec, launch = self._spec(engine_id, options, port, key, log)
            child = Child(spec)
        except (ConfigError, OSError) as error:
            return self._refuse(engine_id, path, str(error))
        self.engines[engine_id] = EngineProcess(engine_id, child, port, launch)
        self.engines[engine_id].copies = str(options.get("host_copy") or "")
        self._write(self.engines[engine_id])

    def _spec(
        self, engine_id: str, options: Mapping[str, Any], port: int, key: str, log: Path
    ) -> tuple[Spec, Launch | None]:
        """The process of the engine, and its launch if it comes from a template. Raises ConfigError."""
        env, name, mark = engine_env(self.env, options), f"engine {engine_id}", f"{MARK}={self.folder}/{engine_id}"
        marked = dict([mark.split("=", 1)])
        order = options.get("launch")
        if not isinstance(order, Mapping):
            argv, own = engine_argv(port, options), {**env, KEY_VARIABLE: key, **marked}
            return Spec(name, argv, own, log, grace_s=GRACE_S, mark=mark), None
        devices = {VISIBLE: env[VISIBLE]} if VISIBLE in env else {}
        launch = launch_from(order, port, self.env, {**devices, **marked}, key)
        return Spec(name, launch.argv, launch.env, log, grace_s=GRACE_S, hidden=launch.hidden, mark=mark), launch

    def _port(self) -> int:
        """A free port that no engine here has: one that still starts does not listen yet."""
        taken = {engine.port for engine in self.engines.values()}
        return next(port for port in iter(free_port, None) if port not in taken)

    def _refuse(self, engine_id: str, path: Path, error: str) -> None:
        """Report an engine that cannot be started as exited, like a crash, so that the reconciler sees the error."""
        state = self.folder / f"{engine_id}{STATE}"
        if path.exists() and not state.exists():
            self.refused.add(engine_id)
            write_json(
                state, {"id": engine_id, "state": "exited", "exit_code": None, "error": error, "at": time.time()}
            )

    def _watch(self, engine: EngineProcess) -> None:
        if engine.child.stopped():  # and all that it printed is in its log, of which the last line may say why
            if not engine.reported_exit:
                engine.reported_exit = True
                self._ended(engine)
                self._write(engine)
        elif not engine.ready:
            news = engine.steps is not None and engine.steps.look()
            if _healthy(f"{engine.url}{engine.health_path}", engine.headers):
                engine.ready = True
                if engine.steps is not None:
                    engine.steps.done()
            if engine.ready or news:
                self._write(engine)
        elif engine.failed(time.monotonic()):
            self._write(engine)

    def _stop(self, engine: EngineProcess) -> None:
        stop_file = self.folder / f"{engine.id}{STOP}"
        if not engine.stopping:
            engine.stopping = True
            engine.unwatch()
            engine.child.ask_to_stop((_read(stop_file) or {}).get("grace_s"))
            self._write(engine)
        if engine.child.stopped():
            self._ended(engine)
            del self.engines[engine.id]
            (self.folder / f"{engine.id}{STATE}").unlink(missing_ok=True)
            stop_file.unlink(missing_ok=True)

    def _ended(self, engine: EngineProcess) -> None:
        """Remove copies of weights that no engine uses, since an engine that was killed could not do so."""
        engine.unwatch()
        if engine.copies:
            sweep(Path(engine.copies))

    def _write(self, engine: EngineProcess) -> None:
        write_json(self.folder / f"{engine.id}{STATE}", engine.state())


def _read(path: Path) -> dict[str, Any] | None:
    """The JSON object in the file; None if the file has just been removed or holds none."""
    try:
        content = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def last_error(log: Path) -> str:
    """The last line of the log, unless that is a log record of a level below ERROR; then ""."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 2000))
        lines = file.read().decode(errors="replace").strip().splitlines()
    line = LOGGED.match(lines[-1]) if lines else None
    if line is None:
        return lines[-1][:300] if lines else ""
    return line["message"][:300] if line["level"] in ("ERROR", "CRITICAL") else ""


def _healthy(url: str, headers: Mapping[str, str]) -> bool:
    try:
        with opened(url, headers, HEALTH_TIMEOUT_S) as answer:
            return answer.status == 200
    except (OSError, http.client.HTTPException):
        return False
