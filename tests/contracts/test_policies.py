"""Every registered ordering, admission, routing and pacing keeps the contract of controller.core.policy."""

import copy
import sys

import pytest

from controller.core import events as ev
from controller.core.policy import ADMISSIONS, ORDERINGS, ROUTINGS, Cost
from controller.core.types import InstanceSpec, LatencyCoefficients, Request, Targets
from controller.dispatch import POLICY_SETS
from controller.dispatch.pacing import PACINGS
from controller.dispatch.shadow import Worker

REQUESTS = [Request(f"r{i}", i * 0.5, Targets(0.5 + i % 3, 0.1 + i % 2), 50 + 37 * i, 10 + i) for i in range(12)]
COST = Cost(0.05, 0.2, 0.02)
ALL = {"ordering": ORDERINGS, "admission": ADMISSIONS, "routing": ROUTINGS, "pacing": PACINGS}
CASES = [pytest.param(kind, name, id=f"{kind}-{name}") for kind, registry in ALL.items() for name in registry]


def workers():
    made = [
        Worker(InstanceSpec(f"w{i}", "m", latency=LatencyCoefficients(0.01, 1e-4, 0, 0.02, 0, 1e-3))) for i in (1, 2)
    ]
    for i, request in enumerate(REQUESTS[:5]):
        made[i % 2].send(request, 1.0, 0, i + 1)
    return made


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_name_and_docstring_say_what_it_is(kind, name):
    policy = ALL[kind][name]
    assert policy.name == name
    documented = policy.__doc__ or sys.modules[policy.__module__].__doc__
    assert documented
    assert len(documented) > 40


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
    admission, (worker, _) = ADMISSIONS[name](), workers()
    for request in REQUESTS:
        verdict = admission.judge(request, COST, worker, 0.1, 2.0)
        assert 0.0 <= verdict.probability <= 1.0
        assert verdict.reason
        assert admission.hopeless_at(request, COST) > request.arrival


@pytest.mark.parametrize("name", list(ROUTINGS))
def test_routings_choose_one_of_the_offered_and_change_nothing(name):
    routing, offered = ROUTINGS[name](), workers()
    state = [(w.outstanding, w.waiting_tokens, w.last_sent) for w in offered]
    assert routing.choose(offered, 2.0) in offered
    assert routing.choose(offered, 2.0) is routing.choose(list(reversed(offered)), 2.0)
    assert routing.choose([], 2.0) is None
    assert state == [(w.outstanding, w.waiting_tokens, w.last_sent) for w in offered]


@pytest.mark.parametrize("name", list(PACINGS))
def test_pacings_offer_room_to_an_idle_worker(name):
    pacing, idle = PACINGS[name](), Worker(InstanceSpec("w", "m"))
    assert pacing.ready(idle, 1.0)
    room = pacing.room(idle, 2.0, 0.5, 1.0)
    assert room.tokens > 100
    assert room.slots >= 1
    assert pacing.wake_at(idle, 1.0) > 1.0


@pytest.mark.parametrize(("kind", "name"), [case for case in CASES if case.values[0] != "pacing"])
def test_observing_any_event_is_harmless(kind, name):
    policy = ALL[kind][name]()
    for event in (ev.Woke(), ev.Arrived(REQUESTS[0]), ev.Finished("nobody", 3)):
        assert policy.observe(event, 1.0) is None


def test_every_policy_set_names_registered_parts():
    for name, chosen in POLICY_SETS.items():
        assert chosen.summary, name
        assert chosen.ordering in ORDERINGS
        assert chosen.admission in ADMISSIONS
        assert chosen.routing in ROUTINGS
        assert chosen.pacing in PACINGS
