"""Programs of calls: stages released in turn, deadlines amortised, goodput all or nothing (worked examples C1, C6)."""

import math
from dataclasses import replace

import numpy as np
import pytest

from controller.core.errors import ConfigError
from controller.core.types import Outcome, Targets
from controller.dispatch import build_dispatcher
from controller.simulator import Simulation, SimulationSettings
from controller.simulator.report.summary import report
from controller.simulator.workloads.concord_mix import KINDS, ConcordMix
from controller.simulator.workloads.foresight import Blind, BlindToStages, Noisy, Oracle
from controller.simulator.workloads.mixes import PATIENT_S
from controller.simulator.workloads.programs import Program, ProgramCall, Programs, ProgramStage, Speeds
from controller.simulator.workloads.stage_pace import StagePace
from controller.slo.stage_deadlines import STAGE_DEADLINES, accumulated_shares, stage_due
from tests.controller.simulator.runs import SMALL, facts

WIDE = replace(SMALL, max_num_seqs=64, kv_tokens=65_536)
LONG = replace(WIDE, max_model_len=16_384)


def whole(deadline):
    return Targets(deadline, deadline, deadline, PATIENT_S)


def program(name="p", at=0.0, stages=None, deadline=80.0):
    stages = stages or (
        ProgramStage((ProgramCall(20, 10), ProgramCall(30, 40)), 0.5),
        ProgramStage((ProgramCall(10, 5),)),
    )
    return Program(name, at, "compound", stages, whole(deadline))


def single(name, targets, prompt=93, output=318):
    return Program(name, 0.0, "single", (ProgramStage((ProgramCall(prompt, output),)),), targets)


def play(programs, foresight=None, instances=(WIDE,), keep=False, count="tokens", **settings):
    chosen = SimulationSettings(tuple(instances), **settings)
    driver = Programs(programs, foresight or Oracle(), Speeds(), count)
    simulation = Simulation(chosen, build_dispatcher("round_robin"), [], programs=driver, keep_token_times=keep)
    return simulation.run()


def test_c6_stage_deadlines_are_amortised_by_accumulated_share():
    shares = accumulated_shares([2, 3, 5])
    assert shares == pytest.approx([0.2, 0.5, 1.0])
    assert [20 * share for share in shares] == pytest.approx([4, 10, 20])


@pytest.mark.parametrize("rule", STAGE_DEADLINES)
def test_c6_on_the_patterns_own_times_the_rules_agree(rule):
    ends = [4.0, 10.0, 20.0]
    found = [stage_due(rule, [2.0, 3.0, 5.0], stage, 0.0, began, 20.0) for stage, began in enumerate([0.0, 4.0, 10.0])]
    assert found == pytest.approx(ends)


class Pattern(Oracle):
    def seconds(self, program, speeds):
        return [2.0, 3.0, 5.0]


@pytest.mark.parametrize(
    ("rule", "second"), [("accumulated", 10.0), ("own_share", 12.0), ("share_of_rest", 11.25)], ids=STAGE_DEADLINES
)
def test_c6_a_late_stage_and_what_is_left_for_the_next(rule, second):
    """Stage 1 ends at 6 instead of 4: phi keeps 10 for the second stage, so 4 s are left of it."""
    calls = ProgramStage((ProgramCall(10, 10),))
    asked = [program(stages=(calls, calls, calls), deadline=20.0)]
    driver = Programs(asked, Pattern(), stage_deadlines=rule)
    (first,) = driver.first()
    assert first.estimate.due == pytest.approx(4.0)
    assert first.targets.deadline_s == pytest.approx(4.0)
    (next_,) = driver.ended(first, Outcome.OK, False, 0, 6.0)
    assert (next_.at, next_.estimate.due) == (6.0, pytest.approx(second))
    assert next_.targets.deadline_s == pytest.approx(second - 6.0)
    assert next_.estimate.latest == pytest.approx(20.0 - 5.0)  # what the stages to come need
    assert next_.estimate.likely_latest == next_.estimate.latest


@pytest.mark.parametrize("rule", STAGE_DEADLINES)
def test_no_stage_is_due_after_the_deadline(rule):
    assert stage_due(rule, [2.0, 3.0, 5.0], 2, 1.0, 19.0, 20.0) <= 21.0
    assert stage_due(rule, [2.0, 3.0, 0.0], 2, 1.0, 5.0, 20.0) <= 21.0


