"""The tensor-parallel ranks of one engine: the first is the engine itself, the others are child processes.

Only the first rank schedules. It sends each start, resume and discard to the others over one socket pair each, in the
order in which it carries them out; then all ranks run the same operators and synchronise in their sums (`ranks`). A
rank that ends also ends the engine, and the end of the engine, in any way, ends its ranks.
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
from workers.engine.model_config import TransformerConfig
from workers.engine.torch.model.batch import Segment
from workers.engine.torch.rank_counter import shared_memory
from workers.engine.torch.ranks import ProcessRanks

HOST = "127.0.0.1"  # all ranks of an engine are on one host
MEET_S = 300.0  # for a rank to start, and the longest wait for another rank in a sum
CAUSE_S = 1.0
Verb = Literal["run", "run_whole", "resume", "discard", "load", "release", "drop_copy"]
logger = logging.getLogger("workers.engine")


class RankLost(SlacklineError):
    """A rank has ended, or could not start."""


@dataclass(frozen=True, slots=True)
class RankPart:
    """The configuration of a rank. `boundary`: a key of `serving.BOUNDARIES`, None: steps are never suspended."""

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
    room: bool  # as in `serving.load_program`
    boundary: str | None


def join(rank: int, world: int, store: dist.Store, device: str, counter: int) -> ProcessRanks:
    """Join the process group; returns when all ranks have joined. Raises RankLost."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend, limit = "nccl" if device == "cuda" else "gloo", timedelta(seconds=MEET_S)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
    except RuntimeError as error:
        raise RankLost(f"the ranks did not meet: {str(error).partition(chr(10))[0]}") from error
    return ProcessRanks(counter)


def without_draws(segments: Sequence[Segment]) -> list[tuple[Any, ...]]:
    """The parts of a step that the other ranks need; they do not sample."""
    return [(segment.tokens, segment.start, segment.blocks) for segment in segments]


class RankGroup:
    """The other ranks, for the first one. `lost` is called once, from a thread, if a rank ends too early."""

    def __init__(self, parts: Callable[[int, int], RankPart], world: int, device: str) -> None:
        """`parts(rank, store_port)`: the configuration of a rank. Raises RankLost."""
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
        self._tell("run", step_id, without_draws(segments))

    def run_whole(self, segments: Sequence[Segment]) -> None:
        """Run a step without boundaries, on the first rank too, since a boundary that only some ranks count would
        desynchronise them."""
        self._tell("run_whole", without_draws(segments))

    def resume(self, step_id: int) -> None:
        self._tell("resume", step_id)

    def discard(self, step_id: int) -> None:
        self._tell("discard", step_id)

    def _tell(self, verb: Verb, *values: Any) -> None:
        for rank in self._ranks:
            try:
                rank.channel.send((verb, *values))
            except OSError:  # the thread that watches the rank reports its end
                logger.warning("rank %d does not listen", rank.number)

    # ---- any thread -------------------------------------------------------------------------------------------------

    def answers(self) -> list[int]:
        """The answers to the last call, or to the start: one number from each rank. Raises RankLost with their
        errors."""
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
        """Make a call to all ranks, while no step runs; returns their answers. Raises RankLost."""
        with self._asking:
            self._tell(verb, value)
            return self.answers()

    def cause(self, error: Exception) -> Exception:
        """The error to report: that a rank was lost, if that made a sum fail, else `error`."""
        self._one_lost.wait(CAUSE_S)
        return self._lost or error

    def close(self) -> None:
        """Close the channels, which ends the ranks, and wait for them."""
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
        self._lost = RankLost(f"rank {rank.number} {how}, and the model requires all ranks")
        self._one_lost.set()
        self.lost(self._lost)


class _Rank:
    """One of the other ranks: its process and its channel."""

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
    """End this process. Used before anything is served, when the first rank may wait uninterruptibly for the lost
    one."""
    logger.error("%s", error)
    os._exit(1)
