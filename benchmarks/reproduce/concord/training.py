"""Trains the analyser of Concord's runs on programs of other seeds, as a gateway's records would have them.

The forest is trained on the answers of TRAINING_SEEDS, with what a gateway knew when each came. Pattern graphs are of
programs that CALM served in time at the same rate and mix, with yet another seed: their times are observed under that
load, waiting included. The run that records them has graphs with times of a full batch, since it has none yet.

A forest is stored under FOLDER by a digest of what it is made from, code included, and read from there by the next
process.
"""

from __future__ import annotations

import hashlib
import heapq
import os
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np

from controller.core.errors import ConfigError
from controller.predict.answer_lengths import FEATURES, LengthHistory
from controller.predict.graph_medoids import medoids
from controller.predict.length_forest import LengthForest
from controller.predict.pattern_graphs import Call, GraphSet, graph_of, kind_of
from controller.simulator.workloads.analyser import MODEL, TrainedAnalyser
from controller.simulator.workloads.programs import Program, ProgramStage, Speeds, longest_call_s
from workers.analysis import length_forest

FOLDER = Path(__file__).resolve().parents[3] / "build" / "reproduce"
TRAINING_SEEDS = (901, 902, 903, 904)  # no run that is compared, nor the sweep, has one of these
RECORDING_SEED = 911
PROGRAMS, RATE = 1_000, 2.0  # of each training seed, in programs/s
Stages = tuple[ProgramStage, ...]
LEAST_GRAPHS = 20  # of an application, recorded under load; with fewer those of a full batch stay in force
SURELY = 0.1  # share of the recorded programs whose later stages took less than the bound for giving up


class Mix(Protocol):
    """As in the lab: its text and that of `speeds` name the forest's file."""

    def __hash__(self) -> int: ...

    def programs(self, times: Sequence[float], seed: int) -> list[Program]: ...


def programs(mix: Mix, seed: int) -> list[Program]:
    times = np.cumsum(np.random.default_rng([seed, 5]).exponential(1 / RATE, PROGRAMS)).tolist()
    return mix.programs(times, seed)


def training_programs(mix: Mix, seed: int, drawn: set[Stages]) -> list[Program]:
    """Without programs of several calls that are in `drawn`, which grows: a session that is drawn often is still one to
    learn from.
    """
    found = []
    for program in programs(mix, seed):
        if program.single or program.stages not in drawn:
            drawn.add(program.stages)
            found.append(program)
    return found


def calls_of(program: Program, speeds: Speeds) -> list[list[Call]]:
    """By stage, if each call took what its tokens take at these speeds."""
    at, found = program.at, []
    for stage in program.stages:
        found.append(
            [
                Call(
                    kind_of(MODEL, program.app), at,
                    at + call.output_tokens * speeds.token_s + call.prompt_tokens * speeds.prefill_s,
                    call.prompt_tokens, call.output_tokens,
                )
                for call in stage.calls
            ]
        )  # fmt: skip
        at += longest_call_s(stage, speeds) + stage.tool_s
    return found


def answers(found: Sequence[Program], speeds: Speeds) -> tuple[list[tuple[float, ...]], list[int]]:
    """Features and tokens of all answers in the order of their arrival; a gateway learns of each when it has ended."""
    order = sorted(
        (call.began, number, "" if program.single else program.id, (program.app, program.kind, MODEL), call)
        for number, program in enumerate(found)
        for stage in calls_of(program, speeds)
        for call in stage
    )
    history, features, tokens = LengthHistory(), [], []
    running: list[tuple[float, int]] = []
    for place, (began, _, workflow, kind, call) in enumerate(order):
        while running and running[0][0] <= began:
            _, _, its_workflow, its_kind, its_call = order[heapq.heappop(running)[1]]
            history.observe(its_kind, its_workflow, its_call.input_tokens, its_call.output_tokens)
        features.append(history.features(kind, workflow, call.input_tokens, None))
        tokens.append(call.output_tokens)
        heapq.heappush(running, (call.ended or began, place))
    return features, tokens


