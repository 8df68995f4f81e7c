"""Kairos' slack-guided decode: run the short sequences alone while the long ones can wait.

"Kairos: Taming Request Imbalance, SLO-Aware Scheduling for Disaggregated LLM Inference", Alg. 3 and eq. 2. A table by
(batch, longest sequence) gives the time of a step. Each active sequence has the slack

    TPOT x (n + 1) - time since its first token - reserved,      n = decode tokens so far

Sequences are considered in ascending order of length. One joins the step if the time of the larger batch stays within
the smallest slack of all and the throughput of the step rises. If none can join, all decode. Tokens come in bursts;
attainment is judged by the mean. The table starts from a profile and keeps the mean of what is observed in decode-only
steps; the profile counts as 100 samples (the paper profiles 100 runs per entry).

`reserve`: "active" (the default) reserves table[all, its length]. "longest" reserves a step of all, table[all,
longest], which is what a sequence waits for when it joins if the longest sets the pace (sec. 2.2); one that is late by
more than it can gain up to its cap then limits no other, unless all are. "solo", as printed, reserves table[1, its
length], which is too late whenever the delayed sequence then runs in a full batch. `length_bucket`: width of table
entries in tokens. `profile`, seconds of a step: "equal" (the default) is decode_a + batch x (decode_b x longest +
decode_c), a batch of equal lengths, as an offline profile measures it; "longest" is decode_a + decode_b x longest +
batch x decode_c: the longest sequence alone sets the pace (sec. 2.2). `if_needed` (ours; the paper's is False): all
decode while a step of all keeps the tightest TPOT. The paper delays long answers up to their TPOT also where nobody
gains by it, and they keep their slots and KV for as long.

Each sequence has its own TPOT; one without a target never limits the others and joins last, by length. On a collocated
engine prompts get the rest of the budget after the decodes, in the engine's order (the paper's decode instances have
none). Not steady: the choice changes with time. Cost: O(n) in decoding sequences per step, O(n log n) after a step in
which some waited (kairos_standing.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

from controller.core.errors import ConfigError
from controller.core.steps import EngineEvent, StepRan
from controller.policies.batching.base import BATCHINGS, EngineView, Grant
from controller.policies.batching.filling import Prompting, fill, queued
from controller.policies.batching.kairos_standing import Standing
from controller.policies.batching.kairos_step_table import StepTable


@dataclass(frozen=True, slots=True)
class KairosDecodeConfig:
    decode_a: float = 0.009
    decode_b: float = 2.4e-7
    decode_c: float = 1e-4
    reserve: str = "active"
    length_bucket: int = 256
    profile: str = "equal"
    if_needed: bool = False

    def __post_init__(self) -> None:
        if self.profile not in ("equal", "longest"):
            raise ConfigError(f"unknown profile {self.profile!r}; valid: equal, longest", field="profile")
        if self.reserve not in ("active", "solo", "longest"):
            raise ConfigError(f"unknown reserve {self.reserve!r}; valid: active, solo, longest", field="reserve")
        if self.length_bucket < 1:
            raise ConfigError("length_bucket must be at least 1 token", field="length_bucket")
        if min(self.decode_a, self.decode_b, self.decode_c) < 0 or self.decode_a + self.decode_c <= 0:
            raise ConfigError("the decode profile must be positive", field="decode_a")

    def step_s(self, batch: int, longest: int) -> float:
        """Profiled seconds of a decode step."""
        base, slope, fixed = self.parts(batch)
        return base + slope * longest + fixed

    def parts(self, batch: int) -> tuple[float, float, float]:
        """The parts of `step_s`: base + slope x longest + fixed."""
        lengths = batch if self.profile == "equal" else 1
        return self.decode_a, lengths * self.decode_b, batch * self.decode_c


@BATCHINGS.register("kairos_decode")
class KairosDecode:
    name: ClassVar[str] = "kairos_decode"
    Config = KairosDecodeConfig

    def __init__(self, config: KairosDecodeConfig | None = None) -> None:
        self.config = config or KairosDecodeConfig()
        self.table = StepTable(self.config.step_s, self.config.length_bucket)
        self._standing = Standing(self.table, self.config)

    def compose(self, engine: EngineView, now: float) -> list[Grant]:
        standing = self._standing
        standing.update(engine.running)
        grants = standing.choose(now, self.config.reserve, self.config.if_needed)[: engine.token_budget]
        begun = [Prompting(seq, seq.remaining, False) for seq in standing.prompting]
        return grants + fill(engine, chain(begun, queued(engine)), engine.token_budget - len(grants))

    def observe(self, event: EngineEvent, now: float) -> None:
        if not isinstance(event, StepRan) or not (decodes := event.step.decodes):
            return
        if not event.step.chunks and event.seconds > 0:
            longest = decodes[-1].tokens - event.repeats  # in the order of `choose`
            self.table.observe(len(decodes), longest, event.seconds / event.repeats)
        self._standing.ran(decodes, event.repeats)