def test_stages_are_released_when_all_calls_and_the_tool_have_ended():
    result = play([program(at=1.0)], keep=True)
    by_stage = {record.id: record for record in result.records}
    ends = [by_stage[name].at + by_stage[name].e2e_s for name in ("p/0.0", "p/0.1")]
    assert by_stage["p/0.0"].at == by_stage["p/0.1"].at == 1.0
    assert by_stage["p/1.0"].at == pytest.approx(max(ends) + 0.5)
    (found,) = result.programs
    assert (found.stages, found.calls, found.tokens, found.attained, found.earned) == (2, 3, 115, True, 115)
    assert found.e2e_s == pytest.approx(by_stage["p/1.0"].at + by_stage["p/1.0"].e2e_s - 1.0)


def test_the_report_has_programs_by_kind():
    result = play([program(), single("s", whole(1e-3))])
    found = report(result)["programs"]
    assert (found["compound"]["programs"], found["compound"]["calls"], found["compound"]["attainment"]) == (1, 3, 1.0)
    assert found["compound"]["goodput"] == found["compound"]["tokens"] == 115
    assert (found["single"]["attainment"], found["single"]["goodput"], found["single"]["tokens"]) == (0.0, 0, 411)
    compound = next(each for each in result.programs if each.kind == "compound")
    assert found["compound"]["e2e_s"]["p50"] == compound.e2e_s


@pytest.mark.parametrize(("margin", "earned"), [(1e-6, 411), (-0.01, 0)])
def test_c1_a_deadline_earns_input_and_output_or_nothing(margin, earned):
    took = play([single("d", whole(1000.0))]).programs[0].e2e_s
    (found,) = play([single("d", whole(took + margin))]).programs
    assert (found.earned, found.attained) == (earned, earned > 0)


def test_c1_a_program_late_by_its_last_call_earns_nothing():
    took = play([program()]).programs[0].e2e_s
    assert play([program(deadline=took + 1e-6)]).programs[0].earned == 115
    assert play([program(deadline=took - 0.001)]).programs[0].earned == 0


def test_c1_a_paced_request_earns_its_tokens_one_by_one():
    paced = Targets(2.0, 0.1, None, PATIENT_S)
    (found,) = play([single("l", paced, output=50)]).programs
    assert (found.earned, found.attained) == (50, True)
    too_fast = Targets(2.0, 0.001, None, PATIENT_S)  # the first token's slack carries those after it for a while
    (found,) = play([single("l", too_fast, output=600)], instances=(LONG,)).programs
    assert 0 < found.earned < 600
    assert not found.attained


def test_calls_of_a_lost_program_are_not_continued():
    result = play(
        [program(), program("q", stages=(ProgramStage((ProgramCall(2000, 5),)), ProgramStage((ProgramCall(5, 5),))))]
    )
    lost = next(found for found in result.programs if found.id == "q")
    assert (lost.calls, lost.e2e_s, lost.attained, lost.earned) == (1, None, False, 0)
    assert [record.id for record in result.records if record.id.startswith("q")] == ["q/0.0"]


def test_what_is_open_at_the_cut_off_is_lost():
    result = play(
        [program(stages=(ProgramStage((ProgramCall(10, 5),), 50.0), ProgramStage((ProgramCall(10, 5),))))],
        cutoff_s=10.0,
    )
    (found,) = result.programs
    assert (found.calls, found.attained, found.e2e_s) == (1, False, None)


@pytest.mark.parametrize("batching", ["calm", "learned_rank", "least_attained_service", "earliest_deadline_first"])
def test_every_program_ends_once_and_leaps_change_nothing(batching):
    programs = ConcordMix().programs([0.3 * n for n in range(16)], 3)
    busy = replace(LONG, batching=batching, batching_settings={"slots": 4}, max_num_batched_tokens=256)
    runs = [play(programs, Noisy(), (busy,), keep=True, leaps=leaps, cutoff_s=60.0) for leaps in (True, False)]
    assert facts(runs[0]) == facts(runs[1])
    assert sorted(found.id for found in runs[0].programs) == sorted(each.id for each in programs)
    assert runs[0].programs == runs[1].programs
    assert any(found.attained for found in runs[0].programs)
    for found in runs[0].programs:
        assert 0 <= found.earned <= found.tokens


def test_the_mix_is_that_of_table_6_1():
    programs = ConcordMix().programs([0.0] * 6000, 1)
    kinds = {kind: [each for each in programs if each.kind == kind] for kind in KINDS}
    for kind in KINDS:
        assert len(kinds[kind]) == pytest.approx(2000, rel=0.1)
    outputs = [each.stages[0].calls[0].output_tokens for each in kinds["latency"]]
    assert sum(outputs) / len(outputs) == pytest.approx((318 + 534) / 2, rel=0.15)
    tokens = [each.tokens for each in kinds["compound"]]
    assert sum(tokens) / len(tokens) == pytest.approx((1300 + 4458 + 12223 + 3541) / 2, rel=0.1)
    assert all(each.targets.deadline_s == 20.0 * len(each.stages) for each in kinds["compound"])
    assert all(each.targets.deadline_s == 20.0 for each in kinds["deadline"])
    assert all(each.targets[:3] == (2.0, 0.1, None) for each in kinds["latency"])
    assert programs == ConcordMix().programs([0.0] * 6000, 1)