@cache
def forest(mix: Mix, speeds: Speeds) -> LengthForest:
    """Of this mix, made once."""
    code = "".join(Path(module).read_text() for module in (__file__, length_forest.__file__))
    made_from = (mix, speeds, TRAINING_SEEDS, PROGRAMS, RATE, FEATURES, code)
    file = FOLDER / f"concord-{hashlib.sha256(repr(made_from).encode()).hexdigest()[:16]}.forest"
    if file.exists():
        try:
            return LengthForest.from_bytes(file.read_bytes())
        except ConfigError:
            file.unlink(missing_ok=True)  # damaged: trained again
    features: list[tuple[float, ...]] = []
    tokens: list[int] = []
    drawn: set[Stages] = set()
    for seed in TRAINING_SEEDS:
        more, lengths = answers(training_programs(mix, seed, drawn), speeds)
        features += more
        tokens += lengths
    ended = np.ones(len(tokens), dtype=bool)
    made = length_forest.train(FEATURES, np.array(features), np.array(tokens), ended, about={"seeds": TRAINING_SEEDS})
    FOLDER.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}")  # whole or not there, also for another process
    part.write_bytes(made.to_bytes())
    part.replace(file)
    return made


@cache
def unloaded(mix: Mix, speeds: Speeds) -> TrainedAnalyser:
    """With graphs whose times are those of a full batch."""
    recorded: dict[str, list[list[Call]]] = {}
    drawn: set[Stages] = set()
    for seed in TRAINING_SEEDS:
        for program in training_programs(mix, seed, drawn):
            if not program.single:
                calls = [call for stage in calls_of(program, speeds) for call in stage]
                recorded.setdefault(program.app, []).append(calls)
    return TrainedAnalyser(forest(mix, speeds), graphs_of(recorded), speeds.token_s, surely(recorded))


def observed(before: TrainedAnalyser, recorded: Mapping[str, Sequence[Sequence[Call]]]) -> TrainedAnalyser:
    """With graphs of programs as they ran, or as before where too few of an application did."""
    recorded = {app: distinct(each) for app, each in recorded.items()}
    if any(len(recorded.get(app, ())) < LEAST_GRAPHS for app in before.graphs):
        return before
    return TrainedAnalyser(before.forest, graphs_of(recorded), None, surely(recorded))


def distinct(recorded: Sequence[Sequence[Call]]) -> list[Sequence[Call]]:
    """Of programs with the same calls the first."""
    found: dict[tuple[tuple[int, int], ...], Sequence[Call]] = {}
    for calls in recorded:
        found.setdefault(tuple((call.input_tokens, call.output_tokens) for call in calls), calls)
    return list(found.values())


def graphs_of(recorded: Mapping[str, Sequence[Sequence[Call]]]) -> dict[str, GraphSet]:
    return {app: medoids([graph_of(calls) for calls in each], [0.0] * len(each)) for app, each in recorded.items()}


def surely(recorded: Mapping[str, Sequence[Sequence[Call]]]) -> float:
    """The share of the foretold time of later stages that SURELY of the programs need less than: graphs of every
    second program are asked about the others, at the beginning of each of their stages."""
    shares = []
    for each in recorded.values():
        graphs = medoids([graph_of(calls) for calls in each[::2]], [0.0] * len(each[::2]))
        for calls in each[1::2]:
            shares += later_shares(graphs, calls)
    return min(1.0, float(np.quantile(shares, SURELY))) if shares else 0.0


def later_shares(graphs: GraphSet, calls: Sequence[Call]) -> list[float]:
    """What the later stages took over what was foretold of them, at the beginning of each stage that has some."""
    begins = sorted({call.began for call in calls})
    ended = max(call.ended or call.began for call in calls)
    found = []
    for now, following in pairwise(begins):
        known = [
            call if (call.ended or now) <= now else call._replace(ended=None, output_tokens=0)
            for call in calls
            if call.began <= now
        ]
        match = graphs.match(known)
        foretold = sum(match.seconds[1:]) if match is not None else 0.0
        if foretold > 0:
            here = max(call.ended or now for call in calls if call.began < following)
            found.append((ended - here) / foretold)
    return found
