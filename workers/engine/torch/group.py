"""The tensor-parallel ranks of one engine: the first is the engine itself, the others are processes that follow it.

Only the first rank schedules. What it starts, resumes and discards it tells the others over a socket pair of their own,
in the order in which it does so itself; then all run the same operators and meet in their sums (`torch_ranks`). They
live and die together: a rank that ends ends the engine, and the engine's end, however it comes, ends its ranks.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from controller.core.errors import SlacklineError
from workers.engine.torch.batch import Segment
from workers.engine.torch.config import TransformerConfig
from workers.engine.torch.rank_counter import shared_memory
from workers.engine.torch.ranks import ProcessRanks

HOST = "127.0.0.1"  # all ranks of an engine are on one host
MEET_S = 300.0  # for a rank to start, and the longest that one waits for another in a sum
CAUSE_S = 1.0
Verb = Literal["run", "run_whole", "resume", "discard", "load", "release", "drop_copy"]
logger = logging.getLogger("workers.engine")


class RankLost(SlacklineError):
    """A rank ended, or could not begin."""


@dataclass(frozen=True, slots=True)
class RankPart:
    """What a rank has to make; `boundary` as `torch_serving.BOUNDARIES` names it, None: steps run whole."""

    rank: int
    world: int
    store_port: int
    folder: Path
    config: TransformerConfig
    device: str
    dtype: str
    blocks: int
    block_size: int
    threads: int | None
    load: bool
    room: bool  # as `torch_serving.load_program` takes it
    boundary: str | None


def join(rank: int, world: int, store: dist.Store, device: str, counter: int) -> ProcessRanks:
    """Returns when all are there. Raises RankLost."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend, limit = "nccl" if device == "cuda" else "gloo", timedelta(seconds=MEET_S)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
    except RuntimeError as error:
        raise RankLost(f"the ranks did not meet: {str(error).partition(chr(10))[0]}") from error
    return ProcessRanks(counter)


def told(segments: Sequence[Segment]) -> list[tuple[Any, ...]]:
    """What the others need of a step: they sample nothing."""
    return [(segment.tokens, segment.start, segment.blocks) for segment in segments]


class RankGroup:
    """The other ranks, as the first one sees them. `lost` is called once, from a thread, when one ends too early."""

    def __init__(self, parts: Callable[[int, int], RankPart], world: int, device: str) -> None:
        """`parts(rank, store_port)`. Raises RankLost."""
        limit = timedelta(seconds=MEET_S)
        with socket.create_server((HOST, 0)) as door:  # torch's own would listen on all addresses
            port, opened = door.getsockname()[1], door.detach()
        store = dist.TCPStore(
            HOST, port, world, is_master=True, timeout=limit, wait_for_workers=False, master_listen_fd=opened
        )
        self.lost: Callable[[RankLost], None] = _end_at_once
        self._lost: RankLost | None = None
        self._one_lost, self._closed = threading.Event(), False
        self._asking = threading.Lock()
        counter = shared_memory(world)  # the ranks keep it open as long as they live
        self._ranks = [_Rank(parts(rank, store.port), counter) for rank in range(1, world)]
        for rank in self._ranks:
            threading.Thread(target=self._watch, args=(rank,), name=f"rank-{rank.number}", daemon=True).start()
        self.ranks = join(0, world, store, device, counter)

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks]

    # ---- the engine's thread ----------------------------------------------------------------------------------------

    def run(self, step_id: int, segments: Sequence[Segment]) -> None:
        self._tell("run", step_id, told(segments))

    def run_whole(self, segments: Sequence[Segment]) -> None:
        """Without boundaries, also here: a boundary that only some ranks count would part them for good."""
        self._tell("run_whole", told(segments))

    def resume(self, step_id: int) -> None:
        self._tell("resume", step_id)

    def discard(self, step_id: int) -> None:
        self._tell("discard", step_id)

    def _tell(self, verb: Verb, *values: Any) -> None:
        for rank in self._ranks:
            try:
                rank.channel.send((verb, *values))
            except OSError:  # its end is noticed by whoever watches it
                logger.warning("rank %d does not listen", rank.number)

    # ---- any thread -------------------------------------------------------------------------------------------------

    def answers(self) -> list[int]:
        """Of what was asked last, or of the start: a number of bytes each. Raises RankLost with what a rank said."""
        found, errors = [], []
        for rank in self._ranks:
            try:
                error, number = rank.channel.recv()
            except (EOFError, OSError):
                error, number = str(self.cause(RankLost(f"rank {rank.number} ended"))), 0
            found.append(number)
            errors += [f"rank {rank.number}: {error}"] if error else []
        if errors:
            raise RankLost("; ".join(errors))
        return found

    def ask(self, verb: Literal["load", "release", "drop_copy"], value: Any) -> list[int]:
        """While no step runs. Raises RankLost."""
        with self._asking:
            self._tell(verb, value)
            return self.answers()

    def cause(self, error: Exception) -> Exception:
        """A sum breaks off because a rank ended: the latter is what is to be said."""
        self._one_lost.wait(CAUSE_S)
        return self._lost or error

    def close(self) -> None:
        """The others end when their channel does."""
        self._closed = True
        for rank in self._ranks:
            rank.channel.close()
        for rank in self._ranks:
            rank.end()

    def _watch(self, rank: _Rank) -> None:
        code = rank.process.wait()
        if self._closed or self._one_lost.is_set():
            return
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self._lost = RankLost(f"rank {rank.number} {how}: the model needs all of its ranks")
        self._one_lost.set()
        self.lost(self._lost)


class _Rank:
    """One of the others: its process and the way to it."""

    def __init__(self, part: RankPart, counter: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            ways = [theirs.fileno(), counter]
            numbers = [str(number) for number in (ways[0], os.getpid(), counter)]
            self.process = subprocess.Popen(
                [sys.executable, "-m", "workers.engine.torch.follower", *numbers], pass_fds=ways
            )
        self.number = part.rank
        self.channel = Connection(ours.detach())
        self.channel.send(part)

    def end(self) -> None:
        try:
            self.process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _end_at_once(error: RankLost) -> None:
    """Before anything is served, when the first rank may wait for the lost one in a way that nothing interrupts."""
    logger.error("%s", error)
    os._exit(1)
