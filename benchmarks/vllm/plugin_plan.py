"""The load, policies and figures of `bench-vllm-plugin`.

Answers have a long tail, and nothing in a request tells its length: `max_tokens` is one cap for all, and an answer ends
at the stop token, which `min_tokens` forbids until its length is reached and a bias makes certain from then on. What
the plug-in is told of lengths is what earlier traffic shows: the 0.1 and 0.9 quantiles of the class, from another seed.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from benchmarks.load.lengths import stopped
from benchmarks.load.scoring import percentile
from benchmarks.load.workloads import FIRST_PLAIN_TOKEN, VOCABULARY, PlannedArrival, Task, sustained
from controller.core.types import Targets
from controller.simulator.workloads.arrivals import Lengths
from workers.backends.hints import Hints
from workers.vllm_plugin.hints import PluginHints, hint_fields

CAP_TOKENS = 800
EARLIER_SEED = 3700
LONG_TAIL = (
    Task("chat", Targets(1.0, 0.25, None, 3600.0), Lengths(60, 40, 8, 300), Lengths(60, 110, 4, 700, "lognormal")),
    Task("agent", Targets(3.0, 0.4, None, 3600.0), Lengths(200, 120, 16, 700), Lengths(90, 160, 4, 700, "lognormal")),
    Task("batch", Targets(15.0, 0.8, None, 3600.0), Lengths(500, 250, 16, 1500), Lengths(60, 60, 4, 400, "lognormal")),
)


@dataclass(frozen=True, slots=True)
class PluginContender:
    """A server and what requests say to it. `settings`: of the plug-in; None: vLLM's own scheduler."""

    name: str
    scheduling: str = "fcfs"  # vLLM's --scheduling-policy
    settings: Mapping[str, Any] | None = None
    says: str = "nothing"  # nothing | class | deadline | hints

    def body(self, arrival: PlannedArrival) -> dict[str, Any]:
        """Fields beside those of the arrival."""
        targets = arrival.task.targets
        said: dict[str, Any] = {}
        if self.says == "class":
            said["priority"] = [task.name for task in LONG_TAIL].index(arrival.task.name)
        elif self.says == "deadline":
            said["priority"] = round(1000 * (arrival.at + targets.ttft_s))
        elif self.says == "hints":
            lower, upper = class_bounds()[arrival.task.name]
            told = Hints(lower=lower, upper=upper).fields()
            said["vllm_xargs"] = hint_fields(PluginHints(targets.ttft_s, targets.ttft_s, targets.tpot_s), told)
        return {**stopped(arrival.output_tokens, CAP_TOKENS), **said}


@cache
def class_bounds() -> Mapping[str, tuple[int, int]]:
    """Tokens, by class."""
    earlier = sustained(LONG_TAIL, 20.0, EARLIER_SEED, 60.0)
    found = {}
    for task in LONG_TAIL:
        lengths = [float(arrival.output_tokens) for arrival in earlier if arrival.task.name == task.name]
        found[task.name] = (int(percentile(lengths, 0.1)), int(percentile(lengths, 0.9)))
    return found


FCFS = PluginContender("fcfs")
# vLLM's own priority at its best: by class or by deadline, whichever attains more on a load.
PRIORITIES = (
    PluginContender("priority_class", "priority", says="class"),
    PluginContender("priority_deadline", "priority", says="deadline"),
)
PLUGINS = (
    PluginContender("plugin_s_edf", settings={"order": "s_edf"}, says="hints"),
    PluginContender("plugin_urgency", settings={"order": "kairos_urgency"}, says="hints"),
    PluginContender("plugin_calm", settings={"order": "calm"}, says="hints"),
    PluginContender("plugin_slack", settings={"order": "s_edf", "decode": "kairos_decode"}, says="hints"),
)
CONTENDERS = (FCFS, *PRIORITIES, *PLUGINS)
# Of servers with little KV: two answers of a pair do not fit at once, so that one of them is preempted and computed
# again. A server keeps one block for itself, and must hold the longest context.
BLOCK_TOKENS, BLOCKS, SHORT_CONTEXT = 128, 10, 1_024
LITTLE_KV = (
    *("--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(BLOCKS)),
    *("--max-model-len", str(SHORT_CONTEXT)),
)
PAIR_PROMPT, PAIR_ANSWER = 200, 600
PAIR_SEED = 3600


def pairs(count: int) -> list[tuple[PlannedArrival, PlannedArrival]]:
    """Of requests that fit a server with LITTLE_KV one by one only."""
    rng = np.random.default_rng(PAIR_SEED)

    def one() -> PlannedArrival:
        prompt = rng.integers(FIRST_PLAIN_TOKEN, VOCABULARY, PAIR_PROMPT).tolist()
        return PlannedArrival(0.0, LONG_TAIL[0], tuple(prompt), PAIR_ANSWER)

    return [(one(), one()) for _ in range(count)]


class Preempted(NamedTuple):
    """`times`: preemptions while pairs ran at once. `equal`: whether all answers had the tokens that they have one at a
    time at `fcfs`."""

    times: int
    equal: bool


@dataclass(slots=True)
class PluginFigures:
    """What was measured. `attained`: by load and contender, one entry a round; contenders of a round share a plan."""

    attained: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)  # of the same closed batch, by contender
    equal_alone: dict[str, bool] = field(default_factory=dict)
    differing: dict[str, float] = field(default_factory=dict)  # share of answers with other tokens than in a fcfs run

    preempted: dict[str, Preempted] = field(default_factory=dict)  # by contender

    def note(self, load: str, contender: str, attainment: float) -> None:
        self.attained.setdefault(load, {}).setdefault(contender, []).append(attainment)

    def report(self) -> dict[str, Any]:
        attainment = {load: self._medians(rounds) for load, rounds in self.attained.items()}
        return {
            "attainment": attainment,
            "over_best": {load: over_best(of) for load, of in attainment.items()},
            "equal_alone": bool(self.equal_alone) and all(self.equal_alone.values()),
            "equal_preempted": {name: of.equal if of.times else None for name, of in self.preempted.items()},
            "preemptions": {name: of.times for name, of in self.preempted.items()},
            "differing_share": self.differing,
            "throughput_share": {
                name: self._share(of) for name, of in self.seconds.items() if name.startswith("plugin_")
            },
        }

    def _medians(self, rounds: Mapping[str, Sequence[float]]) -> dict[str, float]:
        found = {name: round(statistics.median(of), 4) for name, of in rounds.items()}
        own = [found[each.name] for each in PRIORITIES if each.name in found]
        return {**found, "priority": max(own)} if own else found

    def _share(self, seconds: Sequence[float]) -> float:
        """Of the throughput of fcfs, the median over rounds in turn: the machine is not the same from minute to
        minute."""
        return round(statistics.median(base / of for base, of in zip(self.seconds["fcfs"], seconds, strict=True)), 4)


def over_best(attainment: Mapping[str, float]) -> dict[str, float]:
    """Of each plug-in policy, times the better of fcfs and vLLM's priority."""
    best = max(attainment["fcfs"], attainment["priority"], 1e-9)
    return {name: round(of / best, 3) for name, of in attainment.items() if name.startswith("plugin_")}


def differing_share(first: Sequence[Sequence[int]], second: Sequence[Sequence[int]]) -> float:
    """Of the answers of two runs of one plan, those whose tokens differ."""
    pairs = list(zip(first, second, strict=True))
    return round(sum(tuple(a) != tuple(b) for a, b in pairs) / len(pairs), 4)
