"""The main loop of `make up`: starts servers, migrations, demo data, processes and engines; restarts what dies; stops
everything in order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType

from controller.core.errors import ConfigError, SlacklineError
from workers.supervisor import plan
from workers.supervisor.announce import Readiness, say, welcome, write
from workers.supervisor.child import Child, Service, Spec, stop_all
from workers.supervisor.embedded import EmbeddedError, EmbeddedPostgres, EmbeddedRedis
from workers.supervisor.engine_processes import EngineFolder
from workers.supervisor.external_servers import require_database, require_redis
from workers.supervisor.logs import rotate, tail
from workers.supervisor.ownership import Ownership, clear_leftovers
from workers.supervisor.ports import require_free, write_json
from workers.supervisor.settings import SECRETS, Settings, kept_secret

PERIOD_S = 0.25
ROTATE_EVERY_S = 15.0
PREPARE_TIMEOUT_S = 120.0
REVIVE_TIMEOUT_S = 10.0


class StartFailed(SlacklineError):
    """A step of the start failed; the message contains the end of its log."""


class Interrupted(SlacklineError):
    """A stop was requested during the start."""


class StopFailed(SlacklineError):
    """Processes may still run. The message has the errors; `processes.json` lists the processes."""


class Supervisor:
    """Owns all processes of one data folder. It has one thread; signal handlers only count."""

    def __init__(self, settings: Settings, environ: Mapping[str, str]) -> None:
        self.settings, self.environ = settings, environ
        self.services: list[Service] = []
        self.when_ready: list[Service] = []
        self.engines: EngineFolder | None = None
        self.postgres: EmbeddedPostgres | None = None
        self.redis: EmbeddedRedis | None = None
        self.signals = 0  # of any kind; the first one starts the stop
        self.presses = 0  # those other than SIGHUP; a second one skips draining
        self.all_ended = False
        self.secrets: dict[str, str] = {}

    def run(self) -> int:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # under nohup we keep running
            signal.signal(signal.SIGHUP, self._on_signal)
        ownership = Ownership(self.settings.data_dir)
        try:
            for left in clear_leftovers(self.settings.data_dir):
                self._say(f"ended {left}, left by a supervisor that was killed")
            self.all_ended = True
            require_free(self.settings.gateway_port, "GATEWAY_PORT")
            require_free(self.settings.console_port, "CONSOLE_PORT")
            self._check()
            return self._run(ownership)
        finally:
            ownership.release(all_ended=self.all_ended)

    def _say(self, line: str) -> None:
        say(line, self.settings.log)

    def _run(self, ownership: Ownership) -> int:
        self.all_ended = False
        try:
            if not self.signals:
                self._start(ownership)
            self._loop(ownership)
        except Interrupted:
            return 0
        finally:
            self._stop()
        return 0

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signals += 1
        if number != signal.SIGHUP:  # a closing terminal sends SIGHUP more than once, from kernel and shell
            self.presses += 1

    # ---- start -------------------------------------------------------------------------------------------------

    def _start(self, ownership: Ownership) -> None:
        self.settings.logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        env = self._servers()
        self._record(ownership)
        log = self.settings.logs / "prepare.log"
        self._say("database: migrations and demo data")
        self._once(plan.migrate(env, log))
        self._once(plan.seed(self.settings, env, log))
        if self.settings.model:
            self._once(plan.serve_model(self.settings, env, log))
        self.engines = EngineFolder(self.settings.engines, self.settings.logs, env)
        self.engines.sync()
        self._say("starting gateway, console, worker, beat and engines")
        for spec in plan.processes(self.settings, env):
            self.services.append(Service(spec))
            self.services[-1].start()
        self.when_ready = [Service(spec) for spec in plan.when_ready(self.settings, env)]
        self._record(ownership)

    def _check(self) -> None:
        """Check all environment variables before the first server starts; later, errors would only be in a log."""
        self.secrets = {name: kept_secret(name, self.settings.data_dir, self.environ) for name in SECRETS}
        if problem := plan.settings_error(plan.known_environment(self.settings, self.secrets, self.environ)):
            raise ConfigError(problem)
        for url, answers in ((self.settings.database_url, require_database), (self.settings.redis_url, require_redis)):
            if url is not None:
                answers(url)

    def _servers(self) -> dict[str, str]:
        """Start the servers that the environment does not name; returns the environment of all other processes."""
        settings, database_url, redis_url = self.settings, self.settings.database_url, self.settings.redis_url
        if database_url is None:
            self._say("starting PostgreSQL")
            self.postgres = EmbeddedPostgres(settings.data_dir)
            self.postgres.start()
            database_url = self.postgres.url
        if redis_url is None:
            self.redis = EmbeddedRedis(settings.data_dir)
            self.redis.start()
            redis_url = self.redis.url
        write_json(settings.data_dir / "ports.json", self._ports())
        return plan.environment(settings, database_url, redis_url, self.secrets, self.environ)

    def _ports(self) -> dict[str, int]:
        ports = {"gateway": self.settings.gateway_port, "console": self.settings.console_port}
        if self.postgres:
            ports["postgres"] = self.postgres.port
        if self.redis:
            ports["redis"] = self.redis.port
        return ports

    def _once(self, spec: Spec) -> None:
        """Run a command and wait for its end. Raises StartFailed with the end of its log, and Interrupted."""
        child = Child(spec)
        deadline = time.monotonic() + PREPARE_TIMEOUT_S
        while child.exit_code() is None:
            if self.signals or time.monotonic() > deadline:
                child.ask_to_stop()
                stop_all([child])
                raise Interrupted() if self.signals else StartFailed(f"{spec.name} took over {PREPARE_TIMEOUT_S:.0f} s")
            time.sleep(0.02)
        if child.exit_code() != 0:
            raise StartFailed(f"{spec.name} failed:\n{tail(spec.log)}\n(log: {spec.log})")

    # ---- run ---------------------------------------------------------------------------------------------------

    def _loop(self, ownership: Ownership) -> None:
        readiness = Readiness(self.settings.console_port, self.settings.log, self.settings.metrics_token)
        rotate_at = 0.0
        known: list[tuple[str, int]] = []
        while not self.signals:
            self._keep()
            if (running := self._running()) != known:
                known = running
                ownership.record(running)
            if readiness.became_ready():
                welcome(self.settings)
                for service in self.when_ready:
                    service.start()
                self.services += self.when_ready
            if time.monotonic() > rotate_at:
                rotate(self.settings.logs)
                rotate_at = time.monotonic() + ROTATE_EVERY_S
            time.sleep(PERIOD_S)

    def _keep(self) -> None:
        for server in (self.postgres, self.redis):
            if server is not None and not server.alive():
                self._revive(server)
        for service in self.services:
            if line := service.keep():
                self._say(line)
        if self.engines is not None:
            self.engines.sync()

    def _revive(self, server: EmbeddedPostgres | EmbeddedRedis) -> None:
        self._say(f"{server.name} ended; restarting it")
        try:
            server.start(REVIVE_TIMEOUT_S)
        except EmbeddedError as error:
            self._say(f"{error}\nretrying")

    def _running(self) -> list[tuple[str, int]]:
        found = [(s.spec.name, s.pid) for s in self.services if s.pid is not None]
        found += [(s.name, s.pid) for s in (self.postgres, self.redis) if s is not None and s.pid is not None]
        return found + (self.engines.pids() if self.engines else [])

    def _record(self, ownership: Ownership) -> None:
        ownership.record(self._running())

    # ---- stop --------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        """Stop the gateway first, so that requests in flight can finish on their engines, and PostgreSQL last.

        Every step is tried, even if an earlier one failed. Raises StopFailed with all errors.
        """
        began, seen = time.monotonic(), self.presses
        self._say("stopping (press Ctrl-C again to stop without draining)")
        problems = [problem for step in self._steps(lambda: self.presses > seen) if (problem := _tried(step))]
        if problems:
            raise StopFailed("; ".join(problems))
        self.all_ended = True
        self._say(f"stopped in {time.monotonic() - began:.1f} s")

    def _steps(self, hurry: Callable[[], bool]) -> list[Callable[[], None]]:
        def stop_services(names: tuple[str, ...]) -> None:
            stop_all([s.child for s in self.services if s.spec.name in names and s.child is not None], hurry)

        steps: list[Callable[[], None]] = [partial(stop_services, names) for names in plan.STOP_ORDER]
        if self.engines is not None:
            steps.append(partial(self.engines.stop_all, hurry))
        return steps + [server.stop for server in (self.redis, self.postgres) if server is not None]


def _tried(step: Callable[[], None]) -> str:
    """Run the step; returns its error, or ""."""
    try:
        step()
    except (OSError, SlacklineError, RuntimeError, subprocess.SubprocessError) as error:
        return f"while stopping: {error}"
    return ""


def up(settings: Settings) -> int:
    try:
        return Supervisor(settings, os.environ).run()
    except (SlacklineError, RuntimeError, OSError, subprocess.SubprocessError) as error:
        write(f"make up: {error}", sys.stderr, settings.log)
        return 1
