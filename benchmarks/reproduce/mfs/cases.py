"""`python -m benchmarks.reproduce.mfs.cases`: single cases with other seeds, of the paper's size or over a fat tree.

Share of first tokens in time, in percent: the mean over the seeds, and each of them, on 64 servers or, with `--size
paper`, on the paper's 256 with its 512 + 1,024 requests. The readings of MFS were chosen on seeds 1 to 3 (decisions 221
to 242), so seeds 4 to 6, the default, show whether they hold for requests that they were not chosen by. With
`--leaf-servers` reuse and KV transfers take hashed paths through a fat tree with so many servers on a leaf; without it
only ports can be full. With `--by-class` only a sender's own port serves flows by rank, and the others by the class of
their packets, as switches do. Last line: JSON, by case, load and contender a list with one share a seed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from benchmarks.reproduce.mfs.section import SLOW_LINKS
from benchmarks.reproduce.mfs.setting import (
    AGENT,
    BASELINES,
    CONVERSATION,
    GUESSED,
    LEAST_FIRST,
    LONG_AGENT,
    LONG_CONVERSATION,
    MFS,
    NOT_IN_VAIN,
    PAPER,
    REDUCED,
    ClusterSize,
    FlowContender,
    FlowSetting,
    PromptMix,
    serve,
)

SEEDS = (4, 5, 6)
SIZES = {"paper": PAPER, "reduced": REDUCED}
CONTENDERS = {each.name: each for each in (*BASELINES, MFS, GUESSED, LEAST_FIRST[0], NOT_IN_VAIN, LEAST_FIRST[1])}


class LinkCase(NamedTuple):
    """`bandwidth`: of links, as a share of the paper's."""

    model: str
    workload: PromptMix
    loads: Sequence[float]
    bandwidth: float = SLOW_LINKS


CASES = {
    "llama-agent": LinkCase("llama", LONG_AGENT, (0.9, 0.7)),
    "llama-conversation": LinkCase("llama", LONG_CONVERSATION, (1.1,)),
    "dbrx-conversation": LinkCase("dbrx", CONVERSATION, (0.2,)),
    "dbrx-agent": LinkCase("dbrx", AGENT, (0.3,)),
    "fig10-mixtral": LinkCase("mixtral", CONVERSATION, (0.3,), 1.0),
    "fig10-dbrx": LinkCase("dbrx", CONVERSATION, (0.3,), 1.0),
}
Shares = dict[str, dict[str, dict[str, list[float]]]]  # percent in time by case, load and contender


def in_time(
    cases: Sequence[str],
    size: ClusterSize,
    contenders: Sequence[FlowContender],
    leaf_servers: int,
    by_class: bool = False,
) -> Shares:
    """Prints each contender as soon as it has run."""
    found: Shares = {}
    for name in cases:
        case = CASES[name]
        setting = FlowSetting(case.model, case.workload, size, case.bandwidth, leaf_servers, by_class)
        for load in case.loads:
            print(f"{name} at {load:g}")
            of = found.setdefault(name, {})[f"{load:g}"] = {}
            for each in contenders:
                shares = [round(100 * serve(setting, each, load, seed).attainment, 1) for seed in size.seeds]
                of[each.name] = shares
                print(f"  {fmean(shares):5.1f}  {each.name}: {' '.join(f'{share:g}' for share in shares)}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", choices=list(CASES), help="may be given more than once")
    parser.add_argument("--contender", action="append", choices=list(CONTENDERS), help="the same")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--size", choices=list(SIZES), default="reduced")
    parser.add_argument("--leaf-servers", type=int, default=0)
    parser.add_argument("--by-class", action="store_true")
    args = parser.parse_args()
    contenders = [CONTENDERS[name] for name in args.contender or CONTENDERS]
    size = replace(SIZES[args.size], seeds=args.seeds)
    print(json.dumps(in_time(args.case or list(CASES), size, contenders, args.leaf_servers, args.by_class)))


if __name__ == "__main__":
    main()
