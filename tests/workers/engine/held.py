"""A reference engine whose prefills end when the test lets them: `python -m tests.workers.engine.held GATE OPTIONS...`.

The last step of a prompt that begins while the file GATE exists stays in its last layer until the file is gone. So a
test can wait until all that moves beside a prefill has moved, however slow its machine.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from controller.core.steps import Step
from workers.engine import emulated, server
from workers.engine.config import parse

LOOK_S = 0.002
MAIN = ("-m", "tests.workers.engine.held")


class PrefillGate:
    """`gate.options` are the beginning of a held engine's command."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "gate"
        self.options = (*MAIN, str(self._file))

    @contextmanager
    def closed(self) -> Iterator[PrefillGate]:
        """No prefill that begins now ends before `open`, or the block's end."""
        self._file.write_text(uuid.uuid4().hex)  # a step held by an earlier closing does not wait for this one
        try:
            yield self
        finally:
            self.open()

    def open(self) -> None:
        self._file.unlink(missing_ok=True)


def held_executor(gate: Path) -> type[emulated.EmulatedExecutor]:
    def closing() -> str:
        """Which one, "" while the gate is open."""
        try:
            return gate.read_text()
        except FileNotFoundError:
            return ""

    class HeldExecutor(emulated.EmulatedExecutor):
        held: tuple[int, str] = (-1, "")  # the step that began while the gate was closed, and by which closing

        def start(self, step: Step) -> None:
            if any(chunk.last for chunk in step.chunks) and (by := closing()):
                self.held = (step.id, by)
            super().start(step)

        def layers_done(self, step_id: int) -> int:
            passed = super().layers_done(step_id)
            return min(passed, self._layers - 1) if step_id == self.held[0] else passed

        def _finish(self, work: emulated.EmulatedWork) -> None:
            if self.held == (work.step.id, closing()):
                self._cancel = self._timer.call_at(self._timer.now() + LOOK_S, lambda: self._finish(work))
            else:
                super()._finish(work)

    return HeldExecutor


def main(argv: list[str]) -> None:
    replacement: Any = held_executor(Path(argv[0]))
    server.EmulatedExecutor = replacement  # type: ignore[misc]
    server.run(parse(argv[1:]))


if __name__ == "__main__":
    main(sys.argv[1:])
