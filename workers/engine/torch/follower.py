"""`python -m workers.engine.torch.follower FD PARENT COUNTER`: a tensor-parallel rank, started by its engine.

It runs what the first rank runs, in the same order, stops where they all do, and answers only to `load` and `release`,
with which the memory of its KV cache comes and goes like the first one's (`torch_room`), and to `drop_copy`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from controller.core.errors import SlacklineError
from controller.core.steps import Seq
from workers.engine.torch.batch import Segment
from workers.engine.torch.group import HOST, MEET_S, RankPart, join
from workers.engine.torch.serving import BOUNDARIES, load_program
from workers.engine.torch.task import LEAD, StepTask, run
from workers.engine.torch.transfer import WeightMemory

PR_SET_PDEATHSIG = 1
NOBODY = Seq("rank", 0.0, 0, 0)


class Follower:
    """Raises SlacklineError when it cannot make its part."""

    def __init__(self, part: RankPart, counter: int) -> None:
        limit = timedelta(seconds=MEET_S)
        store = dist.TCPStore(HOST, part.store_port, part.world, is_master=False, timeout=limit)
        _settle(part)
        self._ranks = join(part.rank, part.world, store, part.device, counter)
        self._program = load_program(
            *(part.folder, part.config),
            device=part.device,
            dtype=part.dtype,
            blocks=part.blocks,
            block_size=part.block_size,
            threads=part.threads,
            load=part.load,
            room=part.room,
            ranks=self._ranks,
        )
        self._folder = part.folder
        self._lead = LEAD if part.device == "cuda" else None
        self._boundary = BOUNDARIES[part.boundary] if part.boundary else None
        self._tasks: dict[int, StepTask] = {}  # suspended
        self._memory = WeightMemory(self._program.model.slots(), present=part.load, ranked=True)

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    def run(self, step_id: int, segments: list[tuple[Any, ...]]) -> None:
        self._go_on(self._task(step_id, segments))

    def run_whole(self, segments: list[tuple[Any, ...]]) -> None:
        self._go_through(self._task(0, segments))

    def resume(self, step_id: int) -> None:
        self._go_on(self._tasks.pop(step_id))

    def discard(self, step_id: int) -> None:
        del self._tasks[step_id]

    def load(self, kind: str) -> int:
        """Raises SlacklineError, RuntimeError, MemoryError; then nothing is present."""
        try:
            self._program.cache.take()
            return self._memory.load_host() if kind == "host" else self._memory.load_disk(self._folder)
        except BaseException:
            self._memory.release()
            self._program.cache.give_up()
            raise

    def release(self, keep_host_copy: bool | None) -> int:
        """1 where there is a copy now. None: one that is there stays, none is made."""
        if keep_host_copy is False:
            self._memory.drop_host_copy()
        elif keep_host_copy and self._memory.present:
            self._memory.keep_host_copy()
        self._memory.release()
        self._program.cache.give_up()
        return int(self._memory.has_host_copy)

    def drop_copy(self, _: None) -> int:
        self._memory.drop_host_copy()
        return 0

    def _task(self, step_id: int, segments: list[tuple[Any, ...]]) -> StepTask:
        found = [Segment(NOBODY, tokens, start, blocks, None) for tokens, start, blocks in segments]
        return StepTask(step_id, self._program, found)

    def _go_through(self, task: StepTask) -> None:
        while not task.over:
            task.advance()

    def _stops(self, over: bool) -> bool:
        return self._ranks.stops(False, over)

    def _go_on(self, task: StepTask) -> None:
        if self._boundary is None:
            self._go_through(task)
        else:
            run(task, self._boundary, self._stops, self._lead)
        if not task.over:
            self._tasks[task.id] = task


def _settle(part: RankPart) -> None:
    """On this rank's device: whatever names none would open a context on the first one's, which takes memory there.

    One that is not there is left to `load_program`, on all ranks: who waits for this one to join cannot be told.
    """
    if part.device == "cuda" and part.rank < torch.cuda.device_count():
        torch.cuda.set_device(part.rank)


@torch.inference_mode()
def follow(channel: Connection, counter: int) -> None:
    """Until the first rank hangs up."""
    follower = _made(channel, counter)
    while True:
        try:
            verb, *values = channel.recv()
        except EOFError:
            return
        if follower is None:  # what it said of its failure is read, and the first rank ends
            continue
        if verb in ("load", "release", "drop_copy"):
            channel.send(_answer(follower, verb, values[0]))
        else:
            getattr(follower, verb)(*values)


def _made(channel: Connection, counter: int) -> Follower | None:
    """Says how it went."""
    try:
        follower = Follower(channel.recv(), counter)
    except (SlacklineError, RuntimeError) as error:
        channel.send((str(error), 0))
        return None
    channel.send(("", follower.nbytes))
    return follower


def _answer(follower: Follower, verb: str, value: Any) -> tuple[str, int]:
    try:
        return "", getattr(follower, verb)(value)
    except (SlacklineError, OSError, RuntimeError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"[:500], 0


def die_with(parent: int) -> None:
    """The kernel ends this process when the one that started it is gone, however it went (Linux)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it is gone already
        sys.exit(1)


def main() -> None:
    die_with(int(sys.argv[2]))
    for signum in (signal.SIGINT, signal.SIGTERM):  # of a whole process group: the first rank decides what they mean
        signal.signal(signum, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s rank %(message)s")
    try:
        follow(Connection(int(sys.argv[1])), int(sys.argv[3]))
    except (OSError, RuntimeError) as error:  # the first rank is gone, or a sum broke off because another one is
        logging.getLogger("workers.engine").info("ends: %s", str(error).partition("\n")[0])
        sys.exit(1)


if __name__ == "__main__":
    main()
