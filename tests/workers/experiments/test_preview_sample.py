"""How many requests a preview takes: guessed by a probe, corrected by its first run, the same for all its runs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controller.core.types import Targets
from controller.services.experiments.reading import Origin, RecordedReplay
from controller.simulator.experiment import parse_experiment
from controller.simulator.workloads.demand import Demand
from tests import experiment_data as data
from workers.experiments import preview_sample
from workers.experiments.preview_sample import PROBE, PreviewSample, WrongSize

BEGAN = 1_000.0


def simulated(count):
    demands = tuple(
        Demand(f"w{n}", 0.1 * n, 50, 4, Targets(1.0, 0.1), slo_class="batch" if n % 2 else "interactive")
        for n in range(count)
    )
    origins = tuple(Origin(n < 3, None if n == count - 1 else n % 4 == 0) for n in range(count))
    spec = {**data.spec(), "policies": ["slackline"]}
    one = replace(parse_experiment(spec, None, None), workload=RecordedReplay(demands, origins, BEGAN))
    return [one, one]


class Machine:
    """Seconds pass where it is told so; a probe takes `probe_s`."""

    def __init__(self, monkeypatch, probe_s=0.0):
        self.now = 0.0
        monkeypatch.setattr("controller.simulator.runner.run_once", lambda *a: self.passes(probe_s))

    def passes(self, seconds):
        self.now += seconds

    def sample(self, count, of=0):
        return PreviewSample(simulated(count), lambda: self.now, lambda: self.now, of)


def test_the_faster_of_two_probes_tells_how_many_fit(monkeypatch):
    machine = Machine(monkeypatch, probe_s=0.4)  # 2 ms a request, 4 ms in both runs
    sample = machine.sample(9000)
    sample.guess()
    assert sample.requests == pytest.approx((8.0 - 3 * 0.4) / 0.004, abs=2)
    assert all(len(each.workload.requests) == sample.requests for each in sample.simulated)
    assert sample.simulated[0].workload.requests[-1].id == "w8999", "the newest"


def test_a_first_run_slower_than_the_probe_is_started_over_with_fewer(monkeypatch):
    machine = Machine(monkeypatch)
    sample = machine.sample(5000)
    sample.guess()
    assert sample.requests == 5000
    sample.begin()
    machine.passes(0.7)
    with pytest.raises(WrongSize):
        sample.look(500, 5000)  # 7 s for a run, 14 s for both
    assert sample.requests == pytest.approx(5000 * 0.9 * 7.3 / 14.0, abs=2)


def test_what_ends_in_time_is_left_alone(monkeypatch):
    machine = Machine(monkeypatch)
    sample = machine.sample(5000)
    sample.begin()
    machine.passes(0.4)
    sample.look(500, 5000)
    machine.passes(3.5)
    sample.ended()
    assert sample.requests == 5000


def test_a_guess_far_too_low_is_made_good_once(monkeypatch):
    machine = Machine(monkeypatch, probe_s=1.0)
    sample = machine.sample(5000)
    sample.guess()
    few = sample.requests
    assert few == 500
    sample.begin()
    machine.passes(0.1)
    with pytest.raises(WrongSize):
        sample.ended()
    assert sample.requests == 5000
    sample.begin()
    machine.passes(0.2)
    sample.ended()


def test_no_time_at_all_leaves_the_smallest_sample_which_is_never_made_smaller(monkeypatch):
    machine = Machine(monkeypatch, probe_s=5.0)
    sample = machine.sample(5000)
    sample.guess()
    assert sample.requests == PROBE
    sample.begin()
    machine.passes(60.0)
    sample.look(100, PROBE)
    sample.ended()


def test_it_says_what_was_sampled_and_what_is_on_record_of_it(monkeypatch):
    sample = Machine(monkeypatch, probe_s=60.0).sample(1000, of=23_000)
    sample.guess()
    told = sample.as_json()
    assert (told["requests"], told["of"]) == (PROBE, 23_000)
    assert (told["since"], told["until"]) == (pytest.approx(BEGAN + 80.0), pytest.approx(BEGAN + 99.9))
    assert told["by_class"] == {"batch": 0.0, "interactive": 0.5}
    assert told["attained"] == pytest.approx(50 / 199), "one was given up"
    assert sample.simulated[0].workload.estimated == 0, "those were among the older ones"
    assert preview_sample.newest(sample.simulated[0], PROBE).workload is sample.simulated[0].workload
