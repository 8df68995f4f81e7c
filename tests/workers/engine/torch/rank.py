"""One tensor-parallel rank of the test: `python -m tests.workers.engine.torch.rank MODEL RANK WORLD STORE TIMES`.

Every rank draws the same commands, but its own delays and its own operators in which a step is told to stop. Prints a
line of JSON: `stops`, the number of operators done when a step stopped (null: it ended); `together`, the same for steps
that all ranks told to stop in the same operator, each after that operator's number; `tokens`, each step's token.
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
from workers.engine.torch.model.batch import ForwardPass
from workers.engine.torch.ranks import ProcessRanks
from workers.engine.torch.task import Boundary, ModelStage

ANSWER_S = 30.0


LAG_S = 0.002  # how long a rank may pause before an operator, so that now one rank and now the other is behind


class Rank:
    def __init__(self, path: Path, rank: int, boundary: Boundary, counter: int) -> None:
        self.events: queue.Queue = queue.Queue()
        ranks = ProcessRanks(counter)
        plain = program(path, 200, ranks=ranks)
        plain.stages = [self._signalled(index, stage) for index, stage in enumerate(plain.stages)]
        self.operators = len(plain.stages)
        self.executor = TorchExecutor(
            plain, self.events.put, lambda call: call(), self.events.put, boundary=boundary, ranks=ranks
        )
        self.own = random.Random(rank)
        self.signal_in: tuple[int, int] | None = None  # the step, and the operator in which it is told to stop
        self.stops: list[int | None] = []
        self.together: list[tuple[int, int | None]] = []
        self.tokens: dict[int, int] = {}

    @property
    def suspended(self) -> int:
        return sum(stop is not None for stop in self.stops)

    def _signalled(self, index: int, stage: ModelStage) -> ModelStage:
        def run(p: ForwardPass) -> None:
            if self.own.random() < 0.1:
                time.sleep(self.own.uniform(0, LAG_S))
            if self.signal_in is not None and self.signal_in[1] == index:
                self.executor.suspend(self.signal_in[0])
            stage.operator(p)

        return stage._replace(operator=run)

    def start(self, step_id: int, tokens: list[int], first_block: int) -> bool:
        """Whether the step was suspended; the signal comes in an operator of this rank's own."""
        self.signal_in = step_id, self.own.randrange(self.operators)
        self.executor.start(step_of(step_id, tokens, first_block))
        return self._answer(step_id) is not None

    def start_together(self, step_id: int, tokens: list[int], operator: int) -> bool:
        """The same, but all ranks are signalled in the same operator. They first wait until all have reached the last
        stop, because no other one is set before."""
        dist.barrier()
        self.signal_in = step_id, operator
        self.executor.start(step_of(step_id, tokens))
        self.together.append((operator + 1, self._answer(step_id)))
        return self.stops[-1] is not None

    def resume(self, step_id: int, *, signalled: bool = True) -> bool:
        done = self.executor._pool._aside[step_id].done
        self.signal_in = (step_id, self.own.randrange(done, self.operators)) if signalled else None
        self.executor.resume(step_id)
        return self._answer(step_id) is not None

    def _answer(self, step_id: int) -> int | None:
        """How many operators were done when it stopped."""
        event = self.events.get(timeout=ANSWER_S)
        if isinstance(event, Exception):
            raise event
        assert event.step_id == step_id
        if isinstance(event, Suspended):
            self.stops.append(self.executor._pool._aside[step_id].done)
        else:
            self.stops.append(None)
            self.tokens[step_id] = event.sampled[0].token
        return self.stops[-1]


def run(rank: Rank, times: int) -> None:
    """Until a signal has suspended a step `times` times: a step may end before it reaches the next boundary. Every
    second step is first signalled on all ranks at once; every other suspension lets another step run first, which is
    signalled too."""
    commands, step_id = random.Random(99), 0
    while rank.suspended < times:
        step_id += 1
        tokens = [commands.randrange(500) for _ in range(commands.randint(2, 60))]
        if step_id % 2:
            suspended = rank.start(step_id, tokens, 0)
        else:
            suspended = rank.start_together(step_id, tokens, step_id // 2 % (rank.operators - 1))
        while suspended:
            if commands.random() < 0.5:
                other = step_id + 1_000_000
                suspended = rank.start(other, [commands.randrange(500) for _ in range(20)], 100)
                while suspended:
                    suspended = rank.resume(other)
                rank.resume(step_id, signalled=False)
                break
            suspended = rank.resume(step_id)


def main(path: str, rank: str, world: str, store: str, times: str, boundary: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=int(world))
    with open(f"{store}.counter", "r+b") as counter:
        member = Rank(Path(path), int(rank), Boundary[boundary], os.dup(counter.fileno()))
    run(member, int(times))
    dist.barrier()
    print(json.dumps({"stops": member.stops, "together": member.together, "tokens": member.tokens}))
    sys.stdout.flush()
    member.executor.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
