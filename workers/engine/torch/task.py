"""A step as a list of operators and a position, which the execution pool can run, suspend and resume."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

import torch

from controller.core.steps import NO_SWAPS, ComingPrefix, Swaps
from workers.engine.torch.model.batch import ForwardPass, Segment, build
from workers.engine.torch.model.cache import KVCache
from workers.engine.torch.model.sampling import sample
from workers.engine.torch.model.transformer import Model, Operator
from workers.engine.torch.streams import DeviceMark, mark

LEAD = 1  # operators queued on a CUDA device ahead of the running one


class Boundary(IntEnum):
    """Where a running step may be suspended. The end of a layer is also the end of an operator."""

    OPERATOR = 1
    LAYER = 2


class ModelStage(NamedTuple):
    """One operator, and the coarsest boundary after it."""

    name: str
    operator: Operator
    boundary: Boundary


class HostCopies(Protocol):
    """Copies between KV blocks and blocks of host memory. Both return the seconds that they took."""

    @property
    def blocks(self) -> int: ...

    def out(self, pairs: Sequence[tuple[int, int]]) -> float: ...

    def back(self, pairs: Sequence[tuple[int, int]]) -> float: ...


class OperatorProgram:
    """The stages of a pass through a model with one cache. Positions, masks and embeddings are computed before the
    first stage. `host`: host memory for evicted sequences, if there is any."""

    def __init__(self, model: Model, cache: KVCache) -> None:
        self.model, self.cache = model, cache
        self.host: HostCopies | None = None
        self.stages: list[ModelStage] = []
        for layer in model.layers(cache):
            self.stages += [ModelStage(name, operator, Boundary.OPERATOR) for name, operator in layer]
            self.stages[-1] = self.stages[-1]._replace(boundary=Boundary.LAYER)
        self.stages.append(ModelStage("lm_head", model.lm_head, Boundary.LAYER))
        self._layer_length = (len(self.stages) - 1) // model.config.layers

    def first_of_layer(self, index: int) -> int | None:
        """The layer that begins with this stage; None if none does."""
        layer, rest = divmod(index, self._layer_length)
        return None if rest or index == len(self.stages) - 1 else layer

    def begin(self, segments: list[Segment]) -> ForwardPass:
        p = build(segments, self.cache, self.model.device)
        self.model.embed(p)
        return p


class StepTask:
    """A step in progress: `done` of `length` operators. At its end, `sampled` has a token for each segment with a
    draw."""

    def __init__(
        self,
        id: int,
        program: OperatorProgram,
        segments: list[Segment],
        copies: Sequence[tuple[int, int]] = (),
        coming: Sequence[ComingPrefix] = (),
        swaps: Swaps = NO_SWAPS,
    ) -> None:
        """`copies`: blocks of the cache, from and to, that are copied first. `coming`: prefixes that it reads while
        they are copied here. `swaps.out` comes before the copies, and `swaps.back` after them."""
        self.id = id
        self._coming = coming
        self._copies, self._swaps = copies, swaps
        self.out_s = self.back_s = 0.0
        self.length = len(program.stages)
        self.done = 0
        self.seconds = 0.0  # on the device, without suspensions
        self.sampled: list[tuple[Segment, int]] = []
        self._program, self._segments = program, segments
        self._pass: ForwardPass | None = None  # intermediate results: all that a suspension keeps
        self._marks: list[DeviceMark] = []  # one after each layer
        self._passed = 0

    @property
    def over(self) -> bool:
        return self.done == self.length

    @property
    def layers_done(self) -> int:
        """The number of layers that the device has computed, not only queued. Thread-safe."""
        while self._passed < len(self._marks) and self._marks[self._passed].query():
            self._passed += 1
        return self._passed

    def lacks(self) -> int:
        """How many layers of coming prefixes its next operator needs, if one of them is not here; else 0."""
        layer = self._program.first_of_layer(self.done) if self._coming else None
        return 0 if layer is None or all(each.layers > layer for each in self._coming) else layer + 1

    @property
    def operator(self) -> str:
        """The name of the next operator."""
        return self._program.stages[self.done].name

    def advance(self) -> Boundary:
        """Run one operator; returns the boundary after it."""
        if self._pass is None:
            self._copy()
            self._pass = self._program.begin(self._segments)
        _, operator, boundary = self._program.stages[self.done]
        operator(self._pass)
        self.done += 1
        if self.done == self.length:
            self._end(self._pass)
        elif boundary is Boundary.LAYER:
            self._marks.append(mark(self._program.model.device))
        return boundary

    def _copy(self) -> None:
        host = self._program.host
        if host is None and self._swaps != NO_SWAPS:
            raise RuntimeError("there is no host memory for KV")
        if host is not None:
            self.out_s = host.out(self._swaps.out)
        self._program.cache.copy(self._copies)
        if host is not None:
            self.back_s = host.back(self._swaps.back)

    def event(self) -> torch.cuda.Event:
        """An event after all work that it has queued on its CUDA device."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._program.model.device))
        return event

    def _end(self, p: ForwardPass) -> None:
        self._pass = None
        wanted = [(segment, segment.draw) for segment in self._segments if segment.draw is not None]
        if wanted:
            tokens = sample(p.logits, [draw for _, draw in wanted])
            self.sampled = [(segment, token) for (segment, _), token in zip(wanted, tokens, strict=True)]


def run(task: StepTask, boundary: Boundary, stops: Callable[[bool], bool], lead: int | None) -> int:
    """Run the task until it ends, or `stops(over)` returns True at a boundary, or it lacks a layer. Returns how many
    layers it then needs; 0 if it lacks none.

    `lead`: how many operators may be queued on a CUDA device ahead of the running one (None: on a CPU). With none the
    device would be idle between operators; with many the host would be far ahead of the boundary that the device has
    reached.
    """
    queued = deque[torch.cuda.Event]()
    while not task.over:
        if (lacking := task.lacks()) > 0:
            return lacking
        reached = task.advance()
        if lead is not None:
            queued.append(task.event())
            if len(queued) > lead:
                queued.popleft().synchronize()
        if reached >= boundary and stops(task.over):
            return 0
    return 0
