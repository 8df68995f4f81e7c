"""Child processes of the supervisor: each in its own session, with its output in a file. They end with the supervisor,
and services are restarted when they die."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

PR_SET_PDEATHSIG = 1
FILTER_END_S = 2.0  # for the rest of the log
FILTER = Path(__file__).with_name("log_filter.py")
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Spec:
    """A process to run. To stop it, `stop_signal` is sent, and SIGKILL after `grace_s` seconds. `hidden`: values that
    its log must not contain; with any, its output goes through a filter process. `mark`: a variable of its environment,
    NAME=value, by which processes that left its session are found and killed too; "": none are."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    log: Path
    stop_signal: int = signal.SIGTERM
    grace_s: float = 10.0
    hidden: Sequence[str] = ()
    mark: str = ""


def die_with_parent(sig: int = signal.SIGTERM) -> Callable[[], None]:
    """For `preexec_fn`: the kernel sends `sig` to the child when its parent ends, even by SIGKILL (Linux).

    The kernel means the parent *thread*: start the child from a thread that lives as long as the child.
    """
    parent = os.getpid()

    def arrange() -> None:
        _LIBC.prctl(PR_SET_PDEATHSIG, int(sig), 0, 0, 0)
        if os.getppid() != parent:  # the parent died before the call
            os.kill(os.getpid(), signal.SIGKILL)

    return arrange


class Child:
    """A running process of `spec`. Callers poll it and never block, so that one thread can watch many. `log_from`: the
    size of its log before it printed anything."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.log_from = spec.log.stat().st_size if spec.log.exists() else 0
        self.started_at, self.began = time.time(), time.monotonic()
        self._filter = _filter(spec) if spec.hidden else None
        with _input(self._filter) if self._filter else open(spec.log, "ab") as log:
            self._process = subprocess.Popen(
                list(spec.argv),
                env=dict(spec.env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C at the terminal reaches the supervisor only
                preexec_fn=die_with_parent(),  # noqa: PLW1509 (the supervisor has one thread)
            )
        self._kill_at: float | None = None
        self._swept = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.poll()

    def ask_to_stop(self, grace_s: float | None = None) -> None:
        """Send the stop signal and start the grace period. Idempotent."""
        if self._kill_at is not None or self.exit_code() is not None:
            return
        self._kill_at = time.monotonic() + (self.spec.grace_s if grace_s is None else grace_s)
        self._process.send_signal(self.spec.stop_signal)

    def give_up(self) -> None:
        """End the grace period: the next call of `stopped` kills the process."""
        self._kill_at = time.monotonic()

    def stopped(self) -> bool:
        """Whether it has ended. Kills its whole session if the grace period is over; call it until it returns True."""
        if self.exit_code() is not None:
            self._sweep()
            return True
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._sweep()
            self._process.wait(timeout=5)
            return True
        return False

    def _sweep(self) -> None:
        """Kill what is left in its session, such as the prefork children of a killed worker."""
        if self._swept:  # by now another process may have this session's number
            return
        self._swept = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        for stray in strays(self.spec.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(stray, signal.SIGKILL)
        if self._filter is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._filter.wait(timeout=FILTER_END_S)


def strays(mark: str) -> list[int]:
    """Processes of this user with the mark in the environment that they were started with."""
    return [pid for pid, found in marked(mark) if found == mark] if mark else []


def marked(beginning: str) -> Iterator[tuple[int, str]]:
    """Processes of this user with an entry that begins so in the environment that they were started with, and that
    entry."""
    wanted = beginning.encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):  # ended meanwhile, or of another user
                entries = (entry / "environ").read_bytes().split(b"\0")
                yield from ((int(entry.name), os.fsdecode(found)) for found in entries if found.startswith(wanted))


def _filter(spec: Spec) -> subprocess.Popen[bytes]:
    """A process that writes what it reads into the log, without `hidden`. It ends by itself, once nobody writes."""
    spec.log.touch()  # it is read before the filter has begun
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(FILTER), str(spec.log)],
        env={},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    source = _input(process)
    source.write(json.dumps(list(spec.hidden)).encode() + b"\n")
    source.flush()
    return process


def _input(process: subprocess.Popen[bytes]) -> IO[bytes]:
    return cast(IO[bytes], process.stdin)


def stop_all(children: Sequence[Child], hurry: Callable[[], bool] = lambda: False, poll_s: float = 0.05) -> None:
    """Stop all in parallel: it takes as long as the longest grace period, not their sum. `hurry`: whether the rest of
    the grace is skipped."""
    for child in children:
        child.ask_to_stop()
    running = list(children)
    while running := [child for child in running if not child.stopped()]:
        time.sleep(poll_s)
        if hurry():
            for child in running:
                child.give_up()


FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
STEADY_S = 30.0  # earlier failures of a service that ran this long no longer count


class Service:
    """A process that is restarted when it dies, after pauses that double with each failure.

    Call `keep` periodically; it returns a line for the log if the process died or was restarted.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.child: Child | None = None
        self.failures = 0
        self._next_start = 0.0

    def start(self) -> None:
        self.child = Child(self.spec)

    def keep(self) -> str | None:
        if self.child is None:
            if time.monotonic() >= self._next_start:
                self.start()
                return f"{self.spec.name} restarted (pid {self.pid})"
            return None
        code = self.child.exit_code()
        return None if code is None else self._died(self.child, code)

    @property
    def pid(self) -> int | None:
        return self.child.pid if self.child and self.child.exit_code() is None else None

    def _died(self, child: Child, code: int) -> str:
        child.stopped()  # kills what it left in its session
        self.failures = 0 if time.time() - child.started_at > STEADY_S else self.failures + 1
        pause = pause_after(self.failures)
        self.child, self._next_start = None, time.monotonic() + pause
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"{self.spec.name} ended ({how}); restart in {pause:g} s; log: {self.spec.log}"


def pause_after(failures: int) -> float:
    """Seconds to wait before the restart after this many early failures in a row."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** max(0, failures - 1))
