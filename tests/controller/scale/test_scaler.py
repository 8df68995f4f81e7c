"""The scaler against worked example H11 and at its edges. One tick a second unless a test says otherwise."""

import json
import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest

from controller.core.errors import ConfigError
from controller.scale import Drain, FleetObservation, Member, ScaleOut, Scaler, ScalerMemory, ScalingConfig, Undrain
from controller.scale.observation import InstanceRow, observe

NAN = float("nan")
CONFIG = ScalingConfig(model="mid", min_instances=1, max_instances=8, upper=0.8, lower=0.3, sustain_s=3, cooldown_s=0)


def fleet(load, *members, age_s=0.2):
    members = members or (Member("a", "ready", load), Member("b", "ready", load))
    return FleetObservation(members, age_s=age_s)


class Run:
    """Ticks a scaler and keeps what it did."""

    def __init__(self, config=CONFIG, state=None):
        self.config, self.state, self.now = config, state or ScalerMemory(), 1000.0
        self.decisions = []

    def tick(self, seen, seconds=1.0):
        self.now += seconds
        self.state, actions, decision = Scaler().decide(self.config, self.state, seen, self.now)
        if decision:
            self.decisions.append(decision)
        return actions

    def reasons(self):
        return [decision.reason for decision in self.decisions]


def short(actions):
    return "out" if any(isinstance(a, ScaleOut) for a in actions) else "in" if actions else "-"


def test_worked_example_h11():
    run = Run()
    done = [short(run.tick(fleet(load))) for load in (0.9, 0.5, 0.2, 0.2, 0.2, 0.6, 0.2, 0.2, 0.2, 0.2)]
    assert done == ["out", "-", "-", "-", "in", "-", "-", "-", "in", "-"]
    assert [d.kind for d in run.decisions] == ["scale_out", "scale_in", "scale_in"]


def test_beat_jitter_does_not_cost_a_tick():
    run = Run()
    assert [short(run.tick(fleet(0.2), s)) for s in (1.0, 0.98, 0.99)] == ["-", "-", "in"]


@pytest.mark.parametrize(("sustain_s", "cooldown_s"), [(5, 3), (3, 10), (15, 10)])
@pytest.mark.parametrize("seed", range(3))
def test_no_load_makes_it_change_direction_more_than_twice_in_a_hold_and_a_cool_down(sustain_s, cooldown_s, seed):
    """An hour of loads that jump between too much and too little, for as long as hurts most or at random."""
    config = replace(CONFIG, sustain_s=sustain_s, cooldown_s=cooldown_s, max_instances=4)
    rng, run, at = random.Random(seed), Run(config), []
    members, load, until = ["ready"] * 2, 0.9, 0.0
    while run.now < 4600:
        if run.now >= until:
            load = 0.05 if load > 0.5 else 2.0
            until = run.now + (rng.choice([1, 2, max(sustain_s, cooldown_s) + 1]) if seed else sustain_s + 1)
        seen = [Member(f"i{number}", state, load) for number, state in enumerate(members)]
        for action in run.tick(fleet(load, *seen)):
            at.append((run.now, isinstance(action, Drain)))
            members = (members[:-1] or members) if isinstance(action, Drain) else [*members, "ready"]
    changes = sum(one[1] != other[1] for one, other in pairwise(at))
    assert 100 < changes <= 2 * 3600 / max(sustain_s, cooldown_s)


def test_what_requests_need_goes_last_and_not_for_a_low_load():
    idle, busy = Member("a", "ready", 0.1, 0, needed=True), Member("b", "ready", 0.2, 2)
    run = Run()
    assert [run.tick(fleet(0.2, idle, busy)) for _ in range(3)] == [[], [], [Drain("b")]]
    run = Run()
    both = fleet(0.2, idle, replace(busy, needed=True))
    assert [run.tick(both) for _ in range(5)] == [[]] * 5
    assert run.reasons() == ["needed_for_targets"]
    run = Run(replace(CONFIG, max_instances=1))
    assert run.tick(both) == [Drain("a")]


