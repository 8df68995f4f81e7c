"""Chunked prefill with stall-free batching (Sarathi-Serve).

Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", OSDI 2024,
https://arxiv.org/abs/2403.02310, section 4. Every step first takes all decodes. The rest of a fixed token budget goes
to started prefills, then to new ones, and the last one is cut to fit. Deviations, both as in vLLM: the order within
each of the three groups is the engine's (priority or arrival), and the cached prefix of a queued prompt costs no
budget.

Cost: linear in running sequences plus those admitted. Settings: `long_prefill_tokens` limits one sequence's share of a
step, so that a long prompt leaves budget for shorter ones behind it (vLLM's --long-prefill-token-threshold). None, the
default as in vLLM, does not limit it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from controller.core.errors import ConfigError
from controller.core.steps import EngineEvent, Seq
from controller.policies.batching.base import BATCHINGS, EngineView, Grant
from controller.policies.batching.filling import TokenEach


@dataclass(frozen=True, slots=True)
class ChunkedPrefillConfig:
    long_prefill_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.long_prefill_tokens is not None and self.long_prefill_tokens < 1:
            raise ConfigError("long_prefill_tokens must be at least 1", field="long_prefill_tokens")


@BATCHINGS.register("chunked_prefill")
class ChunkedPrefill:
    name: ClassVar[str] = "chunked_prefill"
    steady: ClassVar[bool] = True
    Config = ChunkedPrefillConfig

    def __init__(self, config: ChunkedPrefillConfig | None = None) -> None:
        self.config = config or ChunkedPrefillConfig()
        self._tokens = TokenEach()

    def compose(self, engine: EngineView, now: float) -> list[Grant]:
        running = engine.running
        decodes = [
            seq
            for seq in running
            if seq.output_tokens and seq.prompt_tokens + seq.output_tokens - seq.computed == 1  # seq.decoding
        ]
        grants = self._tokens.of(decodes)[: engine.token_budget]
        prefills = [seq for seq in running if not seq.decoding] if len(decodes) < len(running) else []
        budget = engine.token_budget - len(grants)
        for seq in prefills:
            if budget <= 0:
                return grants
            budget = self._grant(grants, seq, seq.remaining, budget)
        return self._admit(engine, grants, budget)

    def _admit(self, engine: EngineView, grants: list[Grant], budget: int) -> list[Grant]:
        room = engine.max_num_seqs - len(engine.running)
        for seq in engine.waiting():
            if budget <= 0 or room <= 0:
                break
            budget = self._grant(grants, seq, engine.uncached(seq), budget)
            room -= 1
        return grants

    def _grant(self, grants: list[Grant], seq: Seq, wanted: int, budget: int) -> int:
        tokens = min(wanted, budget, self.config.long_prefill_tokens or wanted)
        grants.append(Grant(seq, tokens))
        return budget - tokens

    def observe(self, event: EngineEvent, now: float) -> None:
        """Nothing to learn."""
