"""`python -m benchmarks.flow.experts`: what history of expert routing changes in pruning (MFS app. B).

Mixtral 8x22B (TP4, EP8) on one simulated prefill instance with links of 1 GB/s to each GPU. Its ranks are unequally
popular (`--skew`), which drifts within 60 s, and each batch is 20 % off that. At skew 1, the default, the most popular
rank gets 1.8 to 5.1 times an even share at the start (seeds 1 to 20). The same requests are served twice: by orders
that expect even shares, and by those that learn shares from batches that have ended. Requests come in four waves of so
many at once, three seconds apart, or one by one (`6/s`). 30 % may be pruned.

By load and kind of order: `attainment` (share of first tokens in time, mean over seeds, and `by_seed`); `let_through`,
judgements of batches as in time, and `late_after_all`, how many of these batches were not; `held_late`, judgements as
late, and `in_time_after_all`; `pruned` requests. A batch is in time if the last first token of its requests that were
not pruned comes by its D_lo. Last line: JSON of it all.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.reproduce.mfs.setting import SHAPES
from controller.flow.batches import Batch, BatchOrder, effective_deadline
from controller.flow.policies import DeferAndPromote
from controller.simulator.flows.experts import ExpertSettings
from controller.simulator.flows.prefill import PrefillRequest, PrefillRun, PrefillSettings, alone_s

SHAPE = replace(SHAPES["mixtral"], nic_bytes_per_s=1e9, groups=4, batch_tokens=4_096)
SKEW, DRIFT_S, ERROR = 1.0, 60.0, 0.2
BUDGET = 0.3
WAVES, WAVE_S = 4, 3.0
SINGLES = 60
LOADS = ("6", "9", "12", "6/s")


class ExpertFigures(NamedTuple):
    """Of one run."""

    attainment: float
    let_through: int
    late_after_all: int
    held_late: int
    in_time_after_all: int
    pruned: int


def requests(load: str, seed: int) -> list[PrefillRequest]:
    rng = random.Random(seed)
    if load.endswith("/s"):
        rate, at, times = float(load[:-2]), 0.0, []
        for _ in range(SINGLES):
            times.append(at := at + rng.expovariate(rate))
    else:
        times = [WAVE_S * wave + 1e-4 * each for wave in range(WAVES) for each in range(int(load))]
    lengths = [min(8_000, max(64, int(rng.lognormvariate(6.5, 0.8)))) for _ in times]
    return [
        PrefillRequest(f"q{number}", at, length, 0, f"x{number}")
        for number, (at, length) in enumerate(zip(times, lengths, strict=True))
    ]


def serve(load: str, experts: ExpertSettings, seed: int) -> ExpertFigures:
    run = PrefillRun(PrefillSettings(SHAPE, 1, budget=BUDGET, experts=experts, seed=seed), DeferAndPromote)
    judged: list[tuple[bool, float, list[str]]] = []  # as in time, D_lo, and who was not pruned

    def watch(batches: Sequence[Batch], order: BatchOrder) -> None:
        for batch in batches:
            left = [each.id for each in batch.requests if each.id not in order.scavengers]
            if left:
                due = effective_deadline([each.deadline for each in batch.requests]).loose
                judged.append((order.finish_s[batch.id] <= due, due, left))

    run.on_order = watch
    sent = requests(load, seed)
    served = run.serve(sent)
    ends = {each.id: each.at + served[each.id].ttft_s for each in sent}
    found = [(in_time, max(ends[name] for name in left) <= due) for in_time, due, left in judged]
    return ExpertFigures(
        fmean(served[each.id].ttft_s <= run.settings.target * alone_s(SHAPE, each) for each in sent),
        sum(judged_so for judged_so, _ in found),
        found.count((True, False)),
        sum(not judged_so for judged_so, _ in found),
        found.count((False, True)),
        sum(each.pruned for each in served.values()),
    )


def compare(load: str, skew: float, seeds: Sequence[int], by_layer: bool = False) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, history in (("even", False), ("history", True)):
        experts = ExpertSettings(skew, DRIFT_S, ERROR, by_layer, history)
        runs = [serve(load, experts, seed) for seed in seeds]
        found[name] = {"attainment": round(fmean(each.attainment for each in runs), 4)}
        found[name] |= {key: sum(getattr(each, key) for each in runs) for key in ExpertFigures._fields[1:]}
        found[name]["by_seed"] = [round(each.attainment, 3) for each in runs]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", action="append", help="requests at once, or a rate as 6/s; may be given repeatedly")
    parser.add_argument("--skew", type=float, default=SKEW)
    parser.add_argument("--by-layer", action="store_true", help="each group of layers has popular ranks of its own")
    parser.add_argument("--seeds", type=int, nargs="+", default=range(1, 21))
    args = parser.parse_args()
    found = {}
    for load in args.load or LOADS:
        found[load] = compare(load, args.skew, args.seeds, args.by_layer)
        print(load, *(f"\n  {name}: {row}" for name, row in found[load].items()), flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
