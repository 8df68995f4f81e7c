"""No registered policy of any registry loses, duplicates or invents a request, in whatever policy set it is played."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.core.policy import ADMISSIONS, ORDERINGS, ROUTINGS
from controller.core.types import Outcome
from controller.dispatch import MIGRATIONS, POLICY_SETS, build_dispatcher, build_migrator
from controller.dispatch.pacing import PACINGS
from controller.policies.batching import BATCHINGS
from controller.policies.preemption import PREEMPTIONS
from controller.simulator import Failure, LinkFailure, LinkSettings, Simulation, SimulationSettings
from tests.contracts.test_policies import ALL
from tests.contracts.turbulence import Turbulence
from tests.controller.engine.driver import Driver
from tests.controller.engine.test_scheduler_properties import arrivals, each_ended_once, play
from tests.controller.simulator.runs import SMALL, some_demands

DISPATCHED = {"ordering": ORDERINGS, "admission": ADMISSIONS, "routing": ROUTINGS, "pacing": PACINGS}
BASES = ("slackline", "edf_window")  # one that holds back and judges, one that does neither
PLAYED = {*DISPATCHED, "migration", "batching", "preemption"}
SETS = [pytest.param(name, {}, id=name) for name in POLICY_SETS]
PARTS = [
    pytest.param(base, {part: {"name": name}}, id=f"{part}-{name}-in-{base}")
    for part, registry in DISPATCHED.items()
    for name in registry
    for base in BASES
]
callers = st.lists(
    st.fixed_dictionaries(
        {
            "at": st.floats(0, 20),
            "ttft": st.sampled_from([0.1, 0.7, 2.0, 20.0]),
            "tpot": st.sampled_from([0.05, 0.5, 1.0]),
            "prompt": st.integers(1, 3000),
            "output": st.integers(1, 100),
            "wait": st.sampled_from([0.5, 5.0, 60.0]),
            "workflow": st.sampled_from(["", "flow-1", "flow-2"]),
        }
    ),
    max_size=30,
)


def test_every_registry_is_played_here():
    assert set(ALL) == PLAYED


def _nothing_is_kept(played):
    assert set(played.ended) == set(played.asked)
    assert not played.running
    assert len(played.dispatcher.queue()) == 0
    for seen in played.dispatcher.fleet(played.now):
        assert (seen.running, seen.waiting, seen.waiting_tokens) == (0, 0, 0)


@pytest.mark.parametrize(("policy", "overrides"), SETS + PARTS)
@given(
    some=callers,
    hang_ups=st.lists(st.tuples(st.integers(0, 29), st.floats(0, 5)), max_size=4),
    failures=st.lists(st.tuples(st.integers(0, 1), st.floats(0, 20), st.floats(0.5, 5)), max_size=2),
)
@pytest.mark.sampled(20)
@settings(max_examples=20, deadline=None)
def test_each_request_ends_once_whatever_breaks(policy, overrides, some, hang_ups, failures):
    """Clients hang up, engines die with what they have and come back: turbulence.py checks every answer."""
    played = Turbulence(policy, overrides)
    for number, asked in enumerate(some):
        played.arrives(f"r{number}", **asked)
    for number, after in hang_ups:
        if number < len(some):
            played.hangs_up(f"r{number}", some[number]["at"] + after)
    for instance, at, for_s in failures:
        played.breaks(f"i{instance}", at, for_s)
    _nothing_is_kept(played.run())


@pytest.mark.parametrize(("policy", "overrides"), SETS + PARTS)
@given(some=callers)
@settings(max_examples=10, deadline=None)
def test_who_waits_is_served_and_not_forgotten(policy, overrides, some):
    """Of patient clients of targets that can be met none is left in the queue of engines that have nothing to do."""
    chosen = {"name": POLICY_SETS[policy].admission, **overrides.get("admission", {})}
    if chosen["name"] == "scorpio_ttft_guard":
        chosen["refuse"] = False
    played = Turbulence(policy, {**overrides, "dispatch": {"refuse_infeasible": False}, "admission": chosen})
    for number, asked in enumerate(some):
        played.arrives(f"r{number}", **{**asked, "wait": 3600.0})
    _nothing_is_kept(played.run())
    assert set(played.ended.values()) <= {"finished"}


@pytest.mark.parametrize("placement", list(MIGRATIONS))
@given(
    seed=st.integers(0, 999),
    rate=st.sampled_from([10.0, 60.0]),
    failures=st.lists(st.tuples(st.integers(0, 3), st.floats(0, 3)), max_size=2),
    broken=st.lists(st.tuples(st.integers(0, 3), st.floats(0, 3)), max_size=2),
)
@settings(max_examples=8, deadline=None)
def test_each_prefilled_request_is_decoded_once_or_told_why_not(placement, seed, rate, failures, broken):
    """Instances die for a second, links break: an answer has all its tokens, in order, or is counted as lost."""
    demands = some_demands(40, rate=rate, seed=seed)
    stages = [replace(SMALL, role=role) for role in ("prefill", "prefill", "decode", "decode")]
    chosen = SimulationSettings(
        tuple(stages),
        failures=tuple(Failure(instance, at, 1.0) for instance, at in failures),
        links=LinkSettings(failures=tuple(LinkFailure(instance, at, 0.5) for instance, at in broken)),
        cutoff_s=300.0,
    )
    migrator = build_migrator("slackline", {"migration": {"name": placement}})
    simulation = Simulation(chosen, build_dispatcher("slackline"), demands, migrator=migrator, keep_token_times=True)
    records = simulation.run().records
    assert sorted(record.id for record in records) == sorted(each.id for each in demands)
    wanted = {each.id: each.output_tokens for each in demands}
    for record in records:
        times = list(record.token_times or ())
        assert len(times) == record.output_tokens <= wanted[record.id]
        assert times == sorted(times)
        assert all(math.isfinite(at) for at in times)
        if record.outcome is Outcome.OK:
            assert record.output_tokens == wanted[record.id]
    if not failures and not broken:
        assert {record.outcome for record in records} <= {Outcome.OK, Outcome.REFUSED}


scripts = st.lists(arrivals, min_size=1, max_size=14)
TIGHT = {"max_model_len": 44, "max_num_seqs": 4}


@pytest.mark.parametrize("batching", list(BATCHINGS))
@given(script=scripts, kv_blocks=st.integers(11, 24), budget=st.integers(4, 20))
@settings(max_examples=25, deadline=None)
def test_each_sequence_of_an_engine_ends_once_with_its_own_tokens(batching, script, kv_blocks, budget):
    driver = Driver(batching, kv_blocks=kv_blocks, max_num_batched_tokens=budget, **TIGHT)
    seqs, aborts = play(driver, script)
    driver.run()
    each_ended_once(driver, seqs, aborts)


@pytest.mark.parametrize("rule", list(PREEMPTIONS))
@given(script=scripts, kv_blocks=st.integers(11, 24), slots=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_who_gives_way_is_not_lost(rule, script, kv_blocks, slots):
    """CALM, which asks such a rule, with fewer slots than sequences and a frame of one step: it asks all the time."""
    calm = BATCHINGS["calm"]
    policy = calm(calm.Config(slots=slots, frame_steps=1))
    policy.preemption = PREEMPTIONS[rule]()
    driver = Driver(policy, kv_blocks=kv_blocks, **TIGHT)
    seqs, aborts = play(driver, script)
    driver.run()
    each_ended_once(driver, seqs, aborts)
