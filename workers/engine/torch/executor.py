"""The executor that runs a real transformer (`controller.core.steps.Executor`).

`start` copies what the step needs from its sequences and returns. The pool's thread computes, and results are passed to
the driver's thread. Intermediate results of a suspended step stay on the device until it is resumed or discarded.
"""

from __future__ import annotations

from collections.abc import Callable

from controller.core.steps import Sampled, Sink, Step, StepDone, Suspended
from workers.engine.torch.group import RankGroup
from workers.engine.torch.model.batch import segments_of
from workers.engine.torch.pool import ExecutionPool
from workers.engine.torch.ranks import Ranks
from workers.engine.torch.task import Boundary, OperatorProgram, StepTask

Post = Callable[[Callable[[], None]], None]


class TorchExecutor:
    """`post`: runs a callback on the driver's thread (an event loop's `call_soon_threadsafe`). `fail`: called there if
    an operator raises; the step is lost and no other step will run.

    `boundary`: where a step may be suspended (None: nowhere). `group`: the other tensor-parallel ranks, if any.
    """

    def __init__(
        self,
        program: OperatorProgram,
        sink: Sink,
        post: Post,
        fail: Callable[[Exception], None],
        *,
        boundary: Boundary | None = None,
        ranks: Ranks | None = None,
        group: RankGroup | None = None,
    ) -> None:
        self._group = group
        self._program, self._sink, self._post, self._fail = program, sink, post, fail
        self._eos = tuple(sorted(program.model.config.eos))
        self._closed = False
        self._tasks: dict[int, StepTask] = {}  # until the driver knows their end
        device = program.model.device
        self._pool = ExecutionPool(
            *(self._ended, self._suspended, self._broken, boundary),
            cuda=device if device.type == "cuda" else None,
            ranks=ranks or (group.ranks if group else None),
        )

    def start(self, step: Step) -> None:
        segments = segments_of(step, self._eos)
        if self._group is not None:
            self._group.run(step.id, segments)
        coming = [chunk.seq.coming for chunk in step.chunks if chunk.seq.coming is not None]
        task = self._tasks[step.id] = StepTask(step.id, self._program, segments, step.copies, coming, step.swaps)
        self._pool.submit(task)

    def suspend(self, step_id: int) -> None:
        self._pool.preempt(step_id)

    def resume(self, step_id: int) -> None:
        if self._group is not None:
            self._group.resume(step_id)
        self._pool.resume(step_id)

    def discard(self, step_id: int) -> None:
        if self._group is not None:
            self._group.discard(step_id)
        self._pool.discard(step_id)
        self._tasks.pop(step_id, None)

    def layers_done(self, step_id: int) -> int:
        task = self._tasks.get(step_id)
        return 0 if task is None else task.layers_done

    def close(self) -> None:
        self._closed = True
        self._pool.close()
        if self._group is not None:
            self._group.close()

    # ---- the pool's thread ----------------------------------------------------------------------------------------

    def _ended(self, task: StepTask) -> None:
        eos = self._program.model.config.eos
        sampled = [Sampled(segment.seq, token, token in eos) for segment, token in task.sampled]
        self._tell(lambda: self._over(StepDone(task.id, sampled, task.seconds, task.out_s, task.back_s)))

    def _over(self, done: StepDone) -> None:
        """Runs on the driver's thread, so that the step's layers count as passed until the driver knows its end."""
        self._tasks.pop(done.step_id, None)
        self._sink(done)

    def _suspended(self, task: StepTask, layers: int) -> None:
        self._tell(lambda: self._sink(Suspended(task.id, task.seconds, layers)))

    def _broken(self, error: Exception) -> None:
        cause = error if self._group is None else self._group.cause(error)
        self._tell(lambda: self._fail(cause))

    def _tell(self, call: Callable[[], None]) -> None:
        if not self._closed:
            self._post(call)
