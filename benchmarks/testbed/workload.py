"""What the testbed serves: a small MoE model on slow links, and prompts that reuse prefixes (MFS sec. 6.2).

The model is Mixtral 8x7B at an eighth of its width, so that a token's KV and activations keep their proportion while
the bytes of a prompt fit links that two processor cores can fill. Compute is emulated: it takes time and no processor.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from benchmarks.reproduce.mfs.setting import AGENT, CONVERSATION, PromptMix
from controller.simulator.flows.cluster import ModelShape, PrefillShape
from controller.simulator.flows.prefill import PrefillRequest, PrefillSettings

TARGET = 3.0  # TTFT target over the request's own TTFT on an idle testbed
PAYLOAD = 1448 / 1514  # share of a link's bytes that is payload: Ethernet, IP and TCP headers with timestamps
MIXES = {mix.name: mix for mix in (AGENT, CONVERSATION)}
LAYERS, HIDDEN, QUERY_HEADS, KV_HEADS, HEAD_DIM, EXPERT = 32, 512, 4, 1, 128, 1792
ATTENTION = 2 * HIDDEN * QUERY_HEADS * HEAD_DIM + 2 * HIDDEN * KV_HEADS * HEAD_DIM
SMALL_MOE = ModelShape(
    "Mixtral 8x7B at an eighth of its width", LAYERS, HIDDEN, QUERY_HEADS, KV_HEADS, HEAD_DIM,
    float(LAYERS * ATTENTION), 3.0 * LAYERS * HIDDEN * EXPERT * 2, 2,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """What is sent to a testbed.

    - `mbit`: of each host's link, in each direction. `ranks`: hosts of an instance. `instances`: of prefill.
    - `compute`: seconds of computing for each second that a prompt's collectives take on an idle link.
    - `load`: arrivals over what the instances could compute and exchange if no link was shared.
    - `counted` requests follow `warm_up` ones, which leave prefixes behind and are not counted.
    """

    mix: PromptMix = AGENT
    mbit: float = 100.0
    instances: int = 2
    ranks: int = 4
    compute: float = 0.5
    load: float = 0.5
    warm_up: int = 8
    counted: int = 40
    mean: float = 500.0  # tokens of a prompt, half of what the mix has, so that a run takes half as long
    groups: int = 8

    @property
    def shape(self) -> PrefillShape:
        """Computing is as fast as `compute` says for a mean prompt."""
        shape = PrefillShape(
            SMALL_MOE, 1, self.ranks, gpus_per_server=1, flops=1e9, efficiency=1.0,
            nic_bytes_per_s=self.mbit * 1e6 / 8 * PAYLOAD, groups=self.groups, batch_tokens=8192,
        )  # fmt: skip
        new = self.mean * (1 - self.mix.reuse)
        computing = shape.dense_s(new, self.mean) + shape.experts_s(new * self.ranks)
        exchanging = shape.collective_bytes(new, new) / shape.port_bytes_per_s
        return replace(shape, flops=1e9 * computing / (self.compute * exchanging))

    @property
    def settings(self) -> PrefillSettings:
        """A daemon has no order between batches, and nobody is pruned."""
        return PrefillSettings(
            self.shape, self.instances, TARGET, budget=0.0, ordered=False, period_s=0.02, report_s=0.05, copies=False
        )

    @property
    def per_s(self) -> float:
        """ReceivingEnd a second."""
        new = self.mean * (1 - self.mix.reuse)
        exchanging = self.shape.collective_bytes(new, new) / self.shape.port_bytes_per_s
        return self.load * self.instances * self.ranks / (self.groups * exchanging * (1 + self.compute))

    def requests(self, seed: int) -> list[PrefillRequest]:
        """Poisson arrivals, alike for all policies and loads but for their times."""
        rng = random.Random(f"testbed {self.mix.name} {seed}")
        count = self.warm_up + self.counted
        prefixes = max(2, count // self.mix.each)
        weights = [1.0 / (1 + rank) ** self.mix.zipf for rank in range(prefixes)]
        chosen = rng.choices(range(prefixes), weights, k=count)
        prompts = replace_mean(self.mix, self.mean).prompts(rng, count)
        at, found = 0.0, []
        for number, prompt in enumerate(prompts):
            at += rng.expovariate(1.0) / self.per_s
            share = min(0.95, max(0.0, self.mix.reuse + rng.uniform(-0.3, 0.3)))
            found.append(PrefillRequest(f"q{number}", at, prompt, int(prompt * share), f"x{chosen[number]}"))
        return found


def replace_mean(mix: PromptMix, mean: float) -> PromptMix:
    """The mix with prompts of this mean."""
    return mix._replace(mean=mean)
