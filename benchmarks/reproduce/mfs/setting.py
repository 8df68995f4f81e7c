"""MFS' simulated cluster (sec. 6.1, 6.3): models, workloads, contenders, and one run of a load."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from controller.flow.flows import MsFlow
from controller.flow.policies import (
    DeferAndPromote,
    EarliestDeadline,
    FairSharing,
    FlowContext,
    FlowPolicy,
    Karuna,
    ShortestFirst,
)
from controller.simulator.flows.cluster import ModelShape, PrefillShape
from controller.simulator.flows.prefill import PrefillRequest, PrefillRun, PrefillSettings, alone_s

ON_TIME = 1e-3  # share of the target by which a first token may be late: Karuna ends its transfers on the deadline
TARGET = 3.0  # TTFT target over the request's own TTFT on an idle cluster


def _model(
    name: str, layers: int, hidden: int, query_heads: int, dense: int, expert: int = 0, experts_per_token: int = 0
) -> ModelShape:
    """From a published configuration: `dense` and `expert` are the intermediate sizes of the dense layer and of one
    expert (three matrices each). All have 8 KV heads of 128 values.
    """
    attention = 2 * hidden * query_heads * 128 + 2 * hidden * 8 * 128
    return ModelShape(
        name, layers, hidden, query_heads, 8, 128, layers * (attention + 3.0 * hidden * dense),
        3.0 * layers * hidden * expert * experts_per_token, experts_per_token,
    )  # fmt: skip


SHAPES = {
    "mixtral": PrefillShape(
        _model("Mixtral 8x22B", 56, 6144, 48, 0, expert=16_384, experts_per_token=2), tensor_parallel=4, ranks=8
    ),
    "dbrx": PrefillShape(
        _model("DBRX", 40, 6144, 48, 0, expert=10_752, experts_per_token=4), tensor_parallel=2, ranks=16
    ),
    "qwen": PrefillShape(
        _model("Qwen3-Coder", 62, 6144, 96, 0, expert=2_560, experts_per_token=8), tensor_parallel=1, ranks=32
    ),
    "grok": PrefillShape(
        _model("Grok-2", 64, 8192, 64, 32_768, expert=16_384, experts_per_token=2), tensor_parallel=4, ranks=8
    ),
    "llama": PrefillShape(
        _model("Llama 3 8B", 32, 4096, 32, 14_336), tensor_parallel=4, sequence_parallel=4, ranks=1,
        batch_tokens=8_192,
    ),
}  # fmt: skip


class PromptMix(NamedTuple):
    """Lognormal prompts with this mean and `sigma`, clipped to `longest`; on average `reuse` of a prompt is a prefix
    that lies somewhere in the cluster. Prefixes are drawn by Zipf's law with exponent `zipf`, one for `each` requests.
    """

    name: str
    mean: float
    longest: int
    reuse: float
    sigma: float
    zipf: float
    each: int

    def prompts(self, rng: random.Random, count: int) -> list[int]:
        """Scaled so that the mean of these prompts is the workload's."""
        raw = [rng.lognormvariate(0.0, self.sigma) for _ in range(count)]
        scale = self.mean / statistics.fmean(raw)
        return [min(self.longest, max(32, round(scale * each))) for each in raw]


CONVERSATION = PromptMix("conversation", 2_000, 8_192, 0.50, 0.5, 0.6, 4)
AGENT = PromptMix("agent", 1_000, 8_192, 0.65, 0.5, 1.1, 16)
LONG_CONVERSATION = PromptMix("conversation", 15_000, 131_072, 0.40, 0.5, 0.6, 4)
LONG_AGENT = PromptMix("agent", 9_000, 131_072, 0.65, 0.5, 1.1, 16)


