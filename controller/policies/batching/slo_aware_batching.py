"""FlowPrefill's SLO-aware batching: the most urgent prompt, batched with as much as its slack allows.

"FlowPrefill: Decoupling Preemption from Prefill Scheduling Granularity", Alg. 1 and eq. 3. Before each step prompts are
ranked by S-EDF on the time *still* needed. If the first one has not started, others that have not started are batched
with it, in rank order, while its remaining time exceeds the predicted latency of the whole batch and the batch stays
below `batch_tokens` (both strict). One that does not fit is skipped and the scan continues. A prompt larger than the
budget runs alone. A started prompt continues without additions, like a resumed execution.

Under `controller.engine.PreemptivePrefill` these are the rules of its rounds, and preemption happens within a step. The
continuous scheduler can change the batch only between steps, so there preemption happens at chunk boundaries (a step's
tokens are bounded by the engine's budget), and members of a batch have ranks of their own once started, while in the
paper they are resumed with the head. On a collocated engine the decodes come first; the paper has one prefill and one
decode instance.

`prefill_a`, `_b`, `_c`: predicted latency of n tokens, a + b n + c n^2 seconds (sec. 6.4: a polynomial in tokens,
fitted offline; a batch counts as one prompt of its length). `batch_tokens` 4,096: the paper's G, where 4K to 8K are
equally good. `ordering`: `s_edf`, or what the paper compares it with, `d_edf`, `edf`, `fcfs`. `batch` false: one prompt
at a time. Cost: O(n log n) in prompts per step. Not steady: ranks change with time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from controller.core.errors import ConfigError
from controller.core.steps import EngineEvent
from controller.policies.batching.base import BATCHINGS, EngineView, Grant
from controller.policies.batching.filling import Prompting, fill, prompts
from controller.policies.ordering.prefill_orders import prefill_order


@dataclass(frozen=True, slots=True)
class SloAwareBatchingConfig:
    prefill_a: float = 0.01
    prefill_b: float = 1e-4
    prefill_c: float = 0.0
    batch_tokens: int = 4096
    ordering: str = "s_edf"
    batch: bool = True

    def __post_init__(self) -> None:
        if min(self.prefill_a, self.prefill_c) < 0 or not self.prefill_b > 0:
            raise ConfigError("prefill_a and prefill_c must not be negative and prefill_b positive", field="prefill_b")
        if self.batch_tokens < 1:
            raise ConfigError("batch_tokens must be at least 1", field="batch_tokens")
        prefill_order(self.ordering)


def batch_with(
    head_tokens: int, candidates: Iterable[int], remaining_s: float, budget: int, predict: Callable[[int], float]
) -> list[int]:
    """Alg. 1: indices of the candidates (tokens of each, in rank order) that are batched under the head.

    The scan ends when not even one more token would fit, since no later candidate can change that.
    """
    total, chosen = head_tokens, []
    for index, tokens in enumerate(candidates):
        grown = total + tokens
        if remaining_s > predict(grown) and grown < budget:
            chosen.append(index)
            total = grown
        elif total + 1 >= budget or remaining_s <= predict(total + 1):
            break
    return chosen


@BATCHINGS.register("slo_aware_batching")
class SloAwareBatching:
    name: ClassVar[str] = "slo_aware_batching"
    reorders: ClassVar[bool] = True
    selects: ClassVar[bool] = True
    Config = SloAwareBatchingConfig

    def __init__(self, config: SloAwareBatchingConfig | None = None) -> None:
        self.config = config or SloAwareBatchingConfig()
        self.order = prefill_order(self.config.ordering)

    def predict(self, tokens: int) -> float:
        config = self.config
        return config.prefill_a + config.prefill_b * tokens + config.prefill_c * tokens * tokens

    def members(self, head_tokens: int, candidates: Iterable[int], remaining_s: float) -> list[int]:
        """Alg. 1 with this policy's settings."""
        if not self.config.batch:
            return []
        return batch_with(head_tokens, candidates, remaining_s, self.config.batch_tokens, self.predict)

    def compose(self, engine: EngineView, now: float) -> list[Grant]:
        decodes = [Grant(seq, 1) for seq in engine.running if seq.decoding][: engine.token_budget]
        full = len(engine.running) >= engine.max_num_seqs
        key = self.order.key
        ranked = sorted(
            (item for item in prompts(engine) if not (full and item.queued)),
            key=lambda i: (*key(i.seq.due, self.predict(i.needed), i.seq.arrival, now), i.seq.arrival, i.seq.id),
        )
        return decodes + fill(engine, self._batch(ranked, now), engine.token_budget - len(decodes))

    def _batch(self, ranked: Sequence[Prompting], now: float) -> list[Prompting]:
        if not ranked or not ranked[0].queued:
            return list(ranked[:1])
        head, *others = ranked
        fresh = [item for item in others if item.queued]
        found = self.members(head.needed, (item.needed for item in fresh), head.seq.due - now)
        return [head, *(fresh[index] for index in found)]

    def observe(self, event: EngineEvent, now: float) -> None:
        """Nothing to learn: the latency model is fitted offline, as in the paper."""
