"""`python -m workers.engine.torch.follower FD PARENT COUNTER`: a tensor-parallel rank, started by its engine.

It runs the same steps as the first rank, in the same order, and stops where all ranks stop. It answers only `load` and
`release`, which also allocate and release the memory of its KV cache as on the first rank (`room`), and `drop_copy`.
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
from workers.engine.torch.group import HOST, MEET_S, RankPart, join
from workers.engine.torch.model.batch import Segment
from workers.engine.torch.serving import BOUNDARIES, load_program
from workers.engine.torch.task import LEAD, StepTask, run
from workers.engine.torch.weights.transfer import WeightMemory
from workers.engine.weights.rank_turns import own_turns
from workers.environment import read_variable
from workers.log_lines import log_to_stderr

PR_SET_PDEATHSIG = 1
NOBODY = Seq("rank", 0.0, 0, 0)


class Follower:
    """The rank's part of the model. Raises SlacklineError if it cannot be created."""

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
        self._folder, self._rank = part.folder, part.rank
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
        """Load this rank's weights; returns the bytes read. Raises SlacklineError, RuntimeError, MemoryError; then no
        weights are present."""
        try:
            self._program.cache.take()
            if kind != "host":
                return self._memory.load_disk(self._folder)
            socket = read_variable(os.environ, "FLOW_SOCKET")
            with own_turns(socket, self.nbytes, f"rank {self._rank} of {self._folder.name}") as turns:
                return self._memory.load_host(turns=turns)
        except BaseException:
            self._memory.release()
            self._program.cache.give_up()
            raise

    def release(self, keep_host_copy: bool | None) -> int:
        """Release the weights; returns 1 if there is a copy in host memory now. `keep_host_copy`: None keeps an
        existing copy and makes none."""
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
    """Make this rank's device the current one; otherwise code without an explicit device would open a context on the
    first rank's device, which takes memory there.

    A missing device is reported by `load_program`, after the ranks have joined, since ranks that wait for this one
    could not be notified before.
    """
    if part.device == "cuda" and part.rank < torch.cuda.device_count():
        torch.cuda.set_device(part.rank)


@torch.inference_mode()
def follow(channel: Connection, counter: int) -> None:
    """Carry out calls of the first rank until it closes the channel."""
    follower = _made(channel, counter)
    while True:
        try:
            verb, *values = channel.recv()
        except EOFError:
            return
        if follower is None:  # it has reported its failure, and the first rank will end
            continue
        if verb in ("load", "release", "drop_copy"):
            channel.send(_answer(follower, verb, values[0]))
        else:
            getattr(follower, verb)(*values)


def _made(channel: Connection, counter: int) -> Follower | None:
    """Create the rank and report the result to the first rank; None if it failed."""
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
    """Have the kernel kill this process when its parent ends, in any way (Linux)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended already
        sys.exit(1)


def main() -> None:
    die_with(int(sys.argv[2]))
    for signum in (signal.SIGINT, signal.SIGTERM):  # sent to the whole process group; only the first rank handles them
        signal.signal(signum, signal.SIG_IGN)
    log_to_stderr(logging.WARNING, "%(asctime)s %(levelname)s rank %(message)s")
    try:
        follow(Connection(int(sys.argv[1])), int(sys.argv[3]))
    except (OSError, RuntimeError) as error:  # the first rank has ended, or a sum failed because another rank has
        logging.getLogger("workers.engine").info("ends: %s", str(error).partition("\n")[0])
        sys.exit(1)


if __name__ == "__main__":
    main()
