"""The execution pool of FlowPrefill (sections 4 and 5.1): it runs at most one task and keeps those that were preempted.

Commands come from the scheduler's thread: submit, preempt, resume, discard. One worker thread runs the operators and
checks for the preemption signal after each. If it is set, the worker clears it, stores the task with its intermediate
results, and acknowledges. The task later continues with the next operator on the same tensors, so its results are
bit-identical to those of an uninterrupted run. A task that ends before the signal is seen is reported as ended.

Deviation: the paper gives each task a thread and a CUDA stream. Here a task is a list of operators and a position, so
one thread runs them all, and a suspended task needs no stack.
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
    """Results are reported by `ended(task)`, `suspended(task, layers)` or `failed(error)`, on the worker's thread.
    `layers`: of coming prefixes that the task lacks and needs to go on; 0: it was asked to stop.

    `boundary` None: tasks run without checks, and a preempted task runs to its end. `cuda`: the CUDA device, if any.
    `lead`: as in `task.run`.
    """

    def __init__(
        self,
        ended: Callable[[StepTask], None],
        suspended: Callable[[StepTask, int], None],
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
        self._lacking: set[int] = set()  # of these, who stopped by themselves for a layer
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
        """Signal the running task. No error if it has just ended or stopped for a layer; that is reported then.

        With several ranks, the signal of another rank may have stopped it already.
        """
        with self._lock:
            if task_id in self._aside and task_id not in self._lacking and self._ranks.world == 1:
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
            self._lacking.discard(task_id)
        self._commands.put(lambda: self._run(task))

    def discard(self, task_id: int) -> None:
        with self._lock:
            if self._aside.pop(task_id, None) is None:
                raise RuntimeError(f"step {task_id} is not suspended")
            self._lacking.discard(task_id)

    def close(self) -> None:
        """Stop after the running operator. Nothing is reported any more."""
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
        lacking = 0
        if self._boundary is None:
            while not task.over and not (lacking := task.lacks()):
                task.advance()
        else:
            lacking = run(task, self._boundary, self._stops, self._lead if self._cuda is not None else None)
        if self._cuda is not None:  # only its own stream, since copies and transfers on others may take longer
            torch.cuda.current_stream(self._cuda).synchronize()  # the default would be the stream of the current device
        task.seconds += time.perf_counter() - began
        if self._closed:
            return
        with self._lock:
            self._signal, self._running = False, None
            if not task.over:
                self._aside[task.id] = task
                if lacking:
                    self._lacking.add(task.id)
        if task.over:
            self._ended(task)
        else:
            self._suspended(task, lacking)