def test_slos_scale_and_shares_hold():
    programs = ConcordMix((1.0, 2.0, 0.0), 1.5).programs([0.0] * 300, 1)
    assert {each.kind for each in programs} == {"latency", "deadline"}
    assert {each.targets.deadline_s for each in programs} == {None, 30.0}


def test_the_oracle_is_exact_and_the_noise_model_errs_as_stated():
    names = [f"r{n}" for n in range(4000)]
    bounds = [Noisy(length_error=0.5).length(name, 400, program()) for name in names]
    assert sum(bound.upper(0) >= 400 for bound in bounds) / len(bounds) == pytest.approx(0.9, abs=0.02)
    assert sum(bound.lower(0) <= 400 for bound in bounds) / len(bounds) == pytest.approx(0.9, abs=0.02)
    spreads = [sum(bound.upper(at) - bound.lower(at) for bound in bounds) for at in (0, 200, 350)]
    assert spreads[0] > spreads[1] > spreads[2]  # refined: the bounds close in
    assert all(bound.upper(at) > at and bound.lower(at) > at for bound in bounds[:50] for at in (0, 399, 400, 900))
    exact = Noisy(length_error=0.0, graph_error=0.0)
    assert exact.length("a", 400, program()).upper(120) == Oracle().length("a", 400, program()).upper(120) == 400
    assert exact.seconds(program(), Speeds()) == Oracle().seconds(program(), Speeds())
    assert Blind(300, 4000.0).length("a", 5, program()).upper(0) == 300


def test_without_foresight_the_number_of_stages_is_known_only_if_it_is_told():
    told, untold = Blind(300, 4000.0), BlindToStages(300, 4000.0)
    three = program(stages=tuple(ProgramStage((ProgramCall(10, 5),)) for _ in range(3)))
    assert told.seconds(three, Speeds(0.01)) == [3.0, 3.0, 3.0]
    for stage, seconds in enumerate(([3.0], [0.0, 3.0], [0.0, 0.0, 3.0])):
        untold.begins(three, stage, 0.0)
        assert untold.seconds(three, Speeds(0.01)) == seconds
    assert untold.least(three, Speeds(0.01)) == [0.0, 0.0, 3.0]
    untold.closed(three)
    assert not untold._begun
    (call,) = Programs([three], BlindToStages(300, 4000.0), stage_deadlines="share_of_rest").first()
    assert call.estimate.due == call.estimate.likely_latest == call.estimate.latest == three.targets.deadline_s


def test_goodput_may_count_requests():
    tokens, requests = (Programs([program()], Oracle(), count=count).first()[0] for count in ("tokens", "requests"))
    assert (tokens.estimate.goodput, requests.estimate.goodput) == (115.0, 1.0)
    paced = Programs([single("l", Targets(2.0, 0.1, None, PATIENT_S), output=11)], Oracle(), count="requests")
    (demand,) = paced.first()
    assert not demand.estimate.each_token
    assert demand.estimate.latest == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: Program("p", 0.0, "k", (), whole(1.0)), "stages"),
        (lambda: program(stages=(ProgramStage(()),)), "stages"),
        (lambda: Program("p", 0.0, "k", program().stages, Targets(1.0, 1.0)), "deadline_s"),
        (lambda: Programs([program(), program()], Oracle()), "programs"),
        (lambda: Programs([program()], Oracle(), count="bytes"), "count"),
        (lambda: ConcordMix((0.0, 0.0, 0.0)), "shares"),
        (lambda: ConcordMix(slo_scale=0.0), "slo_scale"),
        (lambda: Noisy(length_error=math.inf), "length_error"),
        (lambda: accumulated_shares([0.0, 0.0]), "seconds"),
    ],
)
def test_bad_settings_are_refused(build, field):
    with pytest.raises(ConfigError) as caught:
        build()
    assert caught.value.field == field


# ---- how long stages take, learned ----------------------------------------------------------------------------------


