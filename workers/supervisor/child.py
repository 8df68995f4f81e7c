"""Processes that we start: each in its own session with its output in a file, stopped with us, restarted if it dies."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Spec:
    """What to run. `stop_signal` asks it to end, SIGKILL follows after `grace_s`."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    log: Path
    stop_signal: int = signal.SIGTERM
    grace_s: float = 10.0


def die_with_parent(sig: int = signal.SIGTERM) -> Callable[[], None]:
    """For `preexec_fn`: the kernel sends `sig` to the child when the supervisor is gone, even by SIGKILL."""
    parent = os.getpid()

    def arrange() -> None:
        _LIBC.prctl(PR_SET_PDEATHSIG, int(sig), 0, 0, 0)
        if os.getppid() != parent:  # the parent died before the call
            os.kill(os.getpid(), signal.SIGKILL)

    return arrange


class Child:
    """A running process of `spec`. All waiting is by polling, so one thread can watch many."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.started_at = time.time()
        with open(spec.log, "ab") as log:
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
        """None while it runs."""
        return self._process.poll()

    def ask_to_stop(self, grace_s: float | None = None) -> None:
        """Harmless when repeated: the first call starts the grace period."""
        if self._kill_at is not None or self.exit_code() is not None:
            return
        self._kill_at = time.monotonic() + (self.spec.grace_s if grace_s is None else grace_s)
        self._process.send_signal(self.spec.stop_signal)

    def give_up(self) -> None:
        """Kill at the next look, whatever grace was left."""
        self._kill_at = time.monotonic()

    def stopped(self) -> bool:
        """Call again until true; kills the whole session once the grace period is over."""
        if self.exit_code() is not None:
            self._sweep()
            return True
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._sweep()
            self._process.wait(timeout=5)
            return True
        return False

    def _sweep(self) -> None:
        """Whatever is left in its session (prefork children of a killed worker) ends with it."""
        if self._swept:  # the number may belong to somebody else by now
            return
        self._swept = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def stop_all(children: Sequence[Child], hurry: Callable[[], bool] = lambda: False, poll_s: float = 0.05) -> None:
    """Ask all, then wait for all: as long as the longest grace period, not their sum. `hurry` true: no more grace."""
    for child in children:
        child.ask_to_stop()
    running = list(children)
    while running := [child for child in running if not child.stopped()]:
        time.sleep(poll_s)
        if hurry():
            for child in running:
                child.give_up()


FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
STEADY_S = 30.0  # after running this long, earlier failures no longer count


class Service:
    """A process that is restarted when it dies, after growing pauses.

    Call `keep` periodically; it returns a line for the log when something happened.
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
                return f"{self.spec.name} started again (pid {self.pid})"
            return None
        code = self.child.exit_code()
        return None if code is None else self._died(self.child, code)

    @property
    def pid(self) -> int | None:
        return self.child.pid if self.child and self.child.exit_code() is None else None

    def _died(self, child: Child, code: int) -> str:
        child.stopped()  # ends what it left in its session
        self.failures = 0 if time.time() - child.started_at > STEADY_S else self.failures + 1
        pause = pause_after(self.failures)
        self.child, self._next_start = None, time.monotonic() + pause
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"{self.spec.name} ended ({how}); again in {pause:g} s; log: {self.spec.log}"


def pause_after(failures: int) -> float:
    """Seconds to wait after this many quick deaths in a row."""
    return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** max(0, failures - 1))
