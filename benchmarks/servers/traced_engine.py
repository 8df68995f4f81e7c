"""A reference engine that records which files of this tree it runs: `python -m benchmarks.servers.traced_engine FILE
COMMAND...`.

COMMAND is `PYTHON -m workers.engine OPTIONS...`. The first SIGUSR1 begins a trace of the main thread; the second ends
it and writes the files, one per line, to FILE.
"""

from __future__ import annotations

import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("api", "controller", "workers")


class Tracer:
    """Files of this tree whose functions run, in the order of their first call. Used as a `sys.setprofile` function."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        self._roots = tuple(f"{ROOT / package}/" for package in PACKAGES)

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and (name := frame.f_code.co_filename).startswith(self._roots):
            self.files.setdefault(name.removeprefix(f"{ROOT}/"), None)


def main(argv: Sequence[str]) -> None:
    target, (_, _, module, *options) = Path(argv[0]), argv[1:]
    tracer = Tracer()

    def toggle(number: int, frame: FrameType | None) -> None:
        if sys.getprofile() is None:
            sys.setprofile(tracer)
            return
        sys.setprofile(None)
        target.write_text("".join(f"{file}\n" for file in tracer.files))

    signal.signal(signal.SIGUSR1, toggle)
    sys.argv = [module, *options]
    runpy.run_module(module, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
