"""Every registered policy keeps its contract: those of controller.core.policy, and the protocols beside the registries.

Batchings have a file of their own, and so have the kinds of engine.
"""

import copy
import importlib
import pkgutil
import sys
from dataclasses import is_dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import controller.dispatch
import controller.engine
import controller.policies
import controller.predict
import controller.scale
import controller.slo
from controller.core import events as ev
from controller.core.errors import ConfigError
from controller.core.policy import ADMISSIONS, ORDERINGS, ROUTINGS, Cost
from controller.core.registry import Registry
from controller.core.types import InstanceSpec, LatencyCoefficients, Request, Role, Targets
from controller.dispatch import MIGRATIONS, POLICY_SETS, build_dispatcher, build_migrator
from controller.dispatch.disaggregation.placements import Prefilled
from controller.dispatch.pacing import PACINGS, RecentDemand
from controller.dispatch.shadow_state import ShadowInstance
from controller.policies.batching import BATCHINGS
from controller.policies.preemption import PREEMPTIONS, SequenceStanding

REQUESTS = [Request(f"r{i}", i * 0.5, Targets(0.5 + i % 3, 0.1 + i % 2), 50 + 37 * i, 10 + i) for i in range(12)]
COST = Cost(0.05, 0.2, 0.02)
SPEED = LatencyCoefficients(0.01, 1e-4, 0, 0.02, 0, 1e-3)
DISPATCHED = {"ordering": ORDERINGS, "admission": ADMISSIONS, "routing": ROUTINGS, "pacing": PACINGS}
ALL = {**DISPATCHED, "migration": MIGRATIONS, "batching": BATCHINGS, "preemption": PREEMPTIONS}
CASES = [pytest.param(kind, name, id=f"{kind}-{name}") for kind, registry in ALL.items() for name in registry]
LEARNING = [case for case in CASES if case.values[0] in ("ordering", "admission", "routing", "batching")]


def instances(role=Role.COLLOCATED):
    made = [ShadowInstance(InstanceSpec(f"w{i}", "m", role=role, latency=SPEED)) for i in (1, 2)]
    for i, request in enumerate(REQUESTS[:5]):
        made[i % 2].send(request, 1.0, 0, i + 1)
    return made


def books(some):
    return [(w.outstanding, w.waiting_tokens, w.context_tokens, w.expected_tokens, w.last_sent) for w in some]


def settings_of(policy):
    return getattr(policy, "Config", None) or sys.modules[policy.__module__].Config


NO_POLICIES = {"provisioner"}  # what each can do; `tests/workers/provisioners` holds them to it


def test_no_registry_of_policies_is_left_out():
    """Whatever the pure half registers somewhere is in this suite."""
    packages = (controller.dispatch, controller.engine, controller.policies, controller.predict)
    found = set()
    for package in (*packages, controller.scale, controller.slo):
        for each in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            module = importlib.import_module(each.name)
            found |= {value.kind for value in vars(module).values() if isinstance(value, Registry)}
    assert found - NO_POLICIES == set(ALL)
    assert all(list(registry) for registry in ALL.values())


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_name_and_docstring_say_what_it_is(kind, name):
    policy = ALL[kind][name]
    assert policy.name == name
    documented = f"{policy.__doc__ or ''} {sys.modules[policy.__module__].__doc__ or ''}"
    assert len(documented) > 40


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_its_settings_are_frozen_and_have_defaults(kind, name):
    policy = ALL[kind][name]
    config = settings_of(policy)
    assert is_dataclass(config)
    assert config.__dataclass_params__.frozen
    assert policy().config == policy(config()).config == config()


@pytest.mark.parametrize("name", list(ORDERINGS))
def test_orderings_are_pure_and_total(name):
    ordering = ORDERINGS[name]()
    before = copy.deepcopy(REQUESTS)
    keys = [ordering.rank(r, COST, 5.0).key for r in REQUESTS]
    assert keys == [ordering.rank(r, COST, 5.0).key for r in REQUESTS]
    assert before == REQUESTS
    assert sorted(keys) is not None


@pytest.mark.parametrize("name", list(ADMISSIONS))
def test_admissions_answer_with_a_probability_and_a_reason(name):
    admission, (instance, _) = ADMISSIONS[name](), instances()
    for request in REQUESTS:
        judged = admission.judge(request, COST, instance, 0.1, 2.0)
        assert 0.0 <= judged.probability <= 1.0
        assert judged.reason
        assert admission.hopeless_at(request, COST) > request.arrival


@pytest.mark.parametrize("name", list(ROUTINGS))
def test_routings_choose_one_of_the_offered_and_change_nothing(name):
    routing, offered = ROUTINGS[name](), instances()
    state = books(offered)
    assert routing.choose(offered, 2.0) in offered
    assert routing.choose(offered, 2.0) is routing.choose(list(reversed(offered)), 2.0)
    assert routing.choose([], 2.0) is None
    assert state == books(offered)


