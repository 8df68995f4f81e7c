"""The execution pool of FlowPrefill (sections 4 and 5.1): it runs at most one task and keeps those that were preempted.

Commands come from the scheduler's thread: submit, preempt, resume, discard. One worker thread runs operators; behind
each it looks for the preemption signal. Found, the worker takes the signal back, puts the task aside with all its
intermediate results and acknowledges; the task goes on later with the next operator, on the very same tensors, which is
why a preempted task ends with the same bits. A task that ended before the signal was seen is reported as ended.

Deviation: the paper gives each task a thread and a CUDA stream. A task here is a list of operators and a position, so
one thread runs them all, and nothing of a suspended task lives on a stack.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

import torch

from workers.engine.torch.ranks import Alone, Ranks
from workers.engine.torch.task import LEAD, Boundary, StepTask, run


class ExecutionPool:
    """Answers come as `ended(task)`, `suspended(task)` or `failed(error)`, on the worker's thread.

    `boundary` None: tasks run without checks and every preempt is answered by the task's end. `cuda`: the CUDA device
    they run on, if it is one. `lead`: as `torch_task.run` takes it.
    """

    def __init__(
        self,
        ended: Callable[[StepTask], None],
        suspended: Callable[[StepTask], None],
        failed: Callable[[Exception], None],
        boundary: Boundary | None,
        *,
        cuda: torch.device | None = None,
        ranks: Ranks | None = None,
        lead: int = LEAD,
    ) -> None:
        self._ended, self._suspended, self._failed = ended, suspended, failed
        self._boundary, self._ranks = boundary, ranks or Alone()
        self._cuda, self._lead = cuda, lead
        self._lock = threading.Lock()
        self._running: StepTask | None = None
        self._aside: dict[int, StepTask] = {}
        self._signal = self._closed = False
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._worker = threading.Thread(target=self._work, name="execution-pool", daemon=True)
        self._worker.start()

    # ---- the scheduler's thread -----------------------------------------------------------------------------------

    def submit(self, task: StepTask) -> None:
        with self._lock:
            self._occupy(task)
        self._commands.put(lambda: self._run(task))

    def preempt(self, task_id: int) -> None:
        """Signal the running task. No error if it has just ended; then its end is the answer.

        Among several ranks the signal of another may have stopped it already.
        """
        with self._lock:
            if task_id in self._aside and self._ranks.world == 1:
                raise RuntimeError(f"step {task_id} is suspended already")
            if self._running is not None and self._running.id == task_id:
                self._signal = True

    def resume(self, task_id: int) -> None:
        with self._lock:
            if task_id not in self._aside:
                raise RuntimeError(f"step {task_id} is not suspended")
            task = self._aside[task_id]
            self._occupy(task)
            del self._aside[task_id]
        self._commands.put(lambda: self._run(task))

    def discard(self, task_id: int) -> None:
        with self._lock:
            if self._aside.pop(task_id, None) is None:
                raise RuntimeError(f"step {task_id} is not suspended")

    def close(self) -> None:
        """Stop behind the running operator; nothing is reported any more."""
        self._closed = True
        self._commands.put(None)
        self._worker.join(timeout=5.0)

    def _occupy(self, task: StepTask) -> None:
        if self._running is not None:
            raise RuntimeError("a step is running")
        self._running = task

    # ---- the worker's thread --------------------------------------------------------------------------------------

    def _work(self) -> None:
        with torch.inference_mode():
            while (command := self._commands.get()) is not None:
                try:
                    command()
                except Exception as error:
                    self._failed(error)
                    return

    def _stops(self, over: bool) -> bool:
        return self._ranks.stops(self._signal or self._closed, over)

    def _run(self, task: StepTask) -> None:
        began = time.perf_counter()
        if self._boundary is None:
            while not task.over:
                task.advance()
        else:
            run(task, self._boundary, self._stops, self._lead if self._cuda is not None else None)
        if self._cuda is not None:  # its own work: copies and transfers beside it may take longer
            torch.cuda.current_stream(self._cuda).synchronize()  # by default it would be the current device's
        task.seconds += time.perf_counter() - began
        if self._closed:
            return
        with self._lock:
            self._signal, self._running = False, None
            if not task.over:
                self._aside[task.id] = task
        (self._ended if task.over else self._suspended)(task)
