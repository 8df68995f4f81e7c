"""bench-pd --deadlines: the score, the search for the rate, and the gateway that tells of no deadline."""

import math

import pytest

from api.openai import in_flight
from benchmarks.load.generator import LoadRun, RequestTiming
from benchmarks.pd.deadlines import (
    BATCHINGS,
    TASKS,
    WANTED,
    DeadlineScore,
    batching_options,
    deadline_score,
    figures,
    fleet_of,
    searched,
)
from benchmarks.servers import unaware_gateway
from controller.core.types import Request, Targets
from controller.dispatch.disaggregation.placements import Prefilled
from controller.policies.batching.options import build


def sample(task, e2e_s, outcome="ok"):
    return RequestTiming(task, 1.0, 100, 10, 1.0, 1.5, 1.0 + e2e_s, 10, outcome)


def test_an_answer_counts_if_it_ended_within_its_own_deadline():
    samples = [sample("question", 6.9), sample("question", 7.1), sample("report", 7.1), sample("report", 1.0, "failed")]
    found = deadline_score(LoadRun(samples, 0.2, 30.0))
    assert (found.attainment, found.by_kind) == (0.5, {"question": 0.5, "report": 0.5})
    assert (found.outcomes, found.largest_gap_s) == ({"ok": 3, "failed": 1}, 0.2)


def test_a_run_without_requests_and_a_task_without_deadline_have_no_score():
    with pytest.raises(ValueError, match="without requests"):
        deadline_score(LoadRun([], 0.0, 0.0))
    undated = TASKS[0].__class__("question", Targets(1.0, 1.0), TASKS[0].prompt, TASKS[0].output)
    with pytest.raises(ValueError, match="no deadline"):
        deadline_score(LoadRun([sample("question", 1.0)], 0.0, 1.0), [undated])


@pytest.mark.parametrize("knee", [2.0, 6.0, 9.0])
def test_the_search_finds_a_rate_at_which_the_unaware_miss_some(knee):
    rate, seen = searched(lambda rate: 1.0 / (1.0 + (rate / knee) ** 6))
    assert WANTED[0] <= seen[rate] <= WANTED[1]


def test_a_search_that_finds_none_says_which_came_nearest():
    rate, seen = searched(lambda rate: 1.0)
    assert len(seen) == 8
    assert seen[rate] == 1.0


def test_the_ratio_is_of_the_medians():
    def of(attainment):
        return DeadlineScore(attainment, {"question": attainment}, {"ok": 1}, 0.1)

    found = figures({"aware": [of(0.9), of(0.8), of(0.2)], "unaware": [of(0.5), of(0.4), of(0.9)]})
    assert found["deadline_attainment"] == {"aware": 0.8, "unaware": 0.5}
    assert (found["ratio"], found["outcomes"]["aware"]) == (1.6, {"ok": 3})
    assert figures({"aware": [of(0.9)], "unaware": [of(0.0)]})["ratio"] is None


@pytest.mark.parametrize("name", BATCHINGS)
def test_engines_have_a_batching_that_reads_deadlines(name):
    build(name, batching_options(name), "batching_options")
    assert fleet_of(["http://127.0.0.1:1"], name).started == {"batching": name}


REQUEST = Request(
    *("r", 10.0, Targets(1.0, 1.0, 6.0, 5.0), 100, 50), least_tokens=3, most_tokens=41, workflow="w", tenant="t"
)


@pytest.fixture
def forgetful(monkeypatch):
    """Replaces what the other gateway replaces in its process, and restores it."""
    monkeypatch.setattr(in_flight, "hints_of", in_flight.hints_of)
    monkeypatch.setattr(Prefilled, "deadline_pace_s", Prefilled.deadline_pace_s)
    return unaware_gateway.forget_deadlines


def test_the_unaware_gateway_tells_all_but_deadlines(forgetful):
    before = in_flight.hints_of(REQUEST, 11.0, 30.0)
    forgetful()
    assert (before.due_s, before.workflow_s, bool(before.workflow)) == (5.0, 19.0, True)
    told = in_flight.hints_of(REQUEST, 11.0, 30.0)
    assert told == before._replace(due_s=math.inf, workflow_s=math.inf, workflow="")
    left_out = {"due_in", "workflow_due_in", "workflow"}
    assert left_out <= before.fields(queued=True).keys()
    assert told.fields(queued=True) == {k: v for k, v in before.fields(queued=True).items() if k not in left_out}


def test_the_unaware_migrator_sees_no_deadline(forgetful):
    stage = Prefilled(REQUEST, 11.0)
    assert 0 < stage.deadline_pace_s("d", 11.0) < 1
    forgetful()
    assert stage.deadline_pace_s("d", 11.0) == math.inf