def test_a_sleeper_that_requests_need_is_woken_whatever_the_load_is():
    wanted = replace(fleet(0.2), needed_asleep=True)
    run = Run(replace(CONFIG, cooldown_s=2.0))
    assert [run.tick(wanted) for _ in range(3)] == [[ScaleOut(1)], [], [ScaleOut(1)]]
    assert run.reasons() == ["needed_asleep"] * 2
    assert Run().tick(replace(wanted, members=(*wanted.members, Member("new", "starting")))) == [], "that may be it"
    assert Run(replace(CONFIG, max_instances=len(wanted.members))).tick(wanted) == []
    assert Run().tick(replace(wanted, age_s=60.0)) == [], "on stale telemetry nothing changes"


def test_it_keeps_an_instance_for_as_long_as_another_takes_to_start():
    slow, quick = replace(fleet(0.2), start_s=10.0), replace(fleet(0.2), start_s=2.0)
    run = Run()
    assert [short(run.tick(slow)) for _ in range(10)] == ["-"] * 9 + ["in"]
    assert run.decisions[-1].figures["start_s"] == 10.0
    run = Run()
    assert [short(run.tick(quick)) for _ in range(3)] == ["-", "-", "in"], "no less than sustain_s"


def test_thresholds_are_strict():
    run = Run()
    assert all(run.tick(fleet(load)) == [] for load in (0.8, 0.3, 0.3, 0.3, 0.3, 0.8))


def test_a_decision_carries_all_inputs():
    run = Run()
    run.tick(replace(fleet(0.9), queued=4, arrival_rate=3.0, processing_rate=2.0, wait_over_slo=0.5))
    [decision] = run.decisions
    assert decision.subject == "mid/collocated"
    assert decision.reason == "load_above_upper"
    wanted = {"load": 1.5, "utilisation": 0.9, "wait_over_slo": 0.5, "rate_ratio": 1.5, "queued": 4, "instances": 1}
    assert wanted.items() <= decision.figures.items()


def test_at_the_upper_bound_it_says_so_once_and_when_relieved():
    run = Run(replace(CONFIG, max_instances=2))
    for load in (0.9, 0.9, 0.5, 0.9, 0.5, 0.5, 0.5, 0.5):
        assert run.tick(fleet(load)) == []
    assert run.reasons() == ["at_max", "relieved"]


def test_cool_down_holds_the_next_instance_back():
    run = Run(replace(CONFIG, cooldown_s=5))
    assert [short(run.tick(fleet(0.9))) for _ in range(7)] == ["out", "-", "-", "-", "-", "out", "-"]
    assert run.reasons() == ["load_above_upper", "settling", "load_above_upper", "settling"]


def test_an_instance_that_still_starts_is_waited_for():
    run = Run()
    starting = fleet(0.9, Member("a", "ready", 0.9), Member("b", "starting"))
    assert run.tick(starting) == []
    assert run.reasons() == ["settling"]


def test_a_drain_is_taken_back_before_a_new_instance_is_started():
    run = Run(replace(CONFIG, cooldown_s=60), ScalerMemory(changed_at=999.0))
    seen = fleet(0, Member("a", "ready", 0.9), Member("b", "draining", 0.5, 3), Member("c", "draining", 0.1, 1))
    assert run.tick(seen) == [Undrain("b")]


def test_more_is_started_while_those_that_start_would_not_carry_the_load():
    """Two ready and n starting: a load of 1.3 is 0.87 over three and 0.65 over four; one of 9 is believed as 2."""

    def started(load, starting):
        members = (Member("a", "ready", load), Member("b", "ready", load))
        return Run().tick(fleet(load, *members, *(Member(f"s{n}", "starting") for n in range(starting)))) != []

    assert [started(1.3, n) for n in range(4)] == [True, True, False, False]
    assert [started(9.0, n) for n in range(5)] == [True, True, True, False, False]


def test_without_anything_ready_one_start_at_a_time():
    waiting = replace(fleet(0, Member("s", "starting")), wait_over_slo=9.0)
    assert Run().tick(waiting) == []


def test_the_instance_with_least_to_do_is_drained():
    run = Run(replace(CONFIG, sustain_s=0))
    seen = fleet(0, Member("a", "ready", 0.2, 4), Member("b", "ready", 0.1, 1), Member("c", "ready", 0.1, 2))
    assert run.tick(seen) == [Drain("b")]
    assert run.decisions[0].rejected == {"a": 4, "c": 2}