def test_the_pace_is_a_decaying_mean_of_what_programs_took():
    pace = StagePace(start=2.0, weight=0.5)
    pace.observe(took_s=12.0, alone_s=3.0)
    assert pace.factor == pytest.approx(3.0)
    pace.observe(took_s=3.0, alone_s=3.0)
    assert pace.factor == pytest.approx(2.0)
    pace.observe(took_s=1.0, alone_s=0.0)  # nothing to compare with
    assert pace.factor == pytest.approx(2.0)


def test_the_lowest_pace_is_what_nine_of_ten_exceed():
    pace, rng = StagePace(weight=0.01), np.random.default_rng(3)
    assert 0 < pace.lowest < pace.start
    found = rng.normal(2.0, 0.3, 4000)
    for each in found:
        pace.observe(took_s=float(each), alone_s=1.0)
    assert sum(found > pace.lowest) / len(found) == pytest.approx(0.9, abs=0.05)
    for each in (0.01, 50.0) * 100:
        pace.observe(took_s=each, alone_s=1.0)
    assert pace.lowest == pytest.approx(pace.factor / 4)


@pytest.mark.parametrize(("bad", "field"), [({"start": 0.0}, "start"), ({"weight": 1.5}, "weight")])
def test_a_wrong_pace_is_refused(bad, field):
    with pytest.raises(ConfigError) as caught:
        StagePace(**bad)
    assert caught.value.field == field


def test_programs_in_time_teach_what_later_stages_need():
    """Tools are not stretched, late programs teach nothing, and a program that arrives later is seen by then."""
    calls, pace = ProgramStage((ProgramCall(0, 100),), tool_s=1.0), StagePace(start=1.0, weight=1.0)
    stages = (calls, ProgramStage((ProgramCall(0, 100),)))
    both = [program("a", stages=stages, deadline=40.0), program("b", 30.0, stages, deadline=10.0)]
    driver = Programs(both, Oracle(), Speeds(0.05, 0.0), pace=pace)
    first, other = driver.first()
    assert first.estimate.likely_latest == pytest.approx(40.0 - 5.0)
    assert first.estimate.likely_latest < first.estimate.latest < 40.0  # at best
    (second,) = driver.ended(first, Outcome.OK, True, 0, 9.0)
    assert second.at == 10.0
    driver.ended(second, Outcome.OK, True, 0, 21.0)
    assert pace.factor == pytest.approx((21.0 - 1.0) / 10.0)
    assert other.estimate.likely_latest == pytest.approx(40.0 - 5.0)
    seen = driver.arrived(other)
    assert (seen.id, seen.at, seen.prompt_tokens, seen.output_tokens) == (other.id, 30.0, 0, 100)
    assert seen.estimate.latest == pytest.approx(40.0 - 10.0)
    assert seen.estimate.due == pytest.approx(30.0 + 10.0 * 11.0 / 21.0)
    (last,) = driver.ended(seen, Outcome.OK, True, 0, 60.0)
    driver.ended(last, Outcome.OK, False, 0, 99.0)
    assert pace.factor == pytest.approx(2.0)


def test_a_run_tells_programs_when_their_calls_arrive():
    """Programs that wait for each other: the later ones are believed to need longer than the first."""
    seen = []

    class Watched(Programs):
        def arrived(self, demand):
            found = Programs.arrived(self, demand)
            seen.append(found.estimate.likely_latest - found.at)
            return found

    stages = (ProgramStage((ProgramCall(100, 50),)), ProgramStage((ProgramCall(100, 50),)))
    programs = [program(f"p{n:02}", 0.5 * n, stages, 60.0) for n in range(40)]
    driver = Watched(programs, Oracle(), Speeds(), pace=StagePace(start=0.01, weight=0.5))
    settings = SimulationSettings((replace(SMALL, max_num_seqs=1),))
    Simulation(settings, build_dispatcher("round_robin"), [], programs=driver).run()
    assert len(seen) == len(programs)
    assert seen[-1] < seen[0]


def test_a_stage_that_is_late_is_not_refused_for_it():
    """Its program may still end in time: only a single request's own deadline is its promise."""
    compound, alone = program(), single("s", whole(20.0))
    demands = Programs([compound, alone], Oracle()).first()
    assert [demand.may_defer for demand in demands] == [True, True, False]


def test_a_gateway_hears_how_long_a_program_has_and_not_only_its_stage():
    compound, alone = program(), single("s", whole(20.0))
    demands = Programs([compound, alone], Oracle()).first()
    whole_s = compound.targets.deadline_s
    assert [demand.workflow_left_s for demand in demands] == [whole_s, whole_s, None]
    assert demands[0].targets.deadline_s < whole_s
    told = demands[0].request("m", demands[0].targets, 10, None)
    assert told.workflow_left_s == whole_s
