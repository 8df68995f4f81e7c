"""`make bench-pd`: disaggregated prefill and decode against the same engines collocated, and against one-shot
placement.

Four reference engines behind the gateway, emulated: their steps take the time of Qwen2.5-7B on A100, in real time. With
`--fleet unequal` they serve Llama-3.1-8B, and one of the two that decode is an A100, the others H100. Modes:

- all collocated, at the chunk size that simulates best;
- two that prefill and two that decode; the Migrator places the decode stage when the last step of the prefill begins,
  so that KV moves during that step;
- the same, but placed when the prefill has ended;
- the same, but the decode engine is chosen when the prefill is sent (one-shot).

KV is really transferred, as bytes of the emulated size over TCP. There are two kinds of requests: long documents with a
tight TPOT, and short prompts with long answers and a loose one. No request tells the length of its answer
(`load/lengths.py`). The simulator runs the same arrivals on the same settings, with lengths that the gateway knows.
Gateway and simulator run the policy set `slackline`; only one-shot placement replaces its Migrator.

Prints a table, then one line of JSON: `attainment` by mode (live, median over seeds), `simulated`, `kv_bytes` and
`kv_gb_per_s` by mode (over all seeds), and `by_mode` (there `kv_early_share` is the share of KV bytes that moved before
their prefill had ended, and `kv_gb_per_s` is over whole pulls, including the wait for the prefill if they overlap with
it). QUICK=1: 60 requests of each kind, one seed. With `--deadlines` it compares something else: see
benchmarks/pd/deadlines.py.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import secrets
import statistics
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.load.generator import gateway_target, run_plan, without_lengths
from benchmarks.load.scoring import Score, score
from benchmarks.load.trials import Bench, note, wait_idle
from benchmarks.load.workloads import PlannedArrival, Task, burst
from benchmarks.machine.names import keep
from benchmarks.pd import deadlines
from benchmarks.servers.engines import ROOT, reference_engines, stop_on_sigterm
from benchmarks.servers.stack import ClassSpec, Stack, StackFleet
from controller.core.types import Targets
from controller.simulator.__main__ import read_profile, read_trace
from controller.simulator.experiment import ExperimentPlan, parse_experiment
from controller.simulator.report.summary import report
from controller.simulator.runner import run_once
from controller.simulator.workloads.arrivals import Lengths
from controller.simulator.workloads.mixes import PATIENT_S
from workers.engine.profiles import load_profile

POLICY = "slackline"
KV_TOKENS, SEQS, CONTEXT = 262_144, 64, 8192
LAYERS, LAYER_TOKEN_BYTES = 28, 512  # a quarter of the model's real KV, because two cores move it all
CHUNKS = (512, 1024, 2048)
PREFILL_TOKENS = 8192
FIRST_SEED = 500
METRIC = re.compile(r"(?m)^slackline_(kv_\w+) ([0-9.e+]+)")


def documents_and_stories(tight_s: float, loose_s: float) -> tuple[Task, ...]:
    """Long prompts with a TPOT of `tight_s`, and short prompts with long answers and one of `loose_s`."""
    return (
        Task("document", Targets(1.0, tight_s, None, PATIENT_S), Lengths(1800, 1200, 64, 6000, "lognormal"),
             Lengths(100, 25, 8, 300)),
        Task("story", Targets(1.0, loose_s, None, PATIENT_S), Lengths(120, 40, 16, 400), Lengths(200, 50, 16, 400)),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PdFleet:
    """Four engines of one model. `profiles`: theirs, in the order of a mode's roles (the last two decode)."""

    name: str
    model: str
    profiles: tuple[str, str, str, str]
    tasks: tuple[Task, ...]
    rate: float


