"""Chunked prefill in an order of its own: FlowPrefill's baselines DistServe-CP2K and -CP8K, which combine it with EDF.

"FlowPrefill: Decoupling Preemption from Prefill Scheduling Granularity", sec. 6.1: chunks of 2,048 and 8,192 tokens
(here the engine's `max_num_batched_tokens`) and earliest deadline first. Every step takes the decodes, then fills the
rest of the budget with prompts in order, started or not, the last one cut to fit. So a more urgent prompt preempts a
longer one at the next chunk boundary, and short prompts share a chunk. Deviation from Sarathi-Serve's chunked prefill:
started prompts have no precedence.

`ordering`: `edf` (the paper's), `s_edf`, `d_edf`, `fcfs`. The slack of `s_edf` uses a + b n seconds for the n tokens
still needed (`prefill_a`, `prefill_b`); the other orders use no prediction. Cost: O(n log n) in prompts per step. Not
steady: the order of the queue changes with time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from controller.core.errors import ConfigError
from controller.core.steps import EngineEvent
from controller.policies.batching.base import BATCHINGS, EngineView, Grant
from controller.policies.batching.filling import fill, prompts
from controller.policies.ordering.prefill_orders import prefill_order


@dataclass(frozen=True, slots=True)
class OrderedChunksConfig:
    ordering: str = "edf"
    prefill_a: float = 0.01
    prefill_b: float = 1e-4

    def __post_init__(self) -> None:
        if self.prefill_a < 0 or not self.prefill_b > 0:
            raise ConfigError("prefill_a must not be negative and prefill_b positive", field="prefill_b")
        prefill_order(self.ordering)


@BATCHINGS.register("ordered_chunks")
class OrderedChunks:
    name: ClassVar[str] = "ordered_chunks"
    reorders: ClassVar[bool] = True
    Config = OrderedChunksConfig

    def __init__(self, config: OrderedChunksConfig | None = None) -> None:
        self.config = config or OrderedChunksConfig()
        self._order = prefill_order(self.config.ordering)

    def compose(self, engine: EngineView, now: float) -> list[Grant]:
        decodes = [Grant(seq, 1) for seq in engine.running if seq.decoding][: engine.token_budget]
        key, a, b = self._order.key, self.config.prefill_a, self.config.prefill_b
        ranked = sorted(
            prompts(engine),
            key=lambda i: (*key(i.seq.due, a + b * i.needed, i.seq.arrival, now), i.seq.arrival, i.seq.id),
        )
        return decodes + fill(engine, ranked, engine.token_budget - len(decodes))

    def observe(self, event: EngineEvent, now: float) -> None:
        """Nothing to learn."""
