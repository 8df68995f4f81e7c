"""The trained analyser in the simulator: what it may know, what it remembers, and single predictions exchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from controller.core.errors import ConfigError
from controller.core.types import Outcome, Targets
from controller.dispatch import build_dispatcher
from controller.predict.answer_lengths import FEATURES
from controller.predict.length_forest import LengthForest
from controller.predict.pattern_graphs import Call, GraphSet, graph_of, kind_of, set_of
from controller.simulator import Simulation, SimulationSettings
from controller.simulator.workloads.analyser import MODEL, PARTS, Exchanged, Trained, TrainedAnalyser
from controller.simulator.workloads.concord_mix import ConcordMix
from controller.simulator.workloads.foresight import Oracle
from controller.simulator.workloads.mixes import PATIENT_S
from controller.simulator.workloads.programs import Foresight, Program, ProgramCall, Programs, ProgramStage, Speeds
from tests.controller.simulator.runs import SMALL

WIDE = replace(SMALL, max_num_seqs=64, kv_tokens=400_000, max_model_len=16_384)
KIND = kind_of(MODEL, "app")


def forest() -> LengthForest:
    """Two leaves, told apart by the prompt: answers of 10 to 50 tokens, and of 100 to 500."""
    lengths = [10, 20, 30, 40, 50, 100, 200, 300, 400, 500]
    whole = np.array([True] * 10)
    return LengthForest(
        FEATURES,
        feature=np.array([0, -1, -1], np.int32),
        threshold=np.array([100.0, 0.0, 0.0]),
        left=np.array([1, 0, 0], np.int32),
        right=np.array([2, 0, 0], np.int32),
        roots=np.array([0], np.int32),
        begin=np.array([0, 0, 5], np.int32),
        end=np.array([0, 5, 10], np.int32),
        members=np.arange(10, dtype=np.int32),
        lengths=np.array(lengths, np.int32),
        ended=whole,
        about={},
    )


def graphs() -> GraphSet:
    """Two calls side by side for 4 s, a tool of 1 s, and an answer of 6 s; and one of a single stage of three calls."""
    two = [Call(KIND, 0.0, 4.0, 50, 30), Call(KIND, 0.0, 3.0, 50, 30), Call(KIND, 5.0, 11.0, 200, 300)]
    return set_of([graph_of(two), graph_of([Call(KIND, 0.0, 2.0, 50, 30)] * 3)], [1.0, 1.0], {})


def analyser(token_s: float | None = None) -> TrainedAnalyser:
    return TrainedAnalyser(forest(), {"app": graphs()}, token_s, 0.5)


def program(outputs: Sequence[int] = (30, 30, 300), name: str = "p", deadline: float = 40.0) -> Program:
    stages = (
        ProgramStage((ProgramCall(50, outputs[0]), ProgramCall(50, outputs[1])), 1.0),
        ProgramStage((ProgramCall(200, outputs[2]),)),
    )
    return Program(name, 0.0, "compound", stages, Targets(deadline, deadline, deadline, PATIENT_S), "app")


def told(outputs: Sequence[int]) -> list[object]:
    """All that an engine is told of the first stage."""
    driver = Programs([program(outputs)], Trained(analyser()), stage_deadlines="share_of_rest")
    return [
        (
            found.estimate.length.upper(0), found.estimate.length.lower(0), found.estimate.goodput, found.estimate.due,
            found.estimate.latest, found.estimate.likely_latest, found.estimate.later_output,
            found.estimate.later_prompt, found.targets,
        )
        for demand in driver.first()
        for found in [driver.arrived(demand)]
    ]  # fmt: skip


def test_the_analyser_is_not_told_what_it_predicts() -> None:
    assert told((30, 30, 300)) == told((2000, 1, 7))


def test_stages_are_those_of_the_graph_that_begins_alike() -> None:
    trained = Trained(analyser())
    trained.begins(program(), 0, 0.0)
    assert trained.seconds(program(), Speeds()) == pytest.approx([4.0, 7.0], rel=0.05)
    later = trained.later(program(), 0)
    assert later == (pytest.approx(200, rel=0.04), pytest.approx(300, rel=0.04))
    assert trained.tokens(program()) == pytest.approx(2 * (50 + 30) + sum(later))
    for index, now in ((0, 3.0), (1, 8.0)):
        trained.ended(program(), f"p/0.{index}", 0.0, now, True)
    trained.begins(program(), 1, 9.0)
    assert trained.seconds(program(), Speeds()) == pytest.approx([4.0, 6.0], rel=0.05)  # its pause is over
    assert trained.later(program(), 1) == (0, 0)


def test_times_that_were_recorded_alone_follow_the_pace() -> None:
    trained = Trained(analyser(token_s=0.02))
    trained.begins(program(), 0, 0.0)
    assert trained.seconds(program(), Speeds(0.04)) == pytest.approx([8.0, 13.0], rel=0.05)  # the tool keeps its second


def test_a_program_like_no_graph_counts_as_in_its_last_stage() -> None:
    other = replace(program(), app="other")
    trained = Trained(analyser())
    driver = Programs([other], trained, stage_deadlines="share_of_rest")
    first, _ = (driver.arrived(demand) for demand in driver.first())
    assert first.estimate.due == first.estimate.latest == 40.0
    assert first.estimate.later_output == 0


def test_bounds_are_asked_again_every_fifty_tokens_as_by_gateways() -> None:
    trained = Trained(analyser())
    trained.begins(program(), 1, 0.0)
    bounds = trained.length("p/1.0", 300, program())
    foretold = trained.lengths.foretell(("app", "compound", MODEL), "p", 200, None)
    assert (bounds.lower(0), bounds.upper(0)) == foretold.bounds
    assert (bounds.lower(0), bounds.upper(49)) == foretold.bounds
    again = trained.lengths.bounds_again(MODEL, foretold, 250)
    assert (bounds.lower(250), bounds.upper(299)) == (again.lower, again.upper)
    assert bounds.upper(600) == 601  # beyond all that was trained on


def test_what_ended_teaches_and_is_forgotten_with_its_program() -> None:
    trained = Trained(analyser())
    driver = Programs([program()], trained)
    calls = driver.first()
    more = [next_ for call in calls for next_ in driver.ended(call, Outcome.OK, True, 0, 4.0)]
    assert trained.lengths.hits(MODEL).answers == 2
    driver.ended(more[0], Outcome.OK, True, 0, 12.0)
    assert trained._seen == trained._bounds == {}
    (recorded,) = trained.recorded["app"]
    assert [(call.began, call.ended, call.output_tokens) for call in recorded] == [
        (0.0, 4.0, 30), (0.0, 4.0, 30), (5.0, 12.0, 300),
    ]  # fmt: skip


@pytest.mark.parametrize(("outcome", "ends"), [(Outcome.OK, 41.0), (Outcome.EXPIRED, 12.0)])
def test_late_and_lost_programs_are_no_patterns(outcome: Outcome, ends: float) -> None:
    trained = Trained(analyser())
    driver = Programs([program()], trained)
    more = [next_ for call in driver.first() for next_ in driver.ended(call, Outcome.OK, True, 0, 4.0)]
    driver.ended(more[0], outcome, True, 0, ends)
    assert (trained.recorded, trained._seen, trained._bounds) == ({}, {}, {})


def test_each_prediction_is_exchanged_alone() -> None:
    own, asked = Trained(analyser()), program((30, 37, 300))
    own.begins(asked, 0, 0.0)
    length, graph, giving_up = (Exchanged(own, (part,)) for part in PARTS)
    bounds = [each.length("p/0.1", 37, asked) for each in (own, length, giving_up)]
    assert [bound.upper(0) for bound in bounds] == [bounds[0].upper(0), 37, bounds[0].upper(0)]
    assert [bound.lower(0) for bound in bounds] == [bounds[0].lower(0), bounds[0].lower(0), 37]
    truth = Oracle().seconds(asked, Speeds())
    assert graph.seconds(asked, Speeds()) == truth != own.seconds(asked, Speeds())
    assert graph.least(asked, Speeds()) == own.least(asked, Speeds())
    assert (giving_up.least(asked, Speeds()), giving_up.optimism) == (truth, 1.0)
    assert (graph.tokens(asked), length.tokens(asked)) == (asked.tokens, own.tokens(asked))
    with pytest.raises(ConfigError, match="unknown part 'luck'; valid: length, graph, giving_up"):
        Exchanged(own, ("luck",))


def test_with_all_exchanged_it_is_the_oracle() -> None:
    def played(foresight: Foresight) -> list[object]:
        times = [0.25 * number for number in range(40)]
        driver = Programs(ConcordMix().programs(times, 3), foresight)
        settings = SimulationSettings((replace(WIDE, batching="calm", batching_settings={"slots": 8}),), cutoff_s=60.0)
        result = Simulation(settings, build_dispatcher("round_robin"), [], programs=driver).run()
        return [(each.id, each.e2e_s, each.earned) for each in result.programs]

    assert played(Exchanged(Trained(analyser()), PARTS)) == played(Oracle()) != played(Trained(analyser()))
