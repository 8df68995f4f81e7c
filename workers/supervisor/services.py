"""Processes that are started again when they die, with growing pauses."""

from __future__ import annotations

import time

from workers.supervisor.child import Child, Spec

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
STEADY_S = 30.0  # who ran this long has a clean record again


class Service:
    """One `spec` that shall run. `keep` is called again and again; it returns a line when something happened."""

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
