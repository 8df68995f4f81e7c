"""When a prompt is nearly computed: from then on another engine may be chosen to decode it, and pull its KV.

Where steps are bounded (continuous batching, chunks) that is when the last step of the prefill begins: one step before
its end, and what earlier steps computed moves beside it. An engine that preempts computes a whole prompt as one step,
so its last step begins when the prompt does. Chosen then, the decode engine would be chosen as early as at dispatch,
and hold blocks for as long as the prefill takes and, whenever something more urgent comes, lies suspended. So there
it is when three quarters of the step's layers are passed, and only while it computes: nothing is said of a step that is
suspended, or asked to be, before it goes on. What is lost is overlap: of what the KV takes to move, more than a quarter
of the step's time comes after the prefill. What remains is a step suspended in its last quarter.

Nothing tells of layers: a step under way is looked at, as those do who send them (engine.kv_server).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from math import ceil

from controller.core.steps import NEARLY_COMPUTED, Seq, Step
from workers.engine.engine import Engine
from workers.engine.text.streams import Stream

LOOK_S = 0.002


@dataclass(slots=True)
class _Prefill:
    """`step`: its last one, once that has begun."""

    near: asyncio.Event = field(default_factory=asyncio.Event)
    step: int | None = None


class Endings:
    """`layers`: of the model. Hears of resumed steps itself; who hears of started ones tells of them by `began`."""

    def __init__(self, engine: Engine, layers: int) -> None:
        self._engine = engine
        self._passed = ceil(NEARLY_COMPUTED * layers) if engine.scheduler.whole_prompts else 0
        self._prefills: dict[str, _Prefill] = {}
        self._next_look: asyncio.TimerHandle | None = None  # one step computes at a time
        engine.on_resume = self._watch

    def close(self) -> None:
        self._stop_looking()

    def begin(self, seq: Seq) -> None:
        """It is about to be queued. `forget` follows."""
        self._prefills[seq.id] = _Prefill()

    def forget(self, seq: Seq) -> None:
        self._prefills.pop(seq.id, None)

    async def near(self, stream: Stream) -> bool:
        """Return once its prompt is nearly computed; False if it ended before."""
        near = self._prefills[stream.seq.id].near
        waits = [asyncio.ensure_future(near.wait()), asyncio.ensure_future(stream.ready())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return stream.finish is None

    def began(self, step: Step, last: list[Seq]) -> None:
        """The step runs; for those of it in `last` no other follows."""
        for seq in last:
            if seq.id in self._prefills:
                self._prefills[seq.id].step = step.id
        self._watch(step.id)

    # ---- looking ---------------------------------------------------------------------------------------------------

    def _watch(self, step_id: int) -> None:
        """It runs, or runs again."""
        self._stop_looking()
        if any(not prefill.near.is_set() for prefill in self._of(step_id)):
            self._look(step_id)

    def _look(self, step_id: int) -> None:
        if self._engine.computing != step_id:
            return  # over, or suspended: then it will be watched again
        if self._engine.layers_done(step_id) < self._passed:
            self._next_look = asyncio.get_running_loop().call_later(LOOK_S, self._look, step_id)
            return
        for prefill in self._of(step_id):
            prefill.near.set()

    def _stop_looking(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
            self._next_look = None

    def _of(self, step_id: int) -> list[_Prefill]:
        return [prefill for prefill in self._prefills.values() if prefill.step == step_id]
