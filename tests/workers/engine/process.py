"""A real engine process for tests, on a free port of 127.0.0.1."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType

from tests.forked import Forked, forks

MAIN = ("-m", "workers.engine")
FLEET = {"token": "fleet-secret"}  # what those say who may stop an engine of the fleet
LISTENING = re.compile(r"listening on (http://[\d.]+:\d+)")


class EngineProcess:
    """`with EngineProcess("--profile", "constant:2ms") as engine: engine.url`. `token`: the fleet's, if not the
    environment's; `before`: what stands before the command, such as `network.SecondHost.command`; `main`: what Python
    runs, `-m` and a module, such as a `held.Gate`'s options."""

    def __init__(
        self,
        *options: str,
        token: str | None = None,
        before: Sequence[str] = (),
        main: Sequence[str] = MAIN,
    ) -> None:
        told = os.environ if token is None else {**os.environ, "FLEET_TOKEN": token}
        options = ("--port", "0", *options)
        self.process: subprocess.Popen[str] | Forked
        if before or "torch" in options:  # torch takes long to import, and may start threads, which no fork has
            command = [*before, sys.executable, *main, *options]
            self.process = subprocess.Popen(command, env=told, stderr=subprocess.PIPE, text=True)
        else:
            self.process = forks().start(main[1], (*main[2:], *options), told)
        self.log: list[str] = []
        self.url = self._wait()

    def _wait(self) -> str:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            match = LISTENING.search(line)
            if match:
                self._reader = threading.Thread(target=self._drain, daemon=True)
                self._reader.start()
                return match[1]
        raise RuntimeError("the engine did not start: " + "".join(self.log))

    def _drain(self) -> None:
        """An engine whose warnings nobody reads stands still once the pipe is full."""
        with suppress(ValueError):  # closed meanwhile
            for line in self.process.stderr or ():
                self.log.append(line)

    def last_words(self) -> list[str]:
        """The lines of its log, once it has ended."""
        self._reader.join(10.0)
        return [line.rstrip("\n") for line in self.log]

    def stop(self, timeout: float = 10.0) -> int:
        """SIGTERM; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout)
        finally:
            self.process.kill()

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
