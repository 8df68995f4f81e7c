"""One table of `bench-vllm` results from several machines: `python -m benchmarks.vllm.seeds RUNS.jsonl ...`

All runs of one seed of a load are made on one machine: every policy and every window, on the same arrivals, at the same
multiple of that machine's own knee. So seeds of different machines are combined as attained shares, and compared within
each seed in `within_seed`, but never as requests/s or seconds. A fixed window is the best of the machine's own sweep on
the load. Loads and seeds that lack a policy are named and left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.load.scoring import Score, summary
from benchmarks.vllm.plan import BASELINES, CONTENDERS, LOADS, PlannedLoad, VllmContender


@dataclass(slots=True)
class Seed:
    """All runs of a load on one set of arrivals on one machine. `runs`: by policy set and window."""

    machine: str
    seed: int
    rate: float
    runs: dict[tuple[str, int | None], Score] = field(default_factory=dict)

    def score(self, contender: VllmContender, windows: Mapping[str, int]) -> Score | None:
        return self.runs.get((contender.policy_set, windows.get(contender.name)))


def read(paths: Iterable[Path]) -> dict[str, list[Seed]]:
    """The seeds by load, in the order of the files. The folder of a file names the machine."""
    found: dict[str, dict[tuple[str, int, float], Seed]] = defaultdict(dict)
    for path in paths:
        machine = path.resolve().parent.name
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            run = entry["run"]
            load = PlannedLoad(run["mix"], run["kind"], run["times"])
            at = (machine, run["seed"], run["rate"])
            seed = found[load.name].setdefault(at, Seed(*at))
            window = run.get("overrides", {}).get("pacing", {}).get("window")
            seed.runs[run["policy"], window] = Score(**entry["score"])
    return {name: list(seeds.values()) for name, seeds in found.items()}


def best_windows(seeds: Sequence[Seed]) -> dict[str, dict[str, int]]:
    """By machine, the best window of each contender that has windows, from the seed on which they were swept."""
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for contender in CONTENDERS:
        for seed in seeds:
            tried = {w: s for (policy, w), s in seed.runs.items() if policy == contender.policy_set and w is not None}
            if len(tried) > 1:
                found[seed.machine][contender.name] = max(tried, key=lambda window: tried[window].attainment)
    return found


def told(load: PlannedLoad, seeds: Sequence[Seed]) -> dict[str, Any] | None:
    """The load's entry of the report over its complete seeds; None if there are none."""
    windows = best_windows(seeds)
    # Runs of before 2026-11-24 have no contender without Slackline.
    contenders = [
        c for c in CONTENDERS if not c.direct or any(c.policy_set == policy for s in seeds for policy, _ in s.runs)
    ]
    whole = [s for s in seeds if all(s.score(c, windows[s.machine]) is not None for c in contenders)]
    if not whole:
        return None
    scores: dict[str, list[Score]] = {c.name: [] for c in contenders}
    for seed in whole:
        for contender in contenders:
            score = seed.score(contender, windows[seed.machine])
            assert score is not None  # of a complete seed
            scores[contender.name].append(score)
    entry: dict[str, Any] = {"mix": load.mix, "kind": load.kind, "times_knee": load.times}
    entry["seeds"] = [{"machine": s.machine, "seed": s.seed, "rate": round(s.rate, 2)} for s in whole]
    entry["windows"] = {machine: windows[machine] for machine in {s.machine: None for s in whole}}
    entry |= {name: summary(of) for name, of in scores.items()}
    entry["within_seed"] = within_seeds(scores)
    return entry


def within_seeds(scores: Mapping[str, Sequence[Score]]) -> list[dict[str, float]]:
    """Slackline against the others within each seed, where machine and arrivals are the same."""
    found = []
    robins = scores[_robin(scores)]
    for turn, ours in enumerate(scores["slackline"]):
        robin = robins[turn]
        best = max(scores[name][turn].attainment for name in BASELINES if name in scores)
        found.append(
            {
                "slackline": round(ours.attainment, 4),
                "best_baseline": round(best, 4),
                "round_robin": round(robin.attainment, 4),
                "e2e_over_round_robin": round(ours.e2e_mean_s / robin.e2e_mean_s, 3),
            }
        )
    return found


def _robin(names: Container[str]) -> str:
    """Round robin without Slackline, or through the gateway where only that was measured."""
    return "direct_round_robin" if "direct_round_robin" in names else "round_robin"


def table(entries: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: medians over the seeds, with lowest and highest in brackets if there are several."""
    names = [contender.name for contender in CONTENDERS]
    last = (
        "over best baseline",
        "over round robin",
        "mean E2E over round robin's",
        "processor time of Slackline, cores",
    )
    lines = [f"| load | seeds | {' | '.join([*names, *last])} |"]
    lines.append("|" + "---|" * (len(names) + 6))
    for entry in entries:
        rates = list(dict.fromkeys(f"{seed['rate']:.1f}" for seed in entry["seeds"]))
        cells = [f"{entry['mix']} {entry['kind']} {entry['times_knee']:g}x ({' and '.join(rates)}/s)"]
        cells.append(str(len(entry["seeds"])))
        for name in names:
            cells.append(_cell(entry, name))
        best = max(entry[name]["attainment"] for name in BASELINES if name in entry)
        ours, robin = entry["slackline"]["attainment"], entry[_robin(entry)]["attainment"]
        cells += [f"{ours / best:.2f}x" if best else "-", f"{ours / robin:.1f}x" if robin else "-"]
        cells.append(f"{statistics.median(seed['e2e_over_round_robin'] for seed in entry['within_seed']):.2f}x")
        shares = entry["slackline"]["cpu_share"]
        cells.append(f"{sum(shares.values()):.2f}" if shares else "-")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(entry: Mapping[str, Any], name: str) -> str:
    if name not in entry:
        return "-"
    row = entry[name]
    low, high = row["attainment_spread"]
    spread = f" [{low:.3f} to {high:.3f}]" if row["runs"] > 1 else ""
    windows = sorted({of[name] for of in entry["windows"].values() if name in of})
    return f"{row['attainment']:.3f}{spread}" + (f" ({', '.join(map(str, windows))})" if windows else "")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm.seeds", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="runs.jsonl of bench-vllm, each in its machine's folder")
    arguments = parser.parse_args()
    if missing := [path for path in arguments.runs if not path.is_file()]:
        parser.error(f"runs: no file {str(missing[0])!r}")
    by_load = read(arguments.runs)
    entries = []
    for load in LOADS:
        seeds = by_load.get(load.name, [])
        entry = told(load, seeds)
        used = len(entry["seeds"]) if entry is not None else 0
        if used < len(seeds) or not seeds:
            print(f"{load.name}: {used} of {len(seeds)} seeds are whole", file=sys.stderr)
        entries += [entry] if entry is not None else []
    print(table(entries))
    print(json.dumps({"by_load": entries}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
