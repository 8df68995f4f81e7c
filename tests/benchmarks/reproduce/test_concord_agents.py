"""Recorded agents in place of Concord's compound requests."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from benchmarks.reproduce.__main__ import main
from benchmarks.reproduce.concord import agents, section
from benchmarks.reproduce.concord import training as lessons
from benchmarks.reproduce.concord.chance import CHANCE
from benchmarks.reproduce.concord.lab import ORACLE, TRAINED, Case, analyser_of
from benchmarks.reproduce.concord.trained import exchanged
from controller.predict.pattern_graphs import Call
from controller.simulator.workloads.concord_mix import ConcordMix
from tests.benchmarks.reproduce.test_concord import earned

HEAD = "arrival_s,input_tokens,output_tokens,session,model,duration_s\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Sessions s0 to s3 of three calls: prompts that grow, and one that is shorter than the one before."""
    lines = [
        f"{at},{prompt},{output},s{number},m,{took}\n"
        for number in range(4)
        for at, prompt, output, took in (
            (0, 1000 + number, 50, 2),
            (7, 1250 + number, 60, 3),
            (60, 400 + number, 70, 1),
        )
    ]
    with gzip.open(tmp_path / f"{agents.TRACE}.csv.gz", "wt") as file:
        file.writelines([HEAD, *lines])
    return tmp_path


def test_a_session_is_a_program_of_what_each_call_added(folder: Path) -> None:
    _, asked = agents.halves(folder)
    found = asked.programs([0.5 * number for number in range(60)], 1)
    assert found == asked.programs([0.5 * number for number in range(60)], 1)
    usual = ConcordMix().programs([0.5 * number for number in range(60)], 1)
    assert [each for each in found if each.single] == [each for each in usual if each.single]
    agent = next(each for each in found if not each.single)
    first, *later = (stage.calls for stage in agent.stages)
    assert (first[0].output_tokens, first[0].prompt_tokens in (1001, 1003)) == (50, True)
    assert later[0] == ((200, 60),)  # 1250 - (1000 + 50)
    assert later[1][0].prompt_tokens == first[0].prompt_tokens - 600  # another conversation: all of its prompt
    assert [stage.tool_s for stage in agent.stages] == [5.0, agents.LONGEST_TOOL_S, 0.0]
    assert agent.targets.deadline_s == pytest.approx(3 * 20.0 + 5.0 + agents.LONGEST_TOOL_S)


def test_what_is_trained_on_never_runs(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def prompts(mix: agents.AgentMix) -> set[int]:
        programs = mix.programs([0.0] * 200, 2)
        return {each.stages[0].calls[0].prompt_tokens for each in programs if not each.single}

    training, asked = agents.halves(folder)
    assert (prompts(training), prompts(asked)) == ({1000, 1002}, {1001, 1003})
    seen: list[agents.AgentMix] = []
    monkeypatch.setitem(analyser_of.__globals__, "analyser", lambda case: seen.append(case.mix))
    analyser_of(Case(1.0, 10, 1, mix=asked, trained_on=training))
    analyser_of(Case(1.0, 10, 1, mix=asked))
    assert seen == [training, asked]


def test_a_session_is_learned_from_once(folder: Path) -> None:
    training, _ = agents.halves(folder)
    drawn: set[lessons.Stages] = set()
    first, second = (lessons.training_programs(training, seed, drawn) for seed in (901, 902))
    assert sum(not each.single for each in first) == 2  # of the half
    assert len(first) > 500
    assert all(each.single for each in second)
    usual = lessons.training_programs(ConcordMix(), 901, set())
    assert usual == lessons.programs(ConcordMix(), 901)
    begun = [[Call(1, at, at + 1.0, 10, 20)] for at in (3.0, 1.0)]
    other = [Call(1, 2.0, 9.0, 10, 21)]
    assert lessons.distinct([begun[0], other, begun[1]]) == [begun[0], other]


def test_the_gap_of_agents_has_our_bar(folder: Path) -> None:
    grid = {TRAINED.name: {1.5: earned(80.0)[0]}, ORACLE.name: {1.5: earned(100.0)[0]}}
    grid |= {system.name: {1.5: earned(90.0)[0]} for system in exchanged(TRAINED).values()}
    grid |= {name: {1.5: earned(85.0)[0]} for name in (each.name for each in agents.OTHERS)}
    grid[CHANCE.name] = {1.5: earned(95.0)[0]}
    gap, blind, untold, *_, changed = agents.claims(grid)
    assert (gap.ours, gap.reached, gap.theirs, gap.analyser) == (20.0, False, None, "trained")
    assert gap.reason.startswith("10.0 % with the oracle's upper bound")
    assert blind.reached is False
    assert blind.reason.startswith("this ablation is told how many calls")
    assert untold.reason.startswith("below the oracle 10.0 %")
    assert (changed.ours, changed.reached, changed.verdict) == (1.118, True, "changed")


def test_agents_need_their_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="part agents needs --traces"):
        section.reproduce(lambda line: None, True, ("agents",))
    with pytest.raises(FileNotFoundError):
        agents.halves(tmp_path)
    for more in (["--part", "agents"], ["--part", "trained", "--traces", str(tmp_path)]):
        with pytest.raises(SystemExit):
            main(["--paper", "concord", *more])
        assert "--part agents of Concord needs --traces" in capsys.readouterr().err
