"""Simulated annealing over the order of an engine's queue: the most requests in time for the least latency.

Huang et al., "SLO-Aware Scheduling for Large Language Model Inferences", 2025, https://arxiv.org/abs/2504.14966. Built
from its abstract and public summaries; the full paper and the authors' code were not available. The value of an order
is G = n / t: the number of requests predicted to meet their targets over the sum of their predicted latencies. When a
request arrives, moves of single requests (exchange two, move one to the end, move one to the front) are tried on the
queue. A worse order is kept with probability exp(loss / temperature), where the loss is a share of G, and the best
order found is served.

Prediction: prompts run one after the other in `prefill_a` + `prefill_b` x tokens seconds, and an answer then takes
`decode_s` per token. A request is in time if its first token is (its TPOT does not depend on the order). Deviations:
the paper also anneals batch sizes, which continuous batching makes unnecessary, and orders a fixed pool of requests.
Here only the first `window` requests of the queue are moved, so that the cost of an arrival is bounded. Decodes run in
every step, prompts in the annealed order (chunked prefill).

`iterations` 100 moves per arrival; `temperature` 0.05, multiplied by `cooling` (0.97) after each move; `window` 32 (all
ours). The generator is seeded by `seed` and advances with arrivals, so the same run gives the same orders. Cost:
O(window x iterations) per arrival, about 1 ms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from controller.core.errors import ConfigError
from controller.core.steps import Aborted, EngineEvent, Seq, StepRan
from controller.policies.batching.base import BATCHINGS, EngineView, Grant
from controller.policies.batching.filling import fill, prompts


@dataclass(frozen=True, slots=True)
class SimulatedAnnealingConfig:
    prefill_a: float = 0.005
    prefill_b: float = 5e-5
    decode_s: float = 0.015
    iterations: int = 100
    temperature: float = 0.05
    cooling: float = 0.97
    window: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.prefill_a, self.prefill_b, self.decode_s) < 0 or self.prefill_a + self.prefill_b <= 0:
            raise ConfigError("the latency model must be positive", field="prefill_a")
        if self.iterations < 0:
            raise ConfigError("iterations must not be negative", field="iterations")
        if not self.temperature > 0:
            raise ConfigError("temperature must be positive", field="temperature")
        if not 0 < self.cooling <= 1:
            raise ConfigError("cooling must lie in (0, 1]", field="cooling")
        if self.window < 2:
            raise ConfigError("window must be at least 2 requests", field="window")


def value(order: Sequence[Seq], config: SimulatedAnnealingConfig, now: float) -> float:
    """G of serving them in this order from now on: requests in time over the sum of latencies, 1/s."""
    met, latency, at = 0, 0.0, now
    for seq in order:
        at += config.prefill_a + config.prefill_b * seq.remaining
        met += at <= seq.due
        latency += at - seq.arrival + config.decode_s * (seq.max_tokens - 1)
    return met / latency if latency > 0 else 0.0


def moved(order: Sequence[Seq], kind: float, first: float, second: float) -> list[Seq]:
    """The order after one move, which the three numbers in [0, 1) select."""
    after = list(order)
    i, j = int(first * len(after)), int(second * len(after))
    if kind < 1 / 3:
        after[i], after[j] = after[j], after[i]
    else:
        after.insert(len(after) if kind < 2 / 3 else 0, after.pop(i))
    return after


def anneal(
    order: Sequence[Seq], config: SimulatedAnnealingConfig, draws: np.ndarray, now: float
) -> tuple[list[Seq], float]:
    """The best order found and its G. `draws`: uniform numbers, four per move."""
    current, best = list(order), list(order)
    held = top = value(current, config, now)
    temperature = config.temperature
    for kind, first, second, chance in draws.tolist():
        tried = moved(current, kind, first, second)
        found = value(tried, config, now)
        loss = (found - held) / max(held, top, 1e-12)
        if loss >= 0 or chance < math.exp(loss / temperature):
            current, held = tried, found
            if found > top:
                best, top = tried, found
        temperature *= config.cooling
    return best, top


@BATCHINGS.register("simulated_annealing")
class SimulatedAnnealing:
    name: ClassVar[str] = "simulated_annealing"
    steady: ClassVar[bool] = True
    reorders: ClassVar[bool] = True
    Config = SimulatedAnnealingConfig

    def __init__(self, config: SimulatedAnnealingConfig | None = None) -> None:
        self.config = config or SimulatedAnnealingConfig()
        self._rng = np.random.default_rng(self.config.seed)
        self._order: list[Seq] = []

    def compose(self, engine: EngineView, now: float) -> list[Grant]:
        place = {seq.id: index for index, seq in enumerate(self._order)}
        decodes = [Grant(seq, 1) for seq in engine.running if seq.decoding][: engine.token_budget]
        ordered = sorted(prompts(engine), key=lambda p: (p.queued, place.get(p.seq.id, len(place))))
        return decodes + fill(engine, ordered, engine.token_budget - len(decodes))

    def observe(self, event: EngineEvent, now: float) -> None:
        if isinstance(event, StepRan):
            ran = {chunk.seq.id for chunk in event.step.chunks}
            if ran:
                self._order = [seq for seq in self._order if seq.id not in ran]
        elif isinstance(event, Aborted):
            self._order = [seq for seq in self._order if seq is not event.seq]
        elif isinstance(seq := getattr(event, "seq", None), Seq):
            self._arrived(seq, now)

    def _arrived(self, seq: Seq, now: float) -> None:
        self._order.append(seq)
        head = self._order[: self.config.window]
        if len(head) > 1:
            draws = self._rng.random((self.config.iterations, 4))
            self._order[: len(head)] = anneal(head, self.config, draws, now)[0]
