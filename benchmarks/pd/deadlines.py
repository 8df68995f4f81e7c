"""`make bench-pd BENCH_ARGS=--deadlines`: what engines and migrator make of deadlines that they are told.

Two reference engines that prefill and two that decode, with the profile of Llama-2-70B on two A100. Two kinds of
requests at equal shares, which differ in their deadline alone: questions and reports. All have the same loose TTFT and
TPOT, so that nothing but the deadline says which is urgent, and the same lengths, since CALM weighs requests by their
tokens and not by their number. No request tells the length of its answer (`load/lengths.py`). Engines batch by
`--batching`, which reads what they are told.
Modes, in turn on the same engines:

- `aware`: as the gateway is;
- `unaware`: a gateway that tells engines and migrator of no deadline (`benchmarks/servers/unaware_gateway.py`). Its own
  queue knows them, as does that of `aware`.

The rate is searched with the first seed: the first at which `unaware` attains 0.5 to 0.8. Then each seed is measured.

Prints a table, then one line of JSON: `deadline_attainment` by mode (share of all requests whose answer ended in time,
median over seeds), `ratio`, `by_seed`, `by_kind`, `rate`, `searched` (`unaware` by rate).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.load.generator import LoadRun, Target, run_plan, without_lengths
from benchmarks.load.trials import Bench, note, wait_idle
from benchmarks.load.workloads import PlannedArrival, Task, burst
from benchmarks.servers.engines import reference_engines
from benchmarks.servers.stack import ClassSpec, Stack, StackFleet
from controller.core.types import Targets
from controller.simulator.workloads.arrivals import Lengths
from workers.engine.profiles import load_profile

POLICY, MODEL, PROFILE = "slackline", "llama-2-70b", "llama-2-70b-a100-tp2"
BATCHINGS = ("calm", "earliest_deadline_first")
ROLES = ("prefill", "prefill", "decode", "decode")
KV_TOKENS, SEQS, CONTEXT, STEP_TOKENS, SLOTS = 262_144, 64, 4096, 2048, 16
LAYERS, LAYER_TOKEN_BYTES = 28, 128  # little of the model's KV: the link is not what this compares
COMMIT = 0.5  # CALM: share of the slots that go by the time left; at 0.1 those are 1.6 of 16
LOOSE = (60.0, 5.0)  # TTFT and TPOT of both kinds, in seconds
WANTED = (0.5, 0.8)  # attainment of `unaware`
FIRST_RATE, HIGHER, LOWER, MOST_RATES = 8.0, 1.25, 0.7, 8
CUTOFF_S = 40.0
MODES = {"aware": "api.openai", "unaware": "benchmarks.servers.unaware_gateway"}

LENGTHS = (Lengths(800, 300, 64, 2000), Lengths(70, 20, 8, 140))  # prompt and answer: equal work, equal worth
TASKS = (
    Task("question", Targets(*LOOSE, 7.0, 60.0), *LENGTHS),
    Task("report", Targets(*LOOSE, 20.0, 60.0), *LENGTHS),
)


def batching_options(batching: str, commit: float = COMMIT) -> dict[str, Any]:
    """CALM's are those of the combined set but for `commit`, with the profile's times."""
    times = load_profile(PROFILE).coefficients
    calm = {"rectangles": True, "commit": commit, "token_s": times.decode_a, "prefill_s": times.prefill_b}
    return {"slots": SLOTS, **(calm if batching == "calm" else {})}


class DeadlineScore(NamedTuple):
    """Of one run. Requests that were refused, failed or cut are late."""

    attainment: float
    by_kind: Mapping[str, float]
    outcomes: Mapping[str, int]
    largest_gap_s: float


def deadline_score(run: LoadRun, tasks: Sequence[Task] = TASKS) -> DeadlineScore:
    """Raises ValueError if the run has no requests, or a task no deadline."""
    if not run.samples:
        raise ValueError("a run without requests has no score")
    due_s = {task.name: task.targets.deadline_s for task in tasks}
    in_time: dict[str, list[bool]] = {task.name: [] for task in tasks}
    for sample in run.samples:
        if (limit := due_s[sample.task]) is None:
            raise ValueError(f"{sample.task} has no deadline")
        in_time[sample.task].append(sample.outcome == "ok" and sample.e2e_s <= limit)
    return DeadlineScore(
        sum(map(sum, in_time.values())) / len(run.samples),
        {name: sum(each) / len(each) for name, each in in_time.items() if each},
        dict(Counter(sample.outcome for sample in run.samples)),
        run.largest_gap_s,
    )


def searched(attained: Callable[[float], float], first: float = FIRST_RATE) -> tuple[float, dict[float, float]]:
    """The rate (requests/s) at which `attained` lies within WANTED, else the tried one nearest to it; what was seen.

    It is followed upwards until it is too low, and then bisected."""
    seen: dict[float, float] = {}
    easy, hard, rate = 0.0, 0.0, first
    while len(seen) < MOST_RATES:
        seen[rate] = attained(rate)
        if WANTED[0] <= seen[rate] <= WANTED[1]:
            break
        if seen[rate] > WANTED[1]:
            easy = rate
        else:
            hard = rate
        rate = round((easy + hard) / 2 if easy and hard else rate * HIGHER if easy else rate * LOWER, 2)
    middle = sum(WANTED) / 2
    return min(seen, key=lambda each: abs(seen[each] - middle)), seen


class DeadlineBench:
    """Engines and stack; a run of either mode."""

    def __init__(self, stack: Stack) -> None:
        self.stack, self.bench = stack, Bench(stack)

    def run(self, mode: str, plan: Sequence[PlannedArrival]) -> DeadlineScore:
        def once() -> DeadlineScore:
            wait_idle(self.stack.fleet.urls)
            with self.stack.gateway(POLICY, name=mode, module=MODES[mode]) as gateway:
                return deadline_score(run_plan(plan, self._target(gateway.url), CUTOFF_S))

        found: DeadlineScore = self.bench.undisturbed(once)
        note(f"    {mode}: {found.attainment:.3f} {dict(found.by_kind)} {found.outcomes}")
        return found

    def _target(self, url: str) -> Target:
        def extra(arrival: PlannedArrival) -> dict[str, Any]:
            return {"slo_class": arrival.task.name, "deadline": arrival.task.targets.deadline_s}

        target = Target([url], self.stack.fleet.model, {"Authorization": f"Bearer {self.stack.api_key}"}, extra)
        return without_lengths(target, TASKS, engines_emulated=True)


def fleet_of(urls: Sequence[str], batching: str) -> StackFleet:
    return StackFleet(
        *(MODEL, urls, "reference", SEQS),
        classes=[ClassSpec(task.name, *LOOSE) for task in TASKS],
        coefficients=load_profile(PROFILE).coefficients._asdict(),
        context_tokens=CONTEXT,
        kv_capacity_tokens=KV_TOKENS,
        roles=ROLES,
        started={"batching": batching},
    )


def measured(
    bench: DeadlineBench, rate: float | None, per_task: int, seeds: Sequence[int]
) -> tuple[float, dict[float, float], dict[str, list[DeadlineScore]]]:
    """The rate, what the search saw, and the scores by mode. Modes take turns, so that a change of the machine's other
    work falls on both."""
    seen: dict[float, float] = {}
    if rate is None:

        def unaware(at: float) -> float:
            note(f"{at:g} requests/s")
            return bench.run("unaware", burst(TASKS, at, seeds[0], per_task)).attainment

        rate, seen = searched(unaware)
    scores: dict[str, list[DeadlineScore]] = {mode: [] for mode in MODES}
    for turn, seed in enumerate(seeds):
        note(f"{rate:g} requests/s, seed {seed}")
        plan = burst(TASKS, rate, seed, per_task)
        for mode in list(MODES) if turn % 2 == 0 else reversed(MODES):
            scores[mode].append(bench.run(mode, plan))
    return rate, seen, scores


def run(batching: str, commit: float, rate: float | None, per_task: int, seeds: Sequence[int]) -> dict[str, Any]:
    """All figures."""
    with tempfile.TemporaryDirectory(prefix="bench-pd-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # PostgreSQL runs as another user
        options = (
            *("--model", MODEL, "--profile", PROFILE, "--max-num-seqs", str(SEQS), "--max-model-len", str(CONTEXT)),
            *("--kv-blocks", str(KV_TOKENS // 16), "--max-num-batched-tokens", str(STEP_TOKENS)),
            *("--no-enable-prefix-caching", "--kv-layers", str(LAYERS), "--kv-token-bytes", str(LAYER_TOKEN_BYTES)),
            *("--batching", batching, "--batching-options", json.dumps(batching_options(batching, commit))),
        )
        each = [("--role", role) for role in ROLES]
        with (
            reference_engines(len(ROLES), folder / "logs", *options, each=each) as engines,
            Stack(folder / "data", fleet_of([engine.url for engine in engines], batching)) as stack,
        ):
            bench = DeadlineBench(stack)
            at, seen, scores = measured(bench, rate, per_task, seeds)
    return {
        **figures(scores),
        **{"rate": at, "searched": seen, "batching": batching, "commit": commit, "policy": POLICY, "profile": PROFILE},
        **{"per_task": per_task, "seeds": list(seeds), "dropped": bench.bench.dropped},
    }


def figures(scores: Mapping[str, Sequence[DeadlineScore]]) -> dict[str, Any]:
    """Medians over seeds by mode, and their ratio (None against nothing attained)."""
    attained = {mode: statistics.median(each.attainment for each in found) for mode, found in scores.items()}
    kinds = {
        mode: {kind: statistics.median(each.by_kind[kind] for each in found) for kind in found[0].by_kind}
        for mode, found in scores.items()
    }
    return {
        "deadline_attainment": {mode: round(value, 4) for mode, value in attained.items()},
        "ratio": round(attained["aware"] / attained["unaware"], 3) if attained["unaware"] else None,
        "by_seed": {mode: [round(each.attainment, 4) for each in found] for mode, found in scores.items()},
        "by_kind": {mode: {kind: round(value, 4) for kind, value in each.items()} for mode, each in kinds.items()},
        "outcomes": {
            mode: dict(sum((Counter(s.outcomes) for s in found), Counter())) for mode, found in scores.items()
        },
        "largest_gap_s": round(max(each.largest_gap_s for found in scores.values() for each in found), 3),
    }


def _added(outcomes: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in outcomes:
        total.update(each)
    return dict(total)


def table(found: Mapping[str, Any]) -> str:
    lines = [f"{found['rate']:g} requests/s, {found['batching']} batching", f"{'mode':8} {'in time':>8}  by seed"]
    for mode, value in found["deadline_attainment"].items():
        lines.append(f"{mode:8} {value:8.3f}  {', '.join(f'{each:.3f}' for each in found['by_seed'][mode])}")
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--deadlines", action="store_true", help="measure what engines make of deadlines instead")
    parser.add_argument("--batching", choices=BATCHINGS, default="calm", help="with --deadlines (%(default)s)")
    parser.add_argument(
        "--commit",
        type=float,
        default=COMMIT,
        help="with calm: part of the slots that go by the time left (%(default)s)",
    )