@pytest.mark.parametrize("name", list(PACINGS))
def test_pacings_offer_room_to_an_idle_instance(name):
    pacing, idle = PACINGS[name](), ShadowInstance(InstanceSpec("w", "m"))
    assert pacing.ready(idle, 1.0)
    room = pacing.room(idle, RecentDemand(2.0), 0.5, 1.0)
    assert room.tokens > 100
    assert room.slots >= 1
    assert pacing.wake_at(idle, 1.0) > 1.0


@pytest.mark.parametrize("name", list(PACINGS))
def test_pacings_learn_only_where_they_are_told_to(name):
    """Asking changes neither the answer nor the instance's books; what happened is told by three calls."""
    pacing, (instance, _) = PACINGS[name](), instances()
    state = books([instance])

    def answers():
        demand = RecentDemand(2.0)
        return (
            pacing.ready(instance, 2.0), pacing.room(instance, demand, 0.5, 2.0), pacing.spare(instance, demand, 2.0),
            pacing.wake_at(instance, 2.0),
        )  # fmt: skip

    assert answers() == answers()
    assert state == books([instance])
    for tell in (lambda: pacing.prefilled(instance, 0.1, 2.0), lambda: pacing.ended(instance, 2.0)):
        assert tell() is None
        assert answers() == answers()
    assert pacing.passed(instance, 2.0) is None
    assert state == books([instance])


stages = st.builds(
    lambda number, tpot, prompt, output, waited: Prefilled(
        Request(f"s{number}", 0.0, Targets(1.0, tpot), prompt, output), 2.0 - waited, {"w1": 0.01 * number}
    ),
    number=st.integers(0, 99),
    tpot=st.sampled_from([0.001, 0.02, 0.05, 0.2, 1.0]),
    prompt=st.integers(1, 4000),
    output=st.integers(1, 400),
    waited=st.floats(0.0, 3.0),
)


@pytest.mark.parametrize("name", list(MIGRATIONS))
@settings(deadline=None, max_examples=60)
@given(stage=stages)
def test_migrations_place_on_one_of_the_offered_or_wait(name, stage):
    placement, offered = MIGRATIONS[name](), instances(Role.DECODE)
    state = books(offered)
    choice = placement.choose(stage, offered, 2.0)
    assert choice is None or (choice.instance in offered and choice.reason)
    assert choice == placement.choose(stage, list(reversed(offered)), 2.0), "the order of offering decides nothing"
    assert placement.choose(stage, [], 2.0) is None
    assert placement.hopeless(stage, offered, 2.0) in (True, False)
    assert state == books(offered)
    later = stage._replace(request=replace(stage.request, id="t0"))
    assert placement.order(stage) < placement.order(later), "ties are broken by id"


@pytest.mark.parametrize("name", list(MIGRATIONS))
def test_migrations_take_what_fits_an_idle_instance(name):
    """Else a stage would wait forever."""
    idle = ShadowInstance(InstanceSpec("w", "m", role=Role.DECODE, latency=SPEED))
    fits = Prefilled(Request("s", 0.0, Targets(1.0, 1.0), 100, 50), 1.0)
    choice = MIGRATIONS[name]().choose(fits, [idle], 1.0)
    assert choice is not None
    assert choice.instance is idle


standings = st.builds(SequenceStanding, st.floats(0, 1e4), st.floats(0, 1e4), st.integers(0, 100_000))


@pytest.mark.parametrize("name", list(PREEMPTIONS))
@settings(deadline=None, max_examples=100)
@given(running=standings, challenger=standings, tokens_per_s=st.floats(0, 1e5))
def test_preemptions_weigh_alike_twice_and_never_swap_back(name, running, challenger, tokens_per_s):
    rule = PREEMPTIONS[name]()
    choice = rule.weigh(running, challenger, tokens_per_s)
    assert choice == rule.weigh(running, challenger, tokens_per_s)
    assert choice.reason
    assert choice.cost >= 0
    assert not rule.weigh(running, running, tokens_per_s).preempt, "its equal keeps what runs"
    if choice.preempt:
        assert choice.gain > choice.cost
        assert not rule.weigh(challenger, running, tokens_per_s).preempt


@pytest.mark.parametrize(("kind", "name"), LEARNING)
def test_observing_any_event_is_harmless(kind, name):
    policy = ALL[kind][name]()
    for event in (ev.Woke(), ev.Arrived(REQUESTS[0]), ev.Finished("nobody", 3)):
        assert policy.observe(event, 1.0) is None


@pytest.mark.parametrize("name", list(POLICY_SETS))
def test_every_policy_set_names_registered_parts(name):
    chosen = POLICY_SETS[name]
    assert chosen.summary
    for part, registry in (DISPATCHED | {"migration": MIGRATIONS}).items():
        assert getattr(chosen, part) in registry
    assert build_dispatcher(name).name == name
    assert build_migrator(name).name == name


@pytest.mark.parametrize("part", [*DISPATCHED, "migration"])
def test_every_registered_part_can_be_exchanged_into_a_set(part):
    for name in ALL[part]:
        build_dispatcher("slackline", {part: {"name": name}})
    with pytest.raises(ConfigError) as caught:
        build_dispatcher("slackline", {part: {"name": "nothing of the kind"}})
    assert caught.value.field == part
