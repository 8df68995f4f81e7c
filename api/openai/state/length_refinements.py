"""Bounds of answers that still run, predicted again every 50 tokens: in batches, in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from api.openai.runtime import Runtime
from api.openai.state.bounds_teller import BoundsTeller
from api.openai.state.offloop import Busy, OffLoop
from controller.core import events as ev
from controller.predict.answer_lengths import AnswerBounds, AnswerLengths, Foretold, with_bounds

PERIOD_S = 0.25
BATCH_S = 5.0  # a batch takes milliseconds


class RunningAnswer(NamedTuple):
    """An answer that still runs, and how many of its tokens are out."""

    request_id: str
    model: str
    foretold: Foretold
    produced: int


class LengthRefinements:
    """Takes what the runtime lists, and tells its scheduler the new bounds, with the next events that come anyway, and
    the engines that run the answers. Its record keeps the last ones; the first ones of each count of tokens out judge
    the forest once the answer has ended."""

    def __init__(self, lengths: AnswerLengths, runtime: Runtime) -> None:
        self._lengths = lengths
        self._runtime = runtime
        self._thread = OffLoop("length refinements")
        self._engines = BoundsTeller(runtime.backends, runtime.spawn, runtime.clock)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            await self.refine()

    async def refine(self) -> None:
        """One batch. What ended meanwhile is not told."""
        listed, self._runtime.to_refine = self._runtime.to_refine, []
        batch = [
            RunningAnswer(each.request.id, each.request.model, each.foretold, each.output_tokens)
            for each in listed
            if each.foretold is not None and not each.over
        ]
        if not batch:
            return
        try:
            bounds = await self._thread.call(lambda: self._bounds(batch), BATCH_S)
        except (Busy, TimeoutError):  # the bounds that they have stay; the next ones are due 50 tokens later
            return
        for each, found in zip(batch, bounds, strict=True):
            running = self._runtime.requests.get(each.request_id)
            if found is not None and running is not None:
                running.refined, running.judging = found, with_bounds(running.judging, found)
                self._runtime.tell(ev.AnswerBounded(each.request_id, found.upper))
                self._engines.add(running.instance, each.request_id, (found.lower, found.upper))
        self._engines.send()

    def _bounds(self, batch: Sequence[RunningAnswer]) -> list[AnswerBounds | None]:
        return [self._lengths.bounds_again(each.model, each.foretold, each.produced) for each in batch]

    def close(self) -> None:
        self._thread.close()
