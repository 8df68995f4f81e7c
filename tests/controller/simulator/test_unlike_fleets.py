"""Fleets that are unlike the demo's, through simulated engines: mixed devices, no profile, a wrong profile."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.bench_prune import plan, run
from controller.core import events as ev
from controller.core.types import LatencyCoefficients, Targets
from controller.dispatch import build_dispatcher, build_migrator
from controller.predict.latency import LatencyModel
from controller.scale import ScalingConfig
from controller.simulator import Demand, InstanceSettings, LinkSettings, Simulation, SimulationSettings
from controller.simulator.mapping import around
from controller.simulator.report.summary import attainment
from controller.simulator.settings import ElasticSettings
from tests.controller.simulator.runs import facts, simulate

A100 = LatencyCoefficients(0.0066, 5.54e-5, 1.52e-9, 0.0115, 8.2e-8, 3.66e-5)  # Llama-3.1-8B
QUICK = InstanceSettings(A100, max_num_seqs=64)
SLOW = replace(QUICK, latency=LatencyCoefficients(*(4 * each for each in A100)))
REFUSED = "refused"
LEVELS = around([(0.3, 0.2)] * 4)


def steady(count, every_s, prompt, output, targets):
    return [Demand(f"r{i}", i * every_s, prompt, output, targets, "c", max_tokens=output) for i in range(count)]


def refused(result):
    return [record.id for record in result.records if record.outcome == REFUSED]


def attained(result, targets):
    kept = [
        record.outcome == "ok" and record.ttft_s <= targets.ttft_s and record.tpot_s <= targets.tpot_s
        for record in result.records
    ]
    return sum(kept) / len(kept)


@pytest.mark.parametrize("instances", [(SLOW, QUICK), (QUICK, SLOW)], ids=["slow first", "quick first"])
def test_what_the_quicker_instance_can_keep_is_not_refused(instances):
    """4,000 tokens take 0.25 s on one and 1 s on the other."""
    targets = Targets(0.6, 0.1, None, 10.0)
    result = simulate(steady(60, 0.5, 4000, 20, targets), instances=instances)
    assert refused(result) == []
    assert {record.instance for record in result.records} == {f"engine-{instances.index(QUICK)}"}
    assert attained(result, targets) == 1.0


def test_a_request_waits_for_the_instance_that_can_keep_its_target():
    """The slow one is idle, and would answer it too late."""
    targets = Targets(0.6, 0.1, None, 10.0)
    result = simulate(steady(30, 0.3, 4000, 4, targets), instances=(SLOW, QUICK))
    assert attained(result, targets) >= 0.95


@pytest.mark.parametrize(
    ("prompt", "output", "targets"),
    [(200, 30, Targets(5.0, 0.015, None, 10.0)), (8000, 4, Targets(1.0, 0.2, None, 10.0))],
    ids=["target_tbt", "target_ttft"],
)
def test_an_instance_that_no_one_profiled_refuses_nothing_on_a_guess(prompt, output, targets):
    """Guessed are 20 ms a decode step and 0.2 ms a prompt token: both targets would be impossible."""
    instance = replace(QUICK, profiled=False, max_model_len=16_384)
    result = simulate(steady(200, 1.5, prompt, output, targets), instances=(instance,))
    assert refused(result) == []
    assert attained(result, targets) >= 0.95


@pytest.mark.parametrize("factor", [0.25, 4.0])
def test_a_profile_that_is_four_times_wrong_is_learned_within_200_requests(factor):
    """What an instance could keep is not refused on the way, and hardly more is missed than with the right profile."""
    wrong = replace(QUICK, believed=LatencyCoefficients(*(factor * each for each in A100)))
    rng = np.random.default_rng(5)
    targets = Targets(0.4, 0.05, None, 10.0)
    at = np.cumsum(rng.exponential(0.2, 300))
    demands = [
        Demand(f"r{i}", float(at[i]), int(rng.integers(200, 3000)), 40, targets, "c", max_tokens=40) for i in range(300)
    ]
    result = simulate(demands, instances=(wrong,))
    assert refused(result) == []
    records, truth = (
        sorted(each.records, key=lambda record: int(record.id[1:]))
        for each in (result, simulate(demands, instances=(QUICK,)))
    )
    assert attained_of(records[200:], targets) >= attained_of(truth[200:], targets) - 0.02
    assert attained_of(records[:200], targets) >= attained_of(truth[:200], targets) - 0.05


def attained_of(records, targets):
    return sum(r.outcome == "ok" and r.ttft_s <= targets.ttft_s and r.tpot_s <= targets.tpot_s for r in records) / len(
        records
    )


def test_a_prefill_instance_learns_from_the_prefills_that_end_there():
    wrong = replace(QUICK, role="prefill", believed=LatencyCoefficients(*(4 * each for each in A100)))
    decode = replace(QUICK, role="decode", max_num_seqs=256)
    targets = Targets(1.0, 0.1, None, 10.0)
    demands = steady(200, 0.2, 1500, 10, targets)
    dispatcher = build_dispatcher("slackline")
    settings = SimulationSettings((wrong, decode), links=LinkSettings())
    result = Simulation(settings, dispatcher, demands, migrator=build_migrator("slackline")).run()
    assert refused(result) == []
    learned = dispatcher.learned()["engine-0"]
    predicted = learned.prefill_a + learned.prefill_b * 1500 + learned.prefill_c * 1500**2
    truth = A100.prefill_a + A100.prefill_b * 1500 + A100.prefill_c * 1500**2
    assert predicted == pytest.approx(truth, rel=0.15)


@pytest.mark.parametrize(
    ("output", "targets"),
    [(30, Targets(2.0, 0.015, None, 10.0)), (200, Targets(20.0, 20.0, 4.0, 10.0))],
    ids=["target_tbt", "deadline"],
)
def test_what_is_decoded_elsewhere_is_judged_by_the_steps_there(output, targets):
    """A step takes 12 ms at the decode instance; it would take ten times as long where prompts are prefilled."""
    slow_steps = A100._replace(**{name: 10 * getattr(A100, name) for name in ("decode_a", "decode_b", "decode_c")})
    prefill, decode = replace(QUICK, role="prefill", latency=slow_steps), replace(QUICK, role="decode")
    result = simulate(steady(30, 0.5, 400, output, targets), instances=(prefill, decode))
    assert refused(result) == []
    assert all(record.attained for record in result.records)


def test_prompts_that_end_in_one_batch_are_learned_as_one_batch():
    """Short and long prompts share batches that are longer than the least interval to learn from."""
    prefill, decode = replace(QUICK, role="prefill"), replace(QUICK, role="decode", max_num_seqs=256)
    rng = np.random.default_rng(11)
    at, prompts = np.cumsum(rng.exponential(1 / 25, 600)), rng.choice([30, 60, 300, 1000], 600)
    targets = Targets(1.0, 0.2, None, 10.0)
    demands = [
        Demand(f"r{i}", float(at[i]), int(prompts[i]), 10, targets, "c", max_tokens=10) for i in range(len(prompts))
    ]
    dispatcher = build_dispatcher("slackline")
    settings = SimulationSettings((prefill, decode), links=LinkSettings())
    Simulation(settings, dispatcher, demands, migrator=build_migrator("slackline")).run()
    learned, truth = (LatencyModel(each) for each in (dispatcher.learned()["engine-0"], A100))
    for tokens in (60, 300, 1000, 2000):
        assert learned.prefill([tokens]) == pytest.approx(truth.prefill([tokens]), rel=0.15)


@pytest.mark.parametrize("gateways", [2, 4])
def test_a_gateway_learns_the_engines_latency_among_requests_of_others(gateways):
    """A step carries the sequences of all gateways; each sees the tokens of its own alone."""
    targets = Targets(5.0, 0.2, None, 10.0)
    wide = replace(QUICK, believed=LatencyCoefficients(*(2 * each for each in A100)))
    rng = np.random.default_rng(7)
    at = np.cumsum(rng.exponential(1 / 16, 800))
    demands = [Demand(f"r{i}", float(at[i]), 300, 200, targets, "c", max_tokens=200) for i in range(800)]
    settings = SimulationSettings((wide,), gateways=gateways)
    simulation = Simulation(settings, build_dispatcher("slackline"), demands)
    simulation.run()
    truth = A100.decode_a + A100.decode_b * 50 * 400 + A100.decode_c * 50
    for scheduler in simulation.scheduler.schedulers:
        learned = scheduler.dispatcher.learned()["engine-0"]
        predicted = learned.decode_a + learned.decode_b * 50 * 400 + learned.decode_c * 50
        assert predicted == pytest.approx(truth, rel=0.15)


@pytest.mark.parametrize("gateways", [1, 2, 4])
def test_an_instance_that_computes_all_the_time_is_full_whatever_its_slots(gateways):
    """A prefill takes 93 ms, and one comes every 96 ms: of 128 slots one is in use."""
    prefill, decode = replace(QUICK, role="prefill", max_num_seqs=128), replace(QUICK, role="decode", max_num_seqs=256)
    demands = steady(400, 0.096, 1500, 2, Targets(2.0, 0.2, None, 10.0))
    settings = SimulationSettings((prefill, decode), gateways=gateways)
    simulation = Simulation(settings, build_dispatcher("slackline"), demands)
    simulation.run()
    (seen,) = (s for s in simulation.scheduler.fleet(simulation.heap.now) if s.role == "prefill")
    assert seen.utilisation > 0.85


@pytest.mark.parametrize("role", ["collocated", "prefill"])
def test_no_busy_instance_is_drained(role):
    """Two instances, each computing for two thirds of its time with almost all of its slots free."""
    instance = replace(QUICK, max_num_seqs=256, role=role)
    instances = (instance, instance) + ((replace(QUICK, role="decode", max_num_seqs=512),) if role == "prefill" else ())
    rng = np.random.default_rng(3)
    targets = Targets(1.0, 0.2, None, 10.0)
    demands = [
        Demand(f"r{i}", float(at), 1500, 4, targets, "c", max_tokens=4)
        for i, at in enumerate(np.cumsum(rng.exponential(0.07, 1500)))
    ]
    stage = ScalingConfig("model", role=role, min_instances=1, max_instances=2)
    decode = ScalingConfig("model", role="decode", min_instances=1, max_instances=1) if role == "prefill" else None
    result = simulate(demands, instances=instances, elastic=ElasticSettings(stage, decode=decode))
    early = [d for d in result.decisions if d.kind in ("scale_in", "role_change") and d.at < demands[-1].at]
    assert early == []
    assert attained(result, targets) > 0.9


@pytest.mark.parametrize("gateways", [2, 4])
def test_gateways_count_what_the_others_have_prefilled(gateways):
    """Two prefill instances that compute for 0.4 of their time each: too much for one of them. A gateway knows the
    prompts of others by their tokens alone, and none of them waits when it looks; the fleet was scaled in after 15 s,
    and out again when requests had to wait."""
    prefill, decode = replace(QUICK, role="prefill", max_num_seqs=256), replace(QUICK, role="decode", max_num_seqs=512)
    at = np.cumsum(np.random.default_rng(3).exponential(0.022, 1200))
    demands = [
        Demand(f"r{i}", float(t), 200, 4, Targets(0.4, 0.2, None, 10.0), "c", max_tokens=4) for i, t in enumerate(at)
    ]
    stage = ScalingConfig("model", role="prefill", min_instances=1, max_instances=2)
    elastic = ElasticSettings(stage, decode=ScalingConfig("model", role="decode", min_instances=2, max_instances=2))
    result = simulate(demands, instances=(prefill, prefill, decode, decode), elastic=elastic, gateways=gateways)
    kinds = [d.kind for d in result.decisions if d.at < demands[-1].at]
    assert not {"scale_in", "scale_out", "role_change"}.intersection(kinds)
    assert [each.busy_s / at[-1] for each in result.instances[:2]] == pytest.approx([0.4, 0.4], abs=0.05)
    assert all(record.attained for record in result.records)


@pytest.mark.parametrize(("first", "rate"), [("slow", 0.6), ("quick", 0.9), ("quick", 1.2), ("slow", 1.2)])
def test_the_quick_one_of_two_is_not_scaled_in_where_the_other_could_not_do_its_work(first, rate):
    """It does most of the work and is idle again soon, so it had the least to do; then the slow one was overloaded, and
    the quick one came back, and went."""
    instances = (SLOW, QUICK) if first == "slow" else (QUICK, SLOW)
    targets, rng = Targets(5.0, 0.5, None, 20.0), np.random.default_rng(3)
    at = np.cumsum(rng.exponential(1 / rate, int(150 * rate)))
    demands = [Demand(f"r{i}", float(t), 4000, 8, targets, "c", max_tokens=8) for i, t in enumerate(at)]
    scaling = ElasticSettings(ScalingConfig("model", min_instances=1, max_instances=2), sleep_level=1, wake_s=1.0)
    result = simulate(demands, instances=instances, elastic=scaling)
    changes = [(d.kind, d.figures["instance"]) for d in result.decisions if d.kind in ("scale_in", "scale_out")]
    assert changes == [("scale_in", f"engine-{instances.index(SLOW)}")]
    assert all(record.attained for record in result.records)


@pytest.mark.parametrize(("prompt", "turns"), [(1500, False), (60, True)], ids=["busy", "idle"])
def test_no_busy_prefill_instance_is_turned_into_a_decoder(prompt, turns):
    """Decode has too few slots all the time. Of 256 slots, prefill has two in use: one instance could hold them, and
    could compute the short prompts, not the long ones."""
    prefill, decode = replace(QUICK, role="prefill", max_num_seqs=256), replace(QUICK, role="decode", max_num_seqs=16)
    at, targets = np.cumsum(np.random.default_rng(3).exponential(0.07, 350)), Targets(1.0, 0.2, None, 20.0)
    demands = [Demand(f"r{i}", float(t), prompt, 100, targets, "c", max_tokens=100) for i, t in enumerate(at)]
    stage = ScalingConfig("model", role="prefill", min_instances=1, max_instances=2, lower=0.01)
    elastic = ElasticSettings(stage, decode=replace(stage, role="decode"), most=3)
    result = simulate(demands, instances=(prefill, prefill, decode), elastic=elastic)
    kinds = [(d.kind, d.reason) for d in result.decisions if d.at < demands[-1].at]
    assert ("scale_hold" if not turns else "scale_out") in {kind for kind, _ in kinds}, "decode wants an instance"
    assert any(kind == "role_change" for kind, _ in kinds) is turns
    assert attained(result, targets) == 1.0


def test_late_requests_are_served_by_priority_level():
    """One engine, overloaded for a moment: of what is late already, level 0 goes first, however long its prompts."""
    targets = Targets(0.3, 0.2, None, 60.0)
    demands = [
        Demand(f"r{i}", 0.0, 3000 if i % 2 else 500, 10, targets, "c", priority=0 if i % 2 else 3, max_tokens=10)
        for i in range(40)
    ]
    result = simulate(demands, instances=(QUICK,), mapping=LEVELS)
    late = [r for r in result.records if r.outcome == "ok" and r.queue_s > 1.0]
    order = sorted(late, key=lambda r: r.queue_s)
    assert len(order) > 20
    levels = [0 if int(r.id[1:]) % 2 else 3 for r in order]
    assert levels == sorted(levels)


def test_the_chance_of_a_first_token_in_time_is_what_was_measured():
    """0.1 s between gateway and engine, which no profile contains: the chance in the decision is the share
    that comes in time, and less is sent that comes late."""
    targets, rng = Targets(0.4, 0.2, None, 60.0), np.random.default_rng(3)
    at = np.cumsum(rng.exponential(1 / 8, 400))
    demands = [
        Demand(f"r{i}", float(at[i]), int(rng.integers(200, 3000)), 20, targets, "c", max_tokens=20) for i in range(400)
    ]
    kept = {}
    for measured in (False, True):
        dispatcher = build_dispatcher("slackline", {"admission": {"measured": measured}})
        chances = chances_of(dispatcher)
        result = Simulation(SimulationSettings((QUICK,), network_s=0.1), dispatcher, demands).run()
        met = {record.id: bool(record.ttft_met) for record in result.records}
        likely = [met[name] for name, chance in chances.items() if chance > 0.9]
        kept[measured] = np.mean(list(met.values())), np.mean(likely)
        assert refused(result) == []
    assert kept[False][1] < 0.7
    assert kept[True][1] > 0.9
    assert kept[True][0] > kept[False][0] + 0.05


def chances_of(dispatcher):
    """By request, the chance that its decision to send it names; filled while the dispatcher runs."""
    chances, handle = {}, dispatcher.handle

    def noted(events, now):
        reply = handle(events, now)
        sent = [
            action
            for action in reply.actions
            if isinstance(action, ev.Send) and action.decision.reason == "fits_budget"
        ]
        chances.update({action.request.id: action.decision.figures["probability"] for action in sent})
        return reply

    dispatcher.handle = noted
    return chances


def test_a_higher_priority_level_does_not_lose_to_lower_ones_under_overload():
    """All levels have the same targets. A request of level 0 takes two and a half times the work of the others, and was
    deferred before all of them."""
    rng, targets = np.random.default_rng(11), Targets(0.5, 0.1, None, 60.0)
    at = np.cumsum(rng.exponential(1 / 40, 400))
    demands = [
        Demand(f"r{i}", float(at[i]), 400 if level else 1000, 30, targets, "c", priority=level, max_tokens=30)
        for i, level in enumerate(int(each) for each in rng.integers(0, 4, 400))
    ]
    result = simulate(demands, instances=(QUICK,), mapping=around([(0.5, 0.1)] * 4, 0.0))
    levels = {demand.id: demand.priority for demand in demands}
    shares = [
        np.mean([record.attained is True for record in result.records if levels[record.id] == level])
        for level in range(4)
    ]
    assert 0.3 < np.mean(shares) < 0.9
    assert shares[0] > shares[2]
    assert shares[1:] == sorted(shares[1:], reverse=True)


def test_prefixes_that_an_instance_has_cached_are_not_charged():
    """Of 1,600 prompt tokens 1,024 are shared; the telemetry tells how many were found, not for which class."""
    prefix = tuple(f"agents/{block}" for block in range(64))
    targets, rng = Targets(2.0, 0.2, None, 60.0), np.random.default_rng(17)
    demands = [
        Demand(f"r{i}", i * 0.1, 1600, 10, targets, "agents", prefix=prefix, max_tokens=10)
        if rng.random() < 0.5
        else Demand(f"r{i}", i * 0.1, 400, 10, targets, "chat", max_tokens=10)
        for i in range(400)
    ]
    settings = SimulationSettings((replace(QUICK, prefix_caching=True),))
    simulation = Simulation(settings, build_dispatcher("slackline"), demands)
    simulation.run()
    (instance,) = simulation.scheduler.dispatcher._fleet.instances.values()
    requests = {demand.slo_class: demand.request("", targets, 10, None) for demand in demands}
    assert instance.uncached(requests["agents"])[0] == pytest.approx(576, rel=0.15)
    assert instance.uncached(requests["chat"])[0] == pytest.approx(400, rel=0.15)


@pytest.mark.parametrize("cold", [0, 1], ids=["cold first", "cold second"])
def test_a_prefix_that_one_instance_has_cached_keeps_what_would_be_late_at_the_other(cold):
    """Two of one speed, as measured, of which one has a prefix cache. 4,000 prompt tokens take 0.23 s; 3,200 of them
    are shared, and the other 800 take 0.05 s. The last ten requests are allowed 0.12 s."""
    linear = LatencyCoefficients(0.0066, 5.54e-5, 0.0, 0.0115, 8.2e-8, 3.66e-5)
    without, having = (replace(QUICK, latency=linear, prefix_caching=caches) for caches in (False, True))
    loose, rng = Targets(2.0, 0.2, None, 60.0), np.random.default_rng(2)
    tight, prefix = loose._replace(ttft_s=0.12), tuple(f"agents/{block}" for block in range(200))
    demands = [Demand(f"c{i}", i * 0.2, int(rng.integers(50, 400)), 1, loose, "chat", max_tokens=1) for i in range(60)]
    for i in range(24):
        targets = loose if i < 14 else tight
        demands.append(Demand(f"a{i}", 13.0 + i * 0.7, 4000, 1, targets, "agents", prefix=prefix, max_tokens=1))
    result = simulate(demands, instances=(without, having) if cold == 0 else (having, without))
    assert refused(result) == []
    last = [record for record in result.records if record.targets == tight]
    assert {record.instance for record in last} == {f"engine-{1 - cold}"}
    assert all(record.attained for record in last)


@pytest.mark.parametrize("gateways", [2, 4])
def test_several_gateways_do_not_fill_a_prefill_instance_each_as_if_alone(gateways):
    """Nothing decodes there, so that no gateway sees what the others sent except by late first tokens."""
    shared, alone = (
        [*run(plan(count, 5.0, (1000,), None, "disaggregated"), "slackline", 65.0)] for count in (gateways, 1)
    )
    assert attainment(shared[0].records) >= attainment(alone[0].records) - 0.02


WINDOWS = {
    "pacing": {"name": "fixed_window", "window": 8},
    "admission": {"name": "admit_all"},
    "routing": {"name": "least_outstanding"},
    "dispatch": {"refuse_infeasible": False},
}


def dated(count, every_s):
    """Answers of 200 tokens within 20 s for one in two, the others of 20 tokens within a minute: alone they take 2.3 s
    on the quick instance and 9.3 s on the slow one."""
    targets = (Targets(20.0, 20.0, 5.0, 60.0), Targets(20.0, 20.0, 60.0, 60.0))
    return [
        Demand(f"r{i}", i * every_s, 400, (200, 20)[i % 2], targets[i % 2], "c", max_tokens=200) for i in range(count)
    ]


def test_calm_keeps_what_one_instance_alone_can_keep_for_it():
    """The simulator runs the dispatcher that gateways run; in turn, half of the tight ones would go to the slow one."""
    slots = tuple(replace(each, max_num_seqs=8) for each in (SLOW, QUICK))
    met = {}
    for name in ("calm", "earliest_deadline_first", "feasible_deadlines"):
        overrides = {**WINDOWS, "ordering": {"name": name}}
        result = simulate(dated(200, 0.25), instances=slots, overrides=overrides, know_output=True)
        tight = [record for record in result.records if record.targets.deadline_s == 5.0]
        met[name] = sum(record.outcome == "ok" and record.e2e_s <= 5.0 for record in tight) / len(tight)
        assert len(result.records) == 200
    assert met["calm"] > 1.2 * max(met["earliest_deadline_first"], met["feasible_deadlines"]), met


def test_calm_decides_the_same_again():
    overrides = {**WINDOWS, "ordering": {"name": "calm"}}
    runs = [facts(simulate(dated(80, 0.2), instances=(SLOW, QUICK), overrides=overrides)) for _ in range(2)]
    assert runs[0] == runs[1]


def crowd():
    """One tenant sends four times as many requests, worth three times as much for their time, beyond what can be
    served; alone, each of the other tenant's is in time."""
    targets = Targets(10.0, 10.0, 10.0, 30.0)
    theirs = [Demand(f"g{i}", i * 0.125, 400, 30, targets, "c", tenant="greedy", max_tokens=30) for i in range(240)]
    mine = [Demand(f"o{i}", i * 0.5, 400, 100, targets, "c", tenant="other", max_tokens=100) for i in range(60)]
    return sorted(mine + theirs, key=lambda demand: demand.at)


@pytest.mark.parametrize(("weight", "least", "most"), [(0.0, 0.0, 0.5), (0.5, 0.9, 1.0)])
def test_a_tenant_of_most_worth_leaves_the_others_their_goodput(weight, least, most):
    window = {"pacing": {"name": "fixed_window", "window": 4}}
    overrides = {**WINDOWS, **window, "ordering": {"name": "calm", "fair_weight": weight}}
    result = simulate(crowd(), instances=(replace(QUICK, max_num_seqs=4),), overrides=overrides, know_output=True)
    kept = sum(record.goodput_tokens for record in result.records if record.tenant == "other") / (60 * 500)
    assert least <= kept <= most