def test_one_drain_at_a_time():
    run = Run(replace(CONFIG, sustain_s=0))
    seen = fleet(0, Member("a", "ready"), Member("b", "ready"), Member("c", "draining"))
    assert run.tick(seen) == []
    assert run.reasons() == ["settling"]


def test_never_below_the_lower_bound_and_silent_there():
    run = Run(replace(CONFIG, min_instances=2))
    assert all(run.tick(fleet(0.0)) == [] for _ in range(10))
    assert run.decisions == []


def test_an_instance_the_rest_could_not_replace_is_kept():
    run = Run(replace(CONFIG, lower=0.5, sustain_s=0))
    assert run.tick(fleet(0.45)) == []  # the other one would carry 0.9
    assert run.reasons() == ["rest_would_exceed_upper"]


def test_the_rest_is_never_more_than_full_whatever_upper_tolerates():
    lax = replace(CONFIG, upper=2.0, lower=0.8, sustain_s=0)
    run = Run(lax)
    assert run.tick(fleet(0.55)) == []  # the other one would carry 1.1
    assert run.reasons() == ["rest_would_exceed_upper"]
    assert short(Run(lax).tick(fleet(0.45))) == "in"


def test_what_a_new_gateway_has_not_counted_yet_is_no_low_load():
    """A fleet that is half busy reads 0.09 after one second, and 0.32 after five."""
    run = Run(replace(CONFIG, lower=0.4, sustain_s=0))
    young = [replace(fleet(0.5 * (1 - math.exp(-s / 5))), counted_s=float(s)) for s in range(1, 31)]
    assert [run.tick(seen) for seen in young] == [[]] * 30
    idle = [replace(fleet(0.1 * (1 - math.exp(-s / 5))), counted_s=float(s)) for s in range(1, 4)]
    assert short(Run(replace(CONFIG, sustain_s=0)).tick(idle[0])) == "in"


def test_bounds_are_restored_whatever_the_load():
    run = Run(replace(CONFIG, min_instances=3, cooldown_s=100), ScalerMemory(changed_at=1000.0))
    assert run.tick(fleet(0.0)) == [ScaleOut(1)]
    above = Run(replace(CONFIG, max_instances=1))
    assert above.tick(fleet(0.9, Member("a", "ready", 0.9, 5), Member("b", "starting"))) == [Drain("b")]
    assert above.reasons() == ["above_max"]


@pytest.mark.parametrize("age_s", [None, 3.5])
def test_stale_telemetry_is_not_acted_on_and_recorded_once(age_s):
    run = Run(replace(CONFIG, min_instances=5))
    assert all(run.tick(fleet(0.99, age_s=age_s)) == [] for _ in range(5))
    assert run.reasons() == ["telemetry_stale"]


def test_one_missing_snapshot_does_not_restart_the_hold():
    run = Run()
    run.tick(fleet(0.2))
    assert run.tick(fleet(0.2, age_s=None)) == []
    assert run.tick(fleet(0.2)) == [Drain("a")]


def test_time_that_no_one_watched_does_not_count_as_low():
    run = Run()
    run.tick(fleet(0.2))
    assert run.tick(fleet(0.2), seconds=3600.0) == []  # the system was off for an hour
    assert [short(run.tick(fleet(0.2))) for _ in range(2)] == ["-", "in"]


def look(*rows, arrival_rate=0.0, service_rate=0.0, queued=0, wait_over_slo=0.0, utilisation=0.0):
    """What one gateway tells of these instances."""
    traffic = {"arrival_rate": arrival_rate, "service_rate": service_rate, "queued": queued}
    waits = {"wait_over_slo": wait_over_slo, "migrating": 0, "migrate_wait_over_slo": 0.0}
    told = [{"id": row.id, "utilisation": utilisation, "running": 0, "waiting": 0} for row in rows]
    message = {"at": 0.0, "period_s": 1.0, "instances": told, "models": {"mid": {**traffic, **waits}}}
    return observe(rows, [message], 0.0, "mid")