@dataclass(frozen=True, slots=True)
class ClusterSize:
    """`instances` of prefill, and as many of decode. `warm_up` requests are served and not counted."""

    gpus: int
    warm_up: int
    counted: int
    seeds: Sequence[int]

    def instances(self, shape: PrefillShape) -> int:
        """Half of the GPUs prefill."""
        return max(1, self.gpus // (2 * shape.gpus))


PAPER = ClusterSize(2_048, 512, 1_024, (1, 2, 3))
MIDDLE = ClusterSize(1_024, 256, 512, (1, 2, 3))
REDUCED = ClusterSize(512, 64, 192, (1, 2, 3))
QUICK = ClusterSize(64, 8, 24, (1,))


class WithoutLayerIndex(DeferAndPromote):
    """MFS that takes all reuse and collectives as equally urgent (the ablation of RLI)."""

    def _layer_index(self, flow: MsFlow, context: FlowContext) -> int:
        return 0


def _without_promotion() -> FlowPolicy:
    """The ablation of MLU: KV transfers keep the lowest level, whatever their deadline."""
    return DeferAndPromote(DeferAndPromote.Config(levels=2, level_one=1e30))


@dataclass(frozen=True, slots=True)
class FlowContender:
    """A flow policy, with the order between batches (`ordered`, RED) and pruning (`budget`) or without. `in_vain`: as
    printed, requests are pruned for batches too that stay too late all the same."""

    name: str
    policy: Callable[[], FlowPolicy]
    ordered: bool = False
    budget: float = 0.0
    in_vain: bool = True
    nic_factor: float = 1.0  # how much faster than the setting's its links are
    kv_share: float = 1.0  # of the KV's bytes that are moved
    load_error: float = 0.0  # of the loads that the order is made by


BUDGET = 0.05  # share of the requests in the cluster that may be pruned
MORE = 0.5  # the budget of MORE_PRUNING
FAIR = FlowContender("FS", FairSharing)
SHORTEST = FlowContender("SJF", ShortestFirst)
EARLIEST = FlowContender("EDF", EarliestDeadline)
KARUNA = FlowContender("Karuna", Karuna)
MFS = FlowContender("MFS", DeferAndPromote, ordered=True, budget=BUDGET)
FREE = FlowContender("links 1,000 times faster", FairSharing, nic_factor=1e3)
NO_KV = FlowContender("collectives alone", FairSharing, kv_share=1e-3)  # under fair sharing: no bound
BASELINES = (FAIR, SHORTEST, EARLIEST, KARUNA)
UNPRUNED = FlowContender("MFS without pruning", DeferAndPromote, ordered=True)
ABLATIONS = (
    FlowContender("MFS without MLU", _without_promotion, ordered=True, budget=BUDGET),
    FlowContender("MFS without RLI", WithoutLayerIndex, ordered=True, budget=BUDGET),
    FlowContender("MFS without RED and pruning", DeferAndPromote),
    UNPRUNED,
)
LATE_FIRST = FlowContender(  # as printed
    "MFS, late transfers first", partial(DeferAndPromote, DeferAndPromote.Config(late="first")), True, BUDGET
)
LEAST_FIRST = tuple(
    FlowContender(called, partial(DeferAndPromote, DeferAndPromote.Config(within="least")), True, budget, in_vain)
    for called, budget, in_vain in (
        ("MFS, least reuse first", BUDGET, True),
        ("MFS, least reuse first, nobody pruned in vain", BUDGET, False),
        (f"MFS, least reuse first, budget {MORE:g}", MORE, True),
    )
)
NOT_IN_VAIN = FlowContender("MFS, nobody pruned in vain", DeferAndPromote, ordered=True, budget=BUDGET, in_vain=False)
MORE_PRUNING = tuple(
    FlowContender(f"{each.name}, budget {MORE:g}", each.policy, True, MORE) for each in (FAIR, SHORTEST, MFS)
)
GUESSED = replace(MFS, name="MFS, loads known to 20 %", load_error=0.2)
PRUNING = tuple(FlowContender(f"{each.name} with pruning", each.policy, True, BUDGET) for each in BASELINES)


def level_one(value: float) -> FlowContender:
    """MFS with another MLU above which a KV transfer goes before everything else (printed: 0.125)."""
    return FlowContender(
        f"MFS, level 1 above {value:g}",
        partial(DeferAndPromote, DeferAndPromote.Config(level_one=value)),
        ordered=True,
        budget=BUDGET,
    )


@dataclass(frozen=True, slots=True)
class FlowSetting:
    """A model under a workload on a cluster. `load` of a run is the share of its capacity, which is `capacity`."""

    model: str
    workload: PromptMix
    size: ClusterSize
    nic_factor: float = 1.0  # links of this share of the paper's bandwidth
    leaf_servers: int = 0  # on a leaf of a fat tree with hashed paths; 0: only ports can be full
    by_class: bool = False  # ports that are not the sender's order by class of packets alone
    shape: PrefillShape = field(init=False)

    def __post_init__(self) -> None:
        shape = SHAPES[self.model]
        object.__setattr__(self, "shape", replace(shape, nic_bytes_per_s=shape.nic_bytes_per_s * self.nic_factor))

    @property
    def capacity(self) -> float:
        """Requests/s that the prefill ranks could compute and exchange if no link was shared and no rank waited."""
        new, prompt = self.workload.mean * (1 - self.workload.reuse), self.workload.mean
        exchange = self.shape.collective_bytes(new, new) / self.shape.port_bytes_per_s
        compute = self.shape.dense_s(new, prompt) + self.shape.experts_s(new * self.shape.ranks)
        each = self.shape.groups * (compute + exchange)
        return self.size.instances(self.shape) * self.shape.ranks / each

    def per_gpu(self, load: float) -> float:
        """Requests/s for each prefill GPU."""
        return load * self.capacity / (self.size.instances(self.shape) * self.shape.gpus)

    def requests(self, load: float, seed: int) -> list[PrefillRequest]:
        """Poisson arrivals; the warm-up comes first."""
        rng = random.Random(f"{self.model} {self.workload.name} {seed}")  # equal for all policies and loads
        count = self.size.warm_up + self.size.counted
        prefixes = max(1, count // self.workload.each)
        weights = [1.0 / (1 + rank) ** self.workload.zipf for rank in range(prefixes)]
        chosen = rng.choices(range(prefixes), weights, k=count)
        at, found = 0.0, []
        spread = 0.3  # of a request's share of reuse around the mean
        for number, prompt in enumerate(self.workload.prompts(rng, count)):
            at += rng.expovariate(1.0) / (load * self.capacity)
            share = min(0.95, max(0.0, self.workload.reuse + rng.uniform(-spread, spread)))
            found.append(PrefillRequest(f"q{number}", at, prompt, int(prompt * share), f"x{chosen[number]}"))
        return found


class FlowFigures(NamedTuple):
    """Of the counted requests, but `cct_s`: mean duration of all exchanges of the run.

    `attainment`: share whose first token was in time, pruned ones included. `early`: mean share of the target that was
    left (0 for those that were late). `late`: mean share by which the target was missed (0 for those in time).
    """

    attainment: float
    ttft_s: float
    cct_s: float
    early: float
    late: float
    pruned: int


def serve(setting: FlowSetting, contender: FlowContender, load: float, seed: int) -> FlowFigures:
    """One run."""
    requests = setting.requests(load, seed)
    shape = replace(
        setting.shape,
        nic_bytes_per_s=setting.shape.nic_bytes_per_s * contender.nic_factor,
        kv_share=contender.kv_share,
    )
    settings = PrefillSettings(
        shape, setting.size.instances(setting.shape), TARGET, budget=contender.budget,
        ordered=contender.ordered, in_vain=contender.in_vain, copies=False,
        leaf_servers=setting.leaf_servers, by_class=setting.by_class, load_error=contender.load_error, seed=seed,
    )  # fmt: skip
    run = PrefillRun(settings, contender.policy)
    found = run.serve(requests)
    left, ttft, pruned = [], [], 0
    for request in requests[setting.size.warm_up :]:
        target = TARGET * alone_s(setting.shape, request)
        left.append(1.0 - found[request.id].ttft_s / target)
        ttft.append(found[request.id].ttft_s)
        pruned += found[request.id].pruned
    return FlowFigures(
        sum(each >= -ON_TIME for each in left) / len(left),
        statistics.fmean(ttft),
        statistics.fmean(run.collective_s),
        statistics.fmean(max(0.0, each) for each in left),
        statistics.fmean(max(0.0, -each) for each in left),
        pruned,
    )