FLEETS = {
    fleet.name: fleet
    for fleet in (
        PdFleet("equal", "qwen2.5-7b", ("qwen2.5-7b-a100",) * 4, documents_and_stories(0.02, 0.04), 40.0),
        # The A100's step takes about twice the H100's, which alone keeps the tight TPOT.
        PdFleet(
            "unequal",
            "llama-3.1-8b",
            ("llama-3.1-8b-h100", "llama-3.1-8b-h100", "llama-3.1-8b-h100", "llama-3.1-8b-a100"),
            documents_and_stories(0.012, 0.03),
            40.0,
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Mode:
    """One configuration of the four engines.

    `roles`: theirs. `chunk`: token budget of a step. `migration`: what places the decode stage (None: the policy
    set's). `overlap`: before its prefill has ended.
    """

    name: str
    roles: tuple[str, ...]
    chunk: int
    migration: str | None = None
    overlap: bool = True

    @property
    def overrides(self) -> dict[str, Any]:
        placement = {"migration": {"name": self.migration}} if self.migration else {}
        return {**placement, "migrator": {"overlap": self.overlap}}


APART = ("prefill", "prefill", "decode", "decode")
PD = Mode("pd", APART, PREFILL_TOKENS)
AFTER = Mode("pd_without_overlap", APART, PREFILL_TOKENS, overlap=False)
ONE_SHOT = Mode("one_shot", APART, PREFILL_TOKENS, "one_shot")


def collocated(chunk: int) -> Mode:
    return Mode("collocated", ("collocated",) * 4, chunk)


# ---- simulated ------------------------------------------------------------------------------------------------------


def experiment(fleet: PdFleet, mode: Mode, per_task: int, link_gb_s: float) -> ExperimentPlan:
    engine = {
        "kv_tokens": KV_TOKENS,
        "max_num_seqs": SEQS,
        "max_num_batched_tokens": mode.chunk,
        "max_model_len": CONTEXT,
        "prefix_caching": False,
        "kv_bytes_per_token": LAYERS * LAYER_TOKEN_BYTES,
    }
    settings: dict[str, Any] = {"cutoff_s": 25.0}
    if mode.roles == APART:
        settings["links"] = {
            "bandwidth_gb_s": link_gb_s,
            "latency_s": 0.002,
            "scope": "port",
            "overlap": True,  # as reference engines do
            "layers": LAYERS,
        }
    raw = {
        "name": mode.name,
        "instances": [
            {**engine, "profile": f"{ROOT / 'workers/engine/profiles.json'}#{profile}", "count": count, "role": role}
            for (profile, role), count in Counter(zip(fleet.profiles, mode.roles, strict=True)).items()
        ],
        "policies": [{"name": POLICY, "overrides": mode.overrides}],
        "workload": {"kind": "tasks", "per_task": per_task, "tasks": [_as_json(task) for task in fleet.tasks]},
        "settings": settings,
    }
    return parse_experiment(raw, read_profile, read_trace)


def _as_json(task: Task) -> dict[str, Any]:
    laws = {
        part: {"law": law.law, "mean": law.mean, "std": law.std, "low": law.low, "high": law.high}
        for part, law in (("prompt", task.prompt), ("output", task.output))
    }
    return {"name": task.name, "ttft_s": task.targets.ttft_s, "tpot_s": task.targets.tpot_s, **laws}


def simulated(fleet: PdFleet, mode: Mode, rate: float, per_task: int, seeds: Sequence[int], link_gb_s: float) -> float:
    """Median attainment over the seeds."""
    plan = experiment(fleet, mode, per_task, link_gb_s)
    (contender,) = plan.contenders
    return statistics.median(report(run_once(plan, contender, rate, seed), 0.0)["attainment"] for seed in seeds)


def only_simulated(
    fleet: PdFleet, modes: Iterable[Mode], rate: float, per_task: int, seeds: Sequence[int], link_gb_s: float
) -> dict[str, Any]:
    """The last line of `--no-live`."""
    found = {mode.name: simulated(fleet, mode, rate, per_task, seeds, link_gb_s) for mode in modes}
    return {
        "benchmark": "pd --no-live",
        "fleet": fleet.name,
        "link_gb_s": link_gb_s,
        "simulated": found,
        "over_one_shot": ratio(found[PD.name], found[ONE_SHOT.name]),
        "rate": rate,
        "per_task": per_task,
        "seeds": list(seeds),
    }


# ---- live -----------------------------------------------------------------------------------------------------------


def moved(urls: Sequence[str]) -> dict[str, float]:
    """Totals of the engines' transfers, as they report them."""
    total: dict[str, float] = {}
    for url in urls:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:
            for name, value in METRIC.findall(reply.read().decode()):
                total[name] = total.get(name, 0.0) + float(value)
    return total


def live(fleet: PdFleet, mode: Mode, rate: float, per_task: int, seeds: Sequence[int], folder: Path) -> dict[str, Any]:
    """The scores of each seed, and the transfers."""
    options = (
        *("--model", fleet.model, "--max-num-seqs", str(SEQS), "--max-model-len", str(CONTEXT)),
        *("--kv-blocks", str(KV_TOKENS // 16), "--max-num-batched-tokens", str(mode.chunk)),
        *("--no-enable-prefix-caching", "--kv-layers", str(LAYERS), "--kv-token-bytes", str(LAYER_TOKEN_BYTES)),
    )
    each = [("--profile", profile) for profile in fleet.profiles]
    with reference_engines(4, folder / "logs", *options, each=each) as engines:
        urls = [engine.url for engine in engines]
        seeded = StackFleet(
            fleet.model, urls, "reference", SEQS,
            [ClassSpec(task.name, task.targets.ttft_s, task.targets.tpot_s) for task in fleet.tasks],
            None, CONTEXT, KV_TOKENS, mode.roles, fleet.profiles,
            {profile: load_profile(profile).coefficients._asdict() for profile in set(fleet.profiles)},
        )  # fmt: skip
        with Stack(folder, seeded) as stack:
            bench = Bench(stack)
            plans = [burst(fleet.tasks, rate, seed, per_task) for seed in seeds]
            scores = [bench.undisturbed(lambda plan=plan: _once(stack, fleet, mode, plan)) for plan in plans]
        return {"scores": scores, "dropped": bench.dropped, **moved(urls)}


def _once(stack: Stack, fleet: PdFleet, mode: Mode, plan: Sequence[PlannedArrival]) -> Score:
    wait_idle(stack.fleet.urls)
    with stack.gateway(POLICY, mode.overrides) as gateway:
        target = gateway_target(gateway.url, stack.fleet.model, stack.api_key)
        return score(run_plan(plan, without_lengths(target, fleet.tasks, engines_emulated=True)), fleet.tasks)


def best_chunk(fleet: PdFleet, rate: float, per_task: int, seeds: Sequence[int]) -> tuple[int, dict[int, float]]:
    """The best chunk size of the collocated baseline, by simulation."""
    seen = {chunk: simulated(fleet, collocated(chunk), rate, per_task, seeds, 1.0) for chunk in CHUNKS}
    return max(CHUNKS, key=lambda chunk: (seen[chunk], -chunk)), seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--fleet", choices=sorted(FLEETS), default="equal", help="decode engines alike or not (%(default)s)"
    )
    parser.add_argument("--rate", type=float, help="requests/s of both kinds together (default: the fleet's)")
    parser.add_argument("--per-task", type=int, help="requests of each kind (200; QUICK=1: 60)")
    parser.add_argument("--seeds", type=int, help="how many (3; QUICK=1: 1)")
    parser.add_argument("--link", type=float, default=1.0, help="GB/s per port in the simulator (%(default)s)")
    parser.add_argument("--no-live", action="store_true", help="simulate only: the attainment of each mode")
    parser.add_argument("--keep", action="store_true", help="write the JSON to docs/measurements/pd as well")
    deadlines.add_options(parser)
    args = parser.parse_args()
    stop_on_sigterm()
    os.environ["FLEET_TOKEN"] = secrets.token_urlsafe(16)
    quick = os.environ.get("QUICK", "") not in ("", "0")
    seeds = [FIRST_SEED + 37 * turn for turn in range(args.seeds or (1 if quick else 3))]
    args.per_task = args.per_task or (60 if quick else 200)
    if args.deadlines:
        told = deadlines.run(args.batching, args.commit, args.rate, args.per_task, seeds)
        print(deadlines.table(told))
        print(json.dumps({"benchmark": "pd --deadlines", "quick": quick, **told}))
        if args.keep:
            keep("pd-deadlines", told)
        return
    fleet = FLEETS[args.fleet]
    rate = args.rate or fleet.rate
    chunk, swept = best_chunk(fleet, rate, args.per_task, seeds)
    note(f"collocated, simulated by chunk: {swept}; taken: {chunk}")
    modes = (collocated(chunk), PD, AFTER, ONE_SHOT)
    if args.no_live:
        print(json.dumps(only_simulated(fleet, modes, rate, args.per_task, seeds, args.link)))
        return
    by_mode: dict[str, dict[str, Any]] = {}
    for mode in modes:
        note(f"{mode.name} ...")
        with tempfile.TemporaryDirectory(prefix="bench-pd-") as folder:
            found = live(fleet, mode, rate, args.per_task, seeds, Path(folder))
        by_mode[mode.name] = summary(found) | {
            "simulated": simulated(fleet, mode, rate, args.per_task, seeds, args.link)
        }
    result = answer(by_mode) | {
        "fleet": fleet.name,
        "over_one_shot": ratio(by_mode["pd"]["attainment"], by_mode["one_shot"]["attainment"]),
        "policy": POLICY,
        "rate": rate,
        "per_task": args.per_task,
        "seeds": seeds,
        "collocated_chunk": chunk,
        "collocated_sweep": swept,
        "kv_bytes_per_token": LAYERS * LAYER_TOKEN_BYTES,
    }
    print(table(fleet, by_mode, rate))
    print(json.dumps(result))
    if args.keep:
        keep("pd" if fleet.name == "equal" else f"pd-{fleet.name}", result)


def answer(by_mode: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The main figures by mode, and all figures of each."""
    keys = ("attainment", "simulated", "kv_bytes", "kv_gb_per_s")
    return {key: {name: each[key] for name, each in by_mode.items()} for key in keys} | {"by_mode": by_mode}


def ratio(ours: float, other: float) -> float | None:
    """Rounded; None against nothing attained."""
    return round(ours / other, 3) if other else None


def summary(found: dict[str, Any]) -> dict[str, Any]:
    scores: list[Score] = found["scores"]
    seconds = found.get("kv_receiving_seconds", 0.0)
    received = found.get("kv_received_bytes", 0.0)
    return {
        "attainment": statistics.median(each.attainment for each in scores),
        "spread": [min(each.attainment for each in scores), max(each.attainment for each in scores)],
        "e2e_mean_s": statistics.median(each.e2e_mean_s for each in scores),
        "ttft_p50_s": _middle(_middle(each.ttft_p50_s.values()) for each in scores),
        "kv_bytes": received,
        "kv_transfers": found.get("kv_received", 0.0),
        "kv_failed": found.get("kv_failed", 0.0),
        "kv_gb_per_s": received / seconds / 1e9 if seconds else None,
        "kv_early_share": found.get("kv_early_bytes", 0.0) / received if received else None,
        "largest_gap_s": max(each.largest_gap_s for each in scores),
        "dropped": found["dropped"],
    }


def _middle(values: Iterable[float | None]) -> float | None:
    """The median of the measured values; None if there are none."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.median(known) if known else None


def table(fleet: PdFleet, by_mode: dict[str, dict[str, Any]], rate: float) -> str:
    lines = [
        f"{rate:g} requests/s over four engines ({', '.join(fleet.profiles)}, emulated)",
        f"{'mode':18} {'attained':>9} {'spread':>14} {'simulated':>10} {'E2E s':>7} {'KV moved':>11} {'GB/s each':>10} "
        f"{'early':>6}",
    ]
    for name, each in by_mode.items():
        spread = f"{each['spread'][0]:.3f}-{each['spread'][1]:.3f}"
        speed = f"{each['kv_gb_per_s']:.2f}" if each["kv_gb_per_s"] else "-"
        early = f"{each['kv_early_share']:.0%}" if each["kv_early_share"] is not None else "-"
        lines.append(
            f"{name:18} {each['attainment']:9.3f} {spread:>14} {each['simulated']:10.3f} {each['e2e_mean_s']:7.2f} "
            f"{each['kv_bytes'] / 1e9:8.2f} GB {speed:>10} {early:>6}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
