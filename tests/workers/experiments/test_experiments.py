"""Experiments carried out: to their result, resumed after a worker died, cancelled, out of time, wrong."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.utils import timezone

from controller.models import Decision, Experiment
from controller.selectors.experiments import results as selectors
from controller.services.experiments import runs as steps
from controller.services.experiments.commands import experiment_cancel, experiment_remove, preview_create
from tests import experiment_data as data
from workers.experiments import preview_sample
from workers.experiments import runner as worker
from workers.live import LiveUnavailable

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def said(monkeypatch):
    """What browsers would have been told."""
    heard = []
    monkeypatch.setattr(worker, "send_experiment", heard.append)
    return heard


@pytest.fixture
def talkative(monkeypatch):
    """A word at every step, however quick the runs are."""
    monkeypatch.setattr(worker, "SAY_EVERY_S", 0.0)


def fresh(row):
    return Experiment.objects.get(pk=row.pk)


def abandon(row):
    """Its worker died: nobody renews the lease."""
    Experiment.objects.filter(pk=row.pk).update(lease_until=timezone.now() - timedelta(seconds=1))


def test_one_is_claimed_run_and_compared(said):
    row = data.experiment(seeds=[1, 2], rates=[10, 40])
    assert worker.next_experiment()
    row = fresh(row)
    assert (row.state, row.progress, row.lease_token, row.error) == ("done", 1.0, "", "")
    assert [run.report is not None for run in selectors.runs(row)] == [True] * 8
    entries = row.result["entries"]
    assert [(each["policy"], each["rate"], each["instances"]) for each in entries] == [
        ("slackline", 10, 2), ("round_robin", 10, 2), ("slackline", 40, 2), ("round_robin", 40, 2),
    ]  # fmt: skip
    one = entries[0]["first_seed"]
    assert one["requests"] == 40
    assert len(one["distribution"]["ttft_s"]) == 101
    assert one["by_class"]["wikisql"]["targets"] == {"ttft_s": 20.0, "tpot_s": 1.0}
    assert said[-1] == {"slug": row.slug, "state": "done", "progress": 1.0, "step": ""}
    assert not worker.next_experiment()
    lines = list(selectors.table(row))
    assert len(lines) == 4 * (1 + 4)
    assert {len(line) for line in lines} == {len(selectors.HEADER)}


def test_the_result_is_the_simulators_own():
    from controller.simulator.experiment import parse_experiment
    from controller.simulator.runner import compare

    row = data.experiment(seeds=[3])
    worker.next_experiment()
    own = compare(parse_experiment(data.spec(seeds=[3]), None, None))
    for mine, theirs in zip(fresh(row).result["entries"], own["entries"], strict=True):
        for name in ("policy", "attainment", "ttft_p95_s", "goodput_tokens_per_s", "cost"):
            assert mine[name] == theirs[name], name


def test_weights_of_a_scale_out_take_the_links_of_the_experiment():
    """15 GB from the only instance that can have been up: 1.5 s alone, 5 s over 3 GB/s."""
    elastic = {"max_instances": 2, "upper": 0.1, "lower": 0.0, "weights_gb": 15.0, "load_s": {"device": 1.5}}
    took = []
    for bandwidth in (50.0, 3.0):
        row = data.experiment(
            instances=[{**data.INSTANCES[0], "count": 1}],
            policies=["slackline"],
            workload={**data.MIX, "rate": 4.0},
            settings={"elastic": elastic, "links": {"bandwidth_gb_s": bandwidth}},
        )
        worker.next_experiment()
        took.append(fresh(row).result["entries"][0]["first_seed"]["time_to_scale_s"])
    assert took == pytest.approx([1.5, 5.0])


def test_a_knee_is_found_once_and_kept():
    row = data.experiment(workload={**data.MIX, "per_task": 40}, knee={"policy": "round_robin", "times": [1.0]})
    worker.next_experiment()
    row = fresh(row)
    assert row.knee > 1
    assert row.result["entries"][0]["rate"] == row.knee


def test_the_search_for_a_knee_ends_before_memory_does():
    forever = {"kind": "mix", "mix": "4-task", "duration_s": 80_000, "rate": 1.0}
    row = data.experiment(workload=forever, knee={"policy": "round_robin", "times": [1.0]})
    worker.next_experiment()
    assert (fresh(row).state, fresh(row).error_field) == ("failed", "workload")
    assert "about 640,000 requests per run" in fresh(row).error


def test_finished_runs_are_not_run_again_after_the_worker_died(monkeypatch):
    from controller.simulator import runner

    row = data.experiment(seeds=[1, 2])
    ran, real = [], runner.run_once

    def dying(one, contender, rate, seed, progress):
        if len(ran) == 2:
            raise KeyboardInterrupt  # as little of the worker runs on as after kill -9
        ran.append((contender.label, seed))
        return real(one, contender, rate, seed, progress)

    monkeypatch.setattr(runner, "run_once", dying)
    with pytest.raises(KeyboardInterrupt):
        worker.next_experiment()
    assert fresh(row).state == "running"
    assert not worker.next_experiment(), "while the lease lasts it is not taken over"
    abandon(row)
    ran.clear()
    monkeypatch.setattr(runner, "run_once", lambda *a: (ran.append((a[1].label, a[3])), real(*a))[1])
    assert worker.next_experiment()
    assert (fresh(row).state, fresh(row).attempts) == ("done", 2)
    assert ran == [("slackline", 2), ("round_robin", 2)]


def test_a_worker_that_wakes_after_its_lease_changes_nothing():
    row = data.experiment()
    _, late = steps.experiment_claim()
    abandon(row)
    _, now = steps.experiment_claim()
    with pytest.raises(steps.LeaseLost):
        steps.experiment_progress(lease=late, progress=0.9, step="", spent_s=1)
    with pytest.raises(steps.LeaseLost):
        steps.experiment_fail(lease=late, error="too late")
    steps.experiment_progress(lease=now, progress=0.1, step="mine", spent_s=1)
    assert fresh(row).step == "mine"


def test_an_experiment_whose_worker_dies_each_time_is_given_up():
    row = data.experiment()
    for _ in range(steps.ATTEMPTS_MAX):
        assert steps.experiment_claim() is not None
        abandon(row)
    assert steps.experiment_claim() is None
    assert fresh(row).state == "failed"
    assert "failed 5 times" in fresh(row).error


@pytest.mark.parametrize("what", [experiment_cancel, experiment_remove])
def test_a_cancelled_or_removed_one_stops_at_its_next_word(what, monkeypatch, talkative):
    row = data.experiment()
    real = steps.experiment_progress

    def then_cancel(**told):
        if told["step"] != "Reading the traffic" and Experiment.objects.filter(pk=row.pk, state="running").exists():
            what(actor=data.OLGA, slug=row.slug)
        real(**told)

    monkeypatch.setattr(steps, "experiment_progress", then_cancel)
    assert worker.next_experiment()
    left = Experiment.objects.filter(pk=row.pk).first()
    assert left is None or (left.state, left.result) == ("cancelled", None)
    assert Decision.objects.filter(subject=row.slug, kind__in=["experiment_cancelled", "experiment_removed"]).exists()


def test_progress_is_said_twice_a_second_at_most(monkeypatch, said):
    row = data.experiment()
    now = [0.0]
    job = worker.ExperimentJob(*steps.experiment_claim(), clock=lambda: now[0])
    for tick in range(100):
        now[0] = 100 + tick * 0.1
        job._progress("x", tick, 100)
    assert len(said) == pytest.approx(20, abs=1)
    assert fresh(row).state == "running"


def test_time_is_bounded_over_all_attempts():
    row = data.experiment()
    Experiment.objects.filter(pk=row.pk).update(spent_s=worker.LONGEST_S + 1)
    worker.next_experiment()
    row = fresh(row)
    assert row.state == "failed"
    assert "longer than 900 s" in row.error


def test_a_spec_gone_wrong_says_its_field():
    row = data.experiment()
    Experiment.objects.filter(pk=row.pk).update(spec={**row.spec, "settings": {"cutoff_s": -1}})
    worker.next_experiment()
    assert (fresh(row).state, fresh(row).error_field) == ("failed", "settings.cutoff_s")


def test_without_redis_it_runs_as_well(monkeypatch):
    def away(message):
        raise LiveUnavailable("Redis is unavailable")

    monkeypatch.setattr(worker, "send_experiment", away)
    row = data.experiment()
    worker.next_experiment()
    assert fresh(row).state == "done"


def window(**fields):
    now = timezone.now()
    since, until = now - timedelta(hours=1), now
    return {"kind": "window", "since": since.isoformat(), "until": until.isoformat(), "model": "demo", **fields}


def test_recorded_traffic_is_replayed_with_its_own_targets_and_times():
    data.fleet()
    data.traffic(60, every_s=0.5, outcome=lambda number: "refused" if number < 3 else "ok",
                 output_tokens=lambda number: 0 if number < 3 else 20)  # fmt: skip
    today = {"fleet": "today", "model": "demo"}
    row = data.experiment(
        instances=today,
        workload=window(),
        policies=[{"name": "slackline", "label": "now"},
                  {"name": "slackline", "label": "one less", "instances": {**today, "change": -1}}],
    )  # fmt: skip
    assert [group["count"] for group in row.spec["instances"]] == [2]
    worker.next_experiment()
    row = fresh(row)
    assert row.error == ""
    now, less = row.result["entries"]
    assert (now["instances"], less["instances"]) == (2, 1)
    assert now["first_seed"]["requests"] == 60
    assert now["first_seed"]["by_class"]["interactive"]["targets"] == {"ttft_s": 1.0, "tpot_s": 0.1}
    assert now["first_seed"]["seconds"] == pytest.approx(30, abs=3)
    assert less["cost"] < now["cost"]
    assert "3 of 60 requests were never answered" in row.notes[0]


def test_a_preview_goes_between_two_words_of_an_experiment(monkeypatch, talkative):
    row = data.experiment(seeds=[1, 2])
    asked = []
    real = steps.experiment_progress

    def then_ask(**told):
        if not asked and told["step"].startswith("slackline"):
            asked.append(preview_create(actor=data.OLGA, name="edit", spec=data.spec(), notes=[]))
        real(**told)

    monkeypatch.setattr(steps, "experiment_progress", then_ask)
    assert worker.next_experiment()
    assert fresh(row).state == "done"
    assert fresh(asked[0]).state == "done"
    assert fresh(asked[0]).ended_at < fresh(row).ended_at


@pytest.mark.parametrize(("slowed_s", "state"), [(30.0, "done"), (120.0, "failed")])
def test_a_preview_that_becomes_slow_after_its_first_run_still_ends(monkeypatch, slowed_s, state):
    """The number of requests is planned for ten seconds; other load of the machine may begin after that."""
    data.fleet()
    data.traffic(30, every_s=0.1, output_tokens=4)
    spec = {
        "instances": data.INSTANCES, "seeds": [1], "policies": [{"name": "slackline", "label": "before"},
                                                                {"name": "slackline", "label": "after"}],
        "workload": {**window(), "newest": 10_000, "sources": True},
    }  # fmt: skip
    row = preview_create(actor=data.OLGA, name="edit", spec=spec, notes=[])
    now = [0.0]
    finish = steps.run_finish

    def finish_late(**told):
        finish(**told)
        now[0] += slowed_s

    monkeypatch.setattr(steps, "run_finish", finish_late)
    job = worker.ExperimentJob(*steps.experiment_claim(), clock=lambda: now[0])
    if state == "done":
        job.carry_out()
        assert fresh(row).state == "done"
    else:
        with pytest.raises(worker.OutOfTime, match="longer than 90 s: 1 of 2 runs finished"):
            job.carry_out()


def test_a_preview_takes_as_many_of_the_newest_as_there_is_time_for(monkeypatch):
    data.fleet()
    data.traffic(700, every_s=0.02, output_tokens=4)
    spec = {
        "instances": data.INSTANCES, "seeds": [1], "policies": ["slackline"],
        "workload": {**window(), "newest": 10_000, "sources": True},
    }  # fmt: skip
    row = preview_create(actor=data.OLGA, name="edit", spec=spec, notes=[])
    monkeypatch.setattr(preview_sample, "RUN_SHARE", 0.0)  # no time at all: the smallest sample
    worker.next_experiment()
    row = fresh(row)
    assert row.error == ""
    assert row.result["entries"][0]["first_seed"]["requests"] == preview_sample.PROBE
    sample = row.result["sample"]
    assert (sample["requests"], sample["of"]) == (preview_sample.PROBE, 700)
    assert sample["until"] - sample["since"] == pytest.approx((preview_sample.PROBE - 1) * 0.02, abs=1e-3)
