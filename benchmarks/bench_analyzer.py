"""`make bench-analyzer`: bounds on the lengths of answers from a forest, on later parts of public traces.

A trace is cut in two: the forest is trained on the first half of its requests (of agents: on half of the sessions) and
asked about the others, with the features that a gateway would have
(`controller.predict.answer_lengths`; an answer is known once its tokens are out, SECONDS_A_TOKEN each). For each answer
the bound at 0.9 is asked at its arrival and once 50, 100, 200 and 400 tokens are out, given that it still runs.

Calls of one session (Mooncake's are inferred from shared prefixes) are a workflow, as if the client had named it.

- `coverage`: share of the answers that the bound covered, by trace and tokens produced. `fixed`: always asked at 0.9;
  `adaptive`: as a gateway does (`controller.predict.length_replay`), with its own levels, which hear of an answer once
  it has ended (95 % interval: of resampled sessions, or answers where a trace has none); `kept`: the fixed bound of the
  arrival, never refined.
- `pinball`: mean loss at 0.9 at the arrival, in tokens, and of the constant quantile of the training answers.
- `bound_over_truth`: P5, P50, P95 of bound / length by tokens produced (Fig. 4.1(b)).
- `stage_error`, `match_ms`, `graph_bytes` (with the traces): pattern graphs of agents' runs, asked about others
  (`benchmarks.analyzer.graphs`). `stage_error` is printed as a table for each trace, by step and rule.
- `live` (not with `--no-live`): a gateway learns from its own requests, see `benchmarks.analyzer.live`. It starts
  PostgreSQL, Redis, an engine and the gateway. If it fails, `live` has the `error` beside all other figures, and the
  exit status is 1: a machine that is too busy for 100 requests/s cannot be measured so.
- `gateways` (with `--gateways N`, and then nothing else): adaptive coverage and `pinball` where requests are spread at
  random over N gateways. Each has its own levels, and as features what it has seen itself: recent answers and, of a
  workflow, the calls that came to it. `one`: with one gateway; `trained_on_one`: a forest of that, asked by N gateways,
  as after a second one was added; `trained_on_all`: one of the records of N.
- `arrivals` (with `--arrivals`, and then nothing else): what a prediction adds to a request on the event loop and in a
  thread beside it (`benchmarks/analyzer/arrivals.py`).
- `predict_ms`: processor time of one prediction of three quantiles. `train_s`: by trace.

Without `--traces DIR` (a folder with the traces under their names; `make` names one beside the project if there is
one) only the Azure trace that is shipped is read.
QUICK=1: the first 3,000 requests of a trace, and fewer live ones. Last line: JSON. Goals: adaptive coverage within 0.02
of 0.9 or 0.9 in its interval, `pinball` less by 30 % on azure2023_conv and 5 % on mooncake_conversation,
`predict_ms.p99` 2, `match_ms.p99` 1 at 500 graphs, `graph_bytes` 200.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import heapq
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.analyzer.arrivals import SECONDS, TURNS, arrivals_told
from benchmarks.analyzer.graphs import graph_figures, stage_table
from benchmarks.analyzer.live import live
from benchmarks.load.trials import note
from controller.predict.answer_lengths import FEATURES, PRODUCED, TARGET, LengthHistory
from controller.predict.length_forest import LengthForest
from controller.predict.length_replay import PastAnswer, replayed
from workers.analysis.length_forest import train

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = ROOT / "benchmarks/data/azure2023_conv.csv.gz"
AGENTS = ("swebench_agent_sessions", "claude_code_sessions_head5000")
TRACES = ("azure2023_conv", "azure2023_code", "mooncake_conversation", "mooncake_synthetic", *AGENTS)
SESSIONS = ("mooncake_conversation", "mooncake_synthetic", *AGENTS)  # whose calls of one session are a workflow
BY_SESSION = AGENTS  # cut between sessions: runs follow one another, or each has a time of its own
LEVELS = (0.1, 0.5, TARGET)
KIND = ("", "", "trace")  # tenant, class, model: all of a trace is one kind of traffic
SECONDS_A_TOKEN = 0.03
QUICK_ROWS = 3_000
RESAMPLED = 300
SEED = 0


class Answer(NamedTuple):
    """One request of a trace. `features` as of its arrival, `at`, in seconds, at its `gateway`."""

    session: str
    features: tuple[float, ...]
    tokens: int
    at: float = 0.0
    gateway: int = 0

    @property
    def timed(self) -> PastAnswer:
        return PastAnswer(self.at, self.at + self.tokens * SECONDS_A_TOKEN, self.features, self.tokens)


@dataclass(frozen=True, slots=True)
class CutTrace:
    name: str
    training: list[Answer]
    asked: list[Answer]


def rows(path: Path, most: int | None) -> Iterator[tuple[float, int, int, str]]:
    """(arrival, prompt tokens, answer tokens, session)."""
    with gzip.open(path, "rt") as file:
        for number, row in enumerate(csv.DictReader(file)):
            if most is not None and number >= most:
                return
            yield float(row["arrival_s"]), int(row["input_tokens"]), int(row["output_tokens"]), row.get("session") or ""


def answers(path: Path, most: int | None, *, sessions: bool, gateways: int = 1) -> list[Answer]:
    """`sessions`: calls of one session are a workflow. An answer is observed once its tokens are out, by the one of
    `gateways` that it came to."""
    rng, histories, found = np.random.default_rng(SEED), [LengthHistory() for _ in range(gateways)], []
    running: list[tuple[float, int, int, str, int, int]] = []
    for number, (at, prompt, tokens, session) in enumerate(sorted(rows(path, most), key=lambda row: row[0])):
        while running and running[0][0] <= at:
            _, _, gateway, ended, its_prompt, its_tokens = heapq.heappop(running)
            histories[gateway].observe(KIND, ended, its_prompt, its_tokens)
        workflow, gateway = session if sessions else "", int(rng.integers(gateways))
        features = histories[gateway].features(KIND, workflow, prompt, None)
        found.append(Answer(session, features, tokens, at, gateway))
        heapq.heappush(running, (at + tokens * SECONDS_A_TOKEN, number, gateway, workflow, prompt, tokens))
    return found


def cut(name: str, path: Path, most: int | None, gateways: int = 1) -> CutTrace:
    by_session = name in BY_SESSION
    found = answers(path, most, sessions=name in SESSIONS, gateways=gateways)
    if not by_session:
        return CutTrace(name, found[: len(found) // 2], found[len(found) // 2 :])
    names = sorted({each.session for each in found})
    trained = set(names[::2])
    return CutTrace(
        name,
        [each for each in found if each.session in trained],
        [each for each in found if each.session not in trained],
    )


def followed_by_gateway(forest: LengthForest, asked: Sequence[Answer]) -> list[list[int]]:
    """Upper bounds of each answer (`replayed`), by the levels of its own gateway."""
    found: list[list[int]] = [[] for _ in asked]
    for gateway in sorted({each.gateway for each in asked}):
        places = [place for place, each in enumerate(asked) if each.gateway == gateway]
        for place, bounds in zip(places, replayed(forest, [asked[place].timed for place in places]), strict=True):
            found[place] = bounds
    return found


def over_gateways(name: str, path: Path, most: int | None, gateways: int) -> dict[str, Any]:
    """Adaptive coverage with its interval by tokens out, and what `pinball` is less by."""
    one, several = cut(name, path, most), cut(name, path, most, gateways)
    of_one, of_all = forest_of(one.training), forest_of(several.training)
    runs = {"one": (one, of_one), "trained_on_one": (several, of_one), "trained_on_all": (several, of_all)}
    return {run: brief(judged(trace, forest)) for run, (trace, forest) in runs.items()}


def brief(found: dict[str, Any]) -> dict[str, Any]:
    told = {produced: [row["adaptive"], *row["adaptive_interval"]] for produced, row in found["coverage"].items()}
    return {"coverage": told, "pinball_less": found["pinball"]["less"]}


def forest_of(training: Sequence[Answer]) -> LengthForest:
    features = np.array([each.features for each in training])
    lengths = np.array([each.tokens for each in training])
    return train(FEATURES, features, lengths, np.ones(len(lengths), dtype=bool), seed=SEED)


def pinball(truth: npt.NDArray[Any], bound: npt.NDArray[Any]) -> float:
    short = truth - bound
    return float(np.mean(np.maximum(TARGET * short, (TARGET - 1) * short)))


def interval(hits: npt.NDArray[Any], sessions: Sequence[str]) -> list[float]:
    """95 % of the coverages of resampled sessions; of single answers where a trace has none."""
    rng = np.random.default_rng(SEED)
    keys = np.unique(np.array(sessions) if any(sessions) else np.arange(len(hits)).astype(str), return_inverse=True)[1]
    groups = [hits[keys == key] for key in range(keys.max() + 1)] if any(sessions) else None
    found = []
    for _ in range(RESAMPLED):
        if groups is None:
            found.append(float(rng.choice(hits, len(hits)).mean()))
        else:
            found.append(
                float(np.concatenate([groups[key] for key in rng.integers(len(groups), size=len(groups))]).mean())
            )
    low, high = np.quantile(found, (0.025, 0.975))
    return [round(float(low), 3), round(float(high), 3)]


def judged(trace: CutTrace, forest: LengthForest) -> dict[str, Any]:
    """Coverage, loss and ratios of one trace, and the times of the predictions."""
    coverage: dict[str, dict[str, Any]] = {}
    ratios: dict[str, list[float]] = {}
    times: list[float] = []
    at_arrival: list[float] = []
    first: npt.NDArray[Any] = np.array([])
    truth = np.array([each.tokens for each in trace.asked])
    followed = followed_by_gateway(forest, trace.asked)
    for stage, produced in enumerate(PRODUCED):
        running = [each for each in trace.asked if each.tokens > produced]
        if not running:  # code's answers are short
            continue
        given = [found[stage] for found in followed if len(found) > stage]
        adaptive = [each.tokens <= bound for each, bound in zip(running, given, strict=True)]
        bounds = []
        for each in running:
            began = time.thread_time()
            _, _, bound = forest.quantiles(each.features, LEVELS, produced)
            times.append(time.thread_time() - began)
            bounds.append(bound)
        lengths = np.array([each.tokens for each in running])
        hits = lengths <= np.array(bounds)
        if produced == 0:
            first, at_arrival = np.array(bounds), bounds
        kept = truth[truth > produced] <= first[truth > produced]
        coverage[str(produced)] = {
            "answers": len(running),
            "fixed": round(float(hits.mean()), 3),
            "adaptive": round(float(np.mean(adaptive)), 3),
            "adaptive_interval": interval(
                np.array(adaptive), [each.session for each in running] if trace.name in SESSIONS else [""]
            ),
            "kept": round(float(kept.mean()), 3),
        }
        ratios[str(produced)] = [
            round(float(each), 2) for each in np.quantile(np.array(bounds) / lengths, (0.05, 0.5, 0.95))
        ]
    constant = float(np.quantile([each.tokens for each in trace.training], TARGET))
    loss, of_constant = pinball(truth, np.array(at_arrival)), pinball(truth, np.full(len(truth), constant))
    return {
        "coverage": coverage,
        "pinball": {
            "forest": round(loss, 2),
            "constant": round(of_constant, 2),
            "less": round(1 - loss / of_constant, 3),
        },
        "bound_over_truth": ratios,
        "times": times,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, help="folder with the traces; default: only the one that is shipped")
    parser.add_argument("--only", choices=TRACES, help="answers of one of the traces, and no pattern graphs")
    parser.add_argument(
        "--live", action=argparse.BooleanOptionalAction, default=True, help="a gateway learns from its own requests"
    )
    parser.add_argument("--gateways", type=int, metavar="N", help="only what spreading requests over N gateways costs")
    parser.add_argument(
        "--arrivals", action="store_true", help="only what predictions on the loop and in a thread add to a request"
    )
    args = parser.parse_args(argv)
    quick = os.environ.get("QUICK", "") not in ("", "0")
    paths = {name: args.traces / f"{name}.csv.gz" for name in TRACES} if args.traces else {TRACES[0]: SHIPPED}
    if args.only:
        paths = {name: path for name, path in paths.items() if name == args.only}
        if not paths:
            parser.error(f"{args.only} is not shipped, and there is no folder with the traces")
    if args.gateways:
        return tell_gateways(paths, QUICK_ROWS if quick else None, args.gateways)
    if args.arrivals:
        return tell_arrivals(*next(iter(paths.items())), quick=quick)
    result: dict[str, Any] = {"coverage": {}, "pinball": {}, "bound_over_truth": {}, "train_s": {}, "seed": SEED}
    times: list[float] = []
    for name, path in paths.items():
        trace = cut(name, path, QUICK_ROWS if quick else None)
        began = time.perf_counter()
        forest = forest_of(trace.training)
        result["train_s"][name] = round(time.perf_counter() - began, 1)
        note(f"{name}: {len(trace.training)} answers trained on, {len(trace.asked)} asked about")
        found = judged(trace, forest)
        times += found.pop("times")
        for figure, value in found.items():
            result[figure][name] = value
        for produced, row in found["coverage"].items():
            shares = ", ".join(f"{each} {row[each]:.3f}" for each in ("fixed", "adaptive", "kept"))
            print(f"{name:24} {produced:>4} tokens out: {shares} of {row['answers']}")
        print(f"{name:24} pinball {found['pinball']}")
    p50, p99 = np.quantile(times, (0.5, 0.99)) * 1e3
    result["predict_ms"] = {"p50": round(float(p50), 3), "p99": round(float(p99), 3)}
    if args.traces and not args.only:
        graphs = graph_figures(args.traces)
        result |= graphs
        for name, stages in graphs["stage_error"].items():
            print(stage_table(name, stages))
        print(f"{'graphs':30} match_ms {graphs['match_ms']}, graph_bytes {graphs['graph_bytes']}")
    if args.live:
        result["live"] = learned_live(quick=quick)
        print(f"{'live':24} {result['live']}")
    print(json.dumps(result))
    return int("error" in result.get("live", {}))


def tell_gateways(paths: dict[str, Path], most: int | None, gateways: int) -> int:
    found = {name: over_gateways(name, path, most, gateways) for name, path in paths.items()}
    for name, runs in found.items():
        for run, told in runs.items():
            shares = ", ".join(f"{share:.3f} at {produced}" for produced, (share, *_) in told["coverage"].items())
            print(f"{name:24} {run:14} covered {shares} tokens out, pinball less by {told['pinball_less']:.3f}")
    print(json.dumps({"gateways": gateways, "seed": SEED, **found}))
    return 0


def tell_arrivals(name: str, path: Path, *, quick: bool) -> int:
    trace = cut(name, path, QUICK_ROWS if quick else None)
    forest = forest_of(trace.training)
    forest.prepare()
    features = [each.features for each in trace.asked]
    found = arrivals_told(forest, features, turns=1 if quick else TURNS, seconds=1.0 if quick else SECONDS)
    for way, told in found.items():
        print(f"{way:10} {told}")
    print(json.dumps({"arrivals": found, "trace": name}))
    return 0


def learned_live(*, quick: bool) -> dict[str, Any]:
    """Its figures, or the `error`."""
    lengths = [(prompt, tokens) for _, prompt, tokens, _ in rows(SHIPPED, None)]
    try:
        return live(lengths, quick=quick, seed=SEED)
    except (RuntimeError, TimeoutError, OSError) as error:
        return {"error": str(error)}


if __name__ == "__main__":
    sys.exit(main())
