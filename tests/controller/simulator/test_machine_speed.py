"""A machine that was measured to pause: when work ends, in runs, and what an experiment file may say of it."""

import random
from dataclasses import replace

import pytest

from controller.core.errors import ConfigError
from controller.simulator import SimulationSettings
from controller.simulator.experiment import parse_experiment
from controller.simulator.machine_speed import MachineSpeed
from controller.simulator.runner import run_once
from tests.controller.simulator.runs import SMALL, facts, simulate, some_demands

HALF_THEN_WHOLE = MachineSpeed(((0.5, 1.0),), period_s=1.0)


@pytest.mark.parametrize(
    ("at", "seconds", "ends"),
    [(0.0, 0.25, 0.5), (0.0, 0.5, 1.0), (0.0, 1.0, 1.5), (0.0, 1.5, 2.0), (0.0, 2.0, 3.0), (1.5, 1.0, 3.0), (7, 3, 11)],
)
def test_work_ends_when_the_speeds_have_added_up_to_it(at, seconds, ends):
    assert HALF_THEN_WHOLE.of(0).after(at, seconds) == pytest.approx(ends)


def test_a_standstill_is_waited_out_and_no_work_takes_no_time():
    clock = MachineSpeed(((1.0, 0.0, 0.0, 1.0),), 1.0).of(0)
    assert clock.after(0.5, 1.0) == pytest.approx(3.5)
    assert clock.after(1.5, 0.0) == 1.5


def test_work_done_in_parts_ends_when_it_ends_whole():
    rng = random.Random(3)
    clock = MachineSpeed((tuple(rng.choice((0.0, 0.1, 1.0, 1.7)) for _ in range(40)),), 0.5).drawn(7).of(0)
    at, parts = 3.3, [rng.uniform(0.0, 0.4) for _ in range(300)]
    for part in parts:
        later = clock.after(at, part)
        assert later >= at
        at = later
    assert at == pytest.approx(clock.after(3.3, sum(parts)))


def test_instances_have_series_of_their_own_and_begin_together():
    speed = MachineSpeed(((1.0, 2.0), (3.0, 4.0)), 1.0, begin_s=1.0)
    assert [speed.of(slot).after(0.0, 1.0) for slot in (0, 1, 2)] == pytest.approx([0.5, 0.25, 0.5])
    assert speed.drawn(1).begin_s == speed.drawn(1).begin_s != speed.drawn(2).begin_s


def test_at_an_even_speed_of_two_everything_takes_half_the_time():
    demands = some_demands(40, rate=1e6)
    plain = simulate(demands, "round_robin", (SMALL,))
    fast = simulate(demands, "round_robin", (SMALL,), machine_speed=MachineSpeed(((2.0,),)))
    begun = min(demand.at for demand in demands)
    assert fast.ended_at - begun == pytest.approx((plain.ended_at - begun) / 2, rel=1e-3)


def test_leaps_and_single_steps_are_the_same_run():
    rng = random.Random(4)
    speed = MachineSpeed((tuple(rng.choice((0.02, 0.5, 1.0, 1.5)) for _ in range(60)),), 0.25)
    runs = [
        simulate(some_demands(150, rate=20.0), "slackline", (SMALL, SMALL), machine_speed=speed, leaps=leaps)
        for leaps in (True, False)
    ]
    assert facts(runs[0]) == facts(runs[1])
    assert len(runs[0].records) == 150


def test_pauses_cost_attainment_that_their_mean_speed_does_not():
    pauses = MachineSpeed(((1.25,) * 8 + (0.0,) * 2,), 0.5)
    demands = some_demands(300, rate=12.0)
    even, paused = (
        sum(r.ttft_s for r in simulate(demands, "round_robin", (SMALL,), machine_speed=speed).records)
        for speed in (MachineSpeed(((1.0,),)), pauses)
    )
    assert paused > 1.5 * even


FILE = {
    "instances": {"profile": SMALL.latency._asdict()},
    "workload": {"kind": "mix", "mix": "4-task", "per_task": 5, "rate": 20.0},
    "settings": {"machine_speed": {"series": [[1.0, 0.2, 1.3], [0.9, 1.1]], "period_s": 0.25}},
}


def parsed(**speed):
    raw = {**FILE, "settings": {"machine_speed": {**FILE["settings"]["machine_speed"], **speed}}}
    return parse_experiment(raw, lambda path: {}, lambda path: [])


def test_a_file_names_the_series_and_a_seed_draws_the_moment():
    experiment = parsed()
    assert experiment.settings.machine_speed == MachineSpeed(((1.0, 0.2, 1.3), (0.9, 1.1)), 0.25)
    runs = [facts(run_once(experiment, experiment.contenders[0], 20.0, seed)) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"series": []}, "settings.machine_speed.series"),
        ({"series": [[1.0], []]}, "settings.machine_speed.series"),
        ({"series": [[0.0, 0.0]]}, "settings.machine_speed.series"),
        ({"series": [1.0]}, "settings.machine_speed.series[0]"),
        ({"series": [[-1.0]]}, "settings.machine_speed.series[0]"),
        ({"period_s": 0}, "settings.machine_speed.period_s"),
        ({"begin_s": 1}, "settings.machine_speed.begin_s"),
    ],
)
def test_bad_speeds_are_refused_by_name(change, field):
    with pytest.raises(ConfigError) as caught:
        parsed(**change)
    assert caught.value.field == field


def test_engines_that_suspend_their_steps_have_no_measured_speed():
    prefill = replace(SMALL, engine_kind="preemptive_prefill", batching="slo_aware_batching")
    with pytest.raises(ConfigError) as caught:
        SimulationSettings((prefill,), machine_speed=HALF_THEN_WHOLE)
    assert caught.value.field == "machine_speed"


def test_a_step_takes_longer_while_another_instance_runs_one():
    """Both get the same 20 prompts at once; one alone has no other to wait for."""
    demands = some_demands(40, rate=1e6)
    apart = simulate(demands, "round_robin", (SMALL, SMALL))
    beside = simulate(demands, "round_robin", (SMALL, SMALL), beside_s=0.05)
    steps = max(record.output_tokens for record in beside.records)
    assert beside.ended_at > apart.ended_at + 0.05 * steps * 0.9
    alone = simulate(demands, "round_robin", (SMALL,), beside_s=0.05)
    assert facts(alone) == facts(simulate(demands, "round_robin", (SMALL,)))


def test_time_beside_others_is_checked():
    with pytest.raises(ConfigError, match="beside_s must not be negative"):
        SimulationSettings((SMALL,), beside_s=-0.01)
