"""Emulated copies of KV between an emulated device and host memory: no byte moves, a step only takes longer."""

from __future__ import annotations

from dataclasses import dataclass

from controller.core.steps import Chunk, Seq, Step
from controller.engine.kv_costs import MeasuredCosts
from workers.engine.profiles import Profile

MEASURED_PROMPTS = (16, 64, 256, 1024, 4096)  # tokens


@dataclass(frozen=True, slots=True)
class EmulatedSwap:
    """`block_bytes`: of a KV block in all layers; `bytes_per_s`: of the emulated link, in either direction."""

    block_bytes: int
    bytes_per_s: float

    def out_s(self, step: Step) -> float:
        return len(step.swaps.out) * self.block_s

    def back_s(self, step: Step) -> float:
        return len(step.swaps.back) * self.block_s

    @property
    def block_s(self) -> float:
        return self.block_bytes / self.bytes_per_s


def emulated_costs(profile: Profile, swap: EmulatedSwap | None) -> MeasuredCosts:
    """What a measurement of the emulated device at its start would find."""

    def prompt_s(tokens: int) -> float:
        return profile.seconds(Step(0, (Chunk(Seq("", 0.0, tokens, 1), 0, tokens, last=True),), (), 0))

    block_s = None if swap is None else swap.block_s
    return MeasuredCosts(block_s, block_s, {tokens // 2: prompt_s(tokens) / tokens for tokens in MEASURED_PROMPTS})