READY, DRAINING = InstanceRow("a", "running", "ready", False), InstanceRow("a", "draining", "ready", False)
STARTING = InstanceRow("a", "running", "pending", False)
TO_ZERO = replace(CONFIG, min_instances=0)


def test_arrivals_with_nothing_processed_scale_out():
    assert Run().tick(look(READY, arrival_rate=1.0, queued=3)) == [ScaleOut(1)]


def test_a_fleet_of_none_comes_back_with_the_first_arrival():
    run = Run(replace(TO_ZERO, cooldown_s=10))
    assert [short(run.tick(look(READY))) for _ in range(3)] == ["-", "-", "in"]
    assert [short(run.tick(look())) for _ in range(60)] == ["-"] * 60, "nobody asks"
    assert run.tick(look(arrival_rate=0.1)) == [ScaleOut(1)]
    assert run.tick(look(STARTING, arrival_rate=0.1, queued=1, wait_over_slo=9.0)) == [], "one is enough for now"
    assert run.reasons() == ["load_below_lower", "load_above_upper", "settling"]


def test_what_was_started_from_none_has_its_whole_hold_once_it_serves():
    """A start takes longer than the hold, and who asked is told to ask again."""
    run = Run(TO_ZERO)
    assert run.tick(look(arrival_rate=0.1)) == [ScaleOut(1)]
    assert [run.tick(look(STARTING)) for _ in range(20)] == [[]] * 20
    assert [short(run.tick(look(READY))) for _ in range(3)] == ["-", "-", "in"]


def test_the_last_one_is_taken_back_from_its_drain_when_somebody_asks():
    assert Run(TO_ZERO).tick(look(DRAINING)) == []
    assert Run(TO_ZERO).tick(look(DRAINING, arrival_rate=0.1)) == [Undrain("a")]


def test_the_last_one_stays_while_anybody_asks():
    """Without it the same arrivals would be overload: it would have to come back at once."""
    run = Run(TO_ZERO)
    seldom = look(READY, arrival_rate=0.1, service_rate=0.1, utilisation=0.02)
    assert [run.tick(seldom) for _ in range(10)] == [[]] * 10
    assert run.reasons() == ["rest_would_exceed_upper"]
    assert run.tick(look(READY)) == [Drain("a")]


def test_a_clock_set_back_stretches_no_cool_down():
    run = Run(replace(CONFIG, cooldown_s=5), ScalerMemory(changed_at=900_000.0))
    assert [short(run.tick(fleet(0.9))) for _ in range(7)].index("out") == 5


def test_state_survives_json():
    run = Run()
    run.tick(fleet(0.9))
    run.tick(fleet(0.2))
    assert ScalerMemory.from_json(json.loads(json.dumps(run.state.to_json()))) == run.state


def test_a_state_of_an_older_version_is_readable():
    assert ScalerMemory.from_json({"ticks": 4, "no_longer_there": 1}) == ScalerMemory(ticks=4)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_instances", 0),
        ("lower", 0.9),
        ("upper", NAN),
        ("sustain_s", -1),
        ("interval_s", 0),
        ("model", ""),
    ],
)
def test_a_wrong_policy_names_its_field(field, value):
    with pytest.raises(ConfigError) as error:
        replace(CONFIG, **{field: value})
    assert error.value.field == field


def test_without_a_pattern_nothing_can_be_started():
    run = Run()
    assert run.tick(replace(fleet(0.9), startable=False)) == []
    assert run.tick(replace(fleet(0.9), startable=False, held_by="no_device")) == []
    assert run.reasons() == ["nothing_to_start", "no_device"]


def test_endpoints_of_somebody_else_are_never_drained():
    run = Run(replace(CONFIG, sustain_s=0))
    mixed = fleet(0, Member("theirs", "ready", 0.0, 0, fixed=True), Member("ours", "ready", 0.1, 1))
    assert run.tick(mixed) == [Drain("ours")]
    theirs = fleet(0, Member("a", "ready", fixed=True), Member("b", "ready", fixed=True))
    assert run.tick(theirs) == []
    assert Run(replace(CONFIG, max_instances=1)).tick(theirs) == []
