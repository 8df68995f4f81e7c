"""A step as a list of operators and the number of those done: what the execution pool runs, leaves and enters again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

import torch

from workers.engine.torch.batch import ForwardPass, Segment, build
from workers.engine.torch.cache import KVCache
from workers.engine.torch.model import Model, Operator
from workers.engine.torch.sampling import sample
from workers.engine.torch.streams import DeviceMark, mark

LEAD = 1  # operators queued on a CUDA device ahead of the one that runs


class Boundary(IntEnum):
    """Where a running step may be left. The end of a layer is the end of an operator too."""

    OPERATOR = 1
    LAYER = 2


class ModelStage(NamedTuple):
    """One operator, and the coarsest boundary behind it."""

    name: str
    operator: Operator
    boundary: Boundary


class OperatorProgram:
    """One pass through a model over one cache. Positions, masks and embeddings are made in front of its first stage."""

    def __init__(self, model: Model, cache: KVCache) -> None:
        self.model, self.cache = model, cache
        self.stages: list[ModelStage] = []
        for layer in model.layers(cache):
            self.stages += [ModelStage(name, operator, Boundary.OPERATOR) for name, operator in layer]
            self.stages[-1] = self.stages[-1]._replace(boundary=Boundary.LAYER)
        self.stages.append(ModelStage("lm_head", model.lm_head, Boundary.LAYER))

    def begin(self, segments: list[Segment]) -> ForwardPass:
        p = build(segments, self.cache, self.model.device)
        self.model.embed(p)
        return p


class StepTask:
    """A step and how far it is: `done` of `length` operators. Over, it has `sampled` a token for each that asked."""

    def __init__(self, id: int, program: OperatorProgram, segments: list[Segment]) -> None:
        self.id = id
        self.length = len(program.stages)
        self.done = 0
        self.seconds = 0.0  # on the device, without suspensions
        self.sampled: list[tuple[Segment, int]] = []
        self._program, self._segments = program, segments
        self._pass: ForwardPass | None = None  # intermediate results: all that a suspension keeps
        self._marks: list[DeviceMark] = []  # behind each layer
        self._passed = 0

    @property
    def over(self) -> bool:
        return self.done == self.length

    @property
    def layers_done(self) -> int:
        """Of the model: computed by the device, not merely queued there. Any thread may ask."""
        while self._passed < len(self._marks) and self._marks[self._passed].query():
            self._passed += 1
        return self._passed

    @property
    def operator(self) -> str:
        """Name of the operator to come."""
        return self._program.stages[self.done].name

    def advance(self) -> Boundary:
        """Run one operator; the boundary behind it."""
        if self._pass is None:
            self._pass = self._program.begin(self._segments)
        _, operator, boundary = self._program.stages[self.done]
        operator(self._pass)
        self.done += 1
        if self.done == self.length:
            self._end(self._pass)
        elif boundary is Boundary.LAYER:
            self._marks.append(mark(self._program.model.device))
        return boundary

    def event(self) -> torch.cuda.Event:
        """Behind what it has queued on its CUDA device."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._program.model.device))
        return event

    def _end(self, p: ForwardPass) -> None:
        self._pass = None
        wanted = [(segment, segment.draw) for segment in self._segments if segment.draw is not None]
        if wanted:
            tokens = sample(p.logits, [draw for _, draw in wanted])
            self.sampled = [(segment, token) for (segment, _), token in zip(wanted, tokens, strict=True)]


def run(task: StepTask, boundary: Boundary, stops: Callable[[bool], bool], lead: int | None) -> None:
    """Until the task is over or stops at a boundary, each of which is asked for: `stops(over)`.

    `lead`: how many operators may be queued on a CUDA device ahead of the one that runs (None: on a CPU none are). A
    boundary means something only when the work before it is done, and a device that waits for the host at each operator
    would stand still in between.
    """
    queued = deque[torch.cuda.Event]()
    while not task.over:
        reached = task.advance()
        if lead is not None:
            queued.append(task.event())
            if len(queued) > lead:
                queued.popleft().synchronize()
        if reached >= boundary and stops(task.over):
            return
