"""One tensor-parallel rank of the test: `python -m tests.workers.engine.torch.rank MODEL RANK WORLD STORE TIMES`.

Every rank draws the same commands and its own delays, so signals reach the ranks at different operators. Prints a line
of JSON: for each signal the operators done when the step stopped (null: it ended), and each step's token.
"""

from __future__ import annotations

import json
import os
import queue
import random
import sys
import time
from pathlib import Path

import torch.distributed as dist

from controller.core.steps import Suspended
from tests.workers.engine.torch.bench import program
from tests.workers.engine.torch.test_pool import step_of
from workers.engine.torch.executor import TorchExecutor
from workers.engine.torch.ranks import ProcessRanks
from workers.engine.torch.task import Boundary

ANSWER_S = 30.0


class Rank:
    def __init__(self, path: Path, rank: int, boundary: Boundary, counter: int) -> None:
        self.events: queue.Queue = queue.Queue()
        ranks = ProcessRanks(counter)
        self.executor = TorchExecutor(
            program(path, 200, ranks=ranks), self.events.put, lambda call: call(), self.events.put,
            boundary=boundary, ranks=ranks,
        )  # fmt: skip
        self.delays = random.Random(rank)
        self.stops: list[int | None] = []
        self.tokens: dict[int, int] = {}
        self.step_s = 0.01

    @property
    def suspended(self) -> int:
        return sum(stop is not None for stop in self.stops)

    def start(self, step_id: int, tokens: list[int], first_block: int) -> None:
        self.executor.start(step_of(step_id, tokens, first_block))

    def signal(self, step_id: int) -> bool:
        """At a moment of this rank's own; whether the step was suspended."""
        time.sleep(self.delays.uniform(0, 1.2) * self.step_s)
        self.executor.suspend(step_id)
        return self.answer(step_id)

    def answer(self, step_id: int) -> bool:
        event = self.events.get(timeout=ANSWER_S)
        if isinstance(event, Exception):
            raise event
        assert event.step_id == step_id
        suspended = isinstance(event, Suspended)
        self.stops.append(self.executor._pool._aside[step_id].done if suspended else None)
        if not suspended:
            self.step_s += 0.2 * (event.seconds - self.step_s)
            self.tokens[step_id] = event.sampled[0].token
        return suspended


def run(rank: Rank, times: int) -> None:
    """Until a signal has suspended a step `times` times: a step may end before it reaches the next boundary. Every
    other suspension lets another step run first, which is signalled too."""
    commands, step_id = random.Random(99), 0
    while rank.suspended < times:
        step_id += 1
        length = commands.randint(2, 60)
        rank.start(step_id, [commands.randrange(500) for _ in range(length)], 0)
        while rank.signal(step_id):
            if commands.random() < 0.5:
                other = step_id + 1_000_000
                rank.start(other, [commands.randrange(500) for _ in range(20)], 100)
                while rank.signal(other):
                    rank.executor.resume(other)
                step_id, held = step_id + 1, step_id
                rank.executor.resume(held)
                rank.answer(held)
                break
            rank.executor.resume(step_id)


def main(path: str, rank: str, world: str, store: str, times: str, boundary: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world))
    with open(f"{store}.counter", "r+b") as counter:
        member = Rank(Path(path), int(rank), Boundary[boundary], os.dup(counter.fileno()))
    run(member, int(times))
    dist.barrier()
    print(json.dumps({"stops": member.stops, "tokens": member.tokens}))
    sys.stdout.flush()
    member.executor.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
