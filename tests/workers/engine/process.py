"""A real engine process for tests, on a free port of 127.0.0.1."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType

FLEET = {"token": "fleet-secret"}  # what those say who may stop an engine of the fleet
LISTENING = re.compile(r"listening on (http://127\.0\.0\.1:\d+)")


class EngineProcess:
    """`with EngineProcess("--profile", "constant:2ms") as engine: engine.url`. `token`: the fleet's, if not the
    environment's."""

    def __init__(self, *options: str, token: str | None = None) -> None:
        command = [sys.executable, "-m", "workers.engine", "--port", "0", *options]
        told = os.environ if token is None else {**os.environ, "FLEET_TOKEN": token}
        self.process = subprocess.Popen(command, env=told, stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        self.url = self._wait()

    def _wait(self) -> str:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            match = LISTENING.search(line)
            if match:
                return match[1]
        raise RuntimeError("the engine did not start: " + "".join(self.log))

    def stop(self, timeout: float = 10.0) -> int:
        """SIGTERM; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout)
        finally:
            self.process.kill()
            if self.process.stderr is not None:
                self.process.stderr.close()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


@contextmanager
def fleet(**options: Sequence[str]) -> Iterator[dict[str, EngineProcess]]:
    """Engines that trust each other, by the names of their options: `fleet(p=("--role", "prefill"), d=...)`."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(EngineProcess(*told, token=FLEET["token"])) for name, told in options.items()}
