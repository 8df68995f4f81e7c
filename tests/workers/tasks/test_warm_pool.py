"""The warm pool against a real database: who is taken, who counts as capacity, who is paid for."""

import time

import pytest

from controller.models import Action, Decision, Instance, ScalerState
from controller.selectors.snapshot import gateway_snapshot
from controller.services.actors import SYSTEM
from controller.services.fleet.actions import action_end, action_lease
from controller.services.fleet.instances import instance_observe
from controller.services.fleet.scaling_policies import scaling_policy_update
from controller.services.fleet.sleeping import wake_order
from tests.workers.tasks.test_scaling import fleet, tick
from workers.supervisor.engine_processes import engine_argv
from workers.tasks import reconcile
from workers.tasks.reconcile import reconcile_once

pytestmark = [pytest.mark.db, pytest.mark.django_db]


def wanting(policy, warm):
    return scaling_policy_update(actor=SYSTEM, policy_id=policy.pk, version=policy.version, changes={"warm": warm})


def comes_up(instance_id):
    url = f"http://{instance_id}:1"
    instance_observe(instance_id=instance_id, observed_state=Instance.Observed.READY, url=url)


@pytest.fixture
def pool(policy, two):
    """A policy that keeps one warm instance, which is ready; its id."""
    wanting(policy, 1)
    (warm,) = tick(policy, fleet(0.5, *two)).outcome["started"]
    comes_up(warm)
    return warm


def loaded(instance_id, state="done"):
    action = Action.objects.get(instance=instance_id, kind="weights_load")
    held = action_lease(action_id=action.pk)
    action_end(
        action=held, state=state, kind="weights_load", subject=("instance", instance_id), reason="from_disk",
        inputs={}, outcome={}, error="" if state == "done" else "truncated",
    )  # fmt: skip


def test_without_a_desired_warm_pool_there_are_no_warm_spares(policy, two):
    assert tick(policy, fleet(0.5, *two)) is None
    assert Instance.objects.count() == 2


def test_the_pool_is_filled_up_and_cut(policy, two):
    policy = wanting(policy, 2)
    decision = tick(policy, fleet(0.5, *two))
    assert (decision.kind, decision.reason, decision.inputs) == (
        "scale_warm", "pool_below_target", {"warm": 0, "wanted": 2},
    )  # fmt: skip
    rows = Instance.objects.filter(pk__in=decision.outcome["started"])
    assert [(row.weights, row.spec["weights"], row.spec["profile"]) for row in rows] == [
        ("absent", "absent", "constant:5ms")
    ] * 2
    assert tick(policy, fleet(0.5, *two)) is None
    wanting(policy, 1)
    decision = tick(policy, fleet(0.5, *two))
    assert (decision.reason, len(decision.outcome["stopped"])) == ("pool_above_target", 1)
    assert Instance.objects.get(pk=decision.outcome["stopped"][0]).desired_state == "stopped"
    assert Instance.objects.warm().count() == 1


def test_a_warm_one_costs_and_is_no_capacity(policy, two, pool):
    assert Instance.objects.get(pk=pool).intervals.filter(ended_at=None).count() == 1
    assert pool not in {spec.id for spec in gateway_snapshot().instances}
    tick(policy, fleet(0.95, *two))
    decision = Decision.objects.get(kind="scale_out")
    assert (decision.inputs["ready"], decision.inputs["starting"]) == (2, 0)


def test_a_scale_out_takes_the_warm_one_and_starts_nothing(policy, two, pool):
    decision = tick(policy, fleet(0.95, *two))
    assert decision.outcome == {"started": [pool], "warm": {pool: {"source": "e1", "reason": "same_host"}}}
    assert Instance.objects.count() == 3
    assert Instance.objects.get(pk=pool).weights == "loading"
    load = Action.objects.get(kind="weights_load")
    assert (load.instance_id, load.params["scale_out"]["decision"]) == (pool, decision.pk)
    assert Action.objects.get(kind="first_served").params["scale_out"]["warm"] is True
    assert pool in {spec.id for spec in gateway_snapshot().instances}  # seen asleep until the weights are there


def test_the_least_busy_engine_is_the_source(policy, two, pool):
    messages = fleet(0.95, *two)
    messages[0]["instances"][1]["utilisation"] = 0.9
    assert tick(policy, messages).outcome["warm"][pool]["source"] == "e2"


def test_while_it_loads_it_is_starting_and_the_pool_waits(policy, two, pool):
    tick(policy, fleet(0.95, *two))
    held = tick(policy, fleet(0.95, *two))
    assert (held.reason, held.inputs["starting"]) == ("settling", 1)
    assert tick(policy, fleet(0.5, *two)).reason == "relieved"
    assert tick(policy, fleet(0.5, *two)) is None  # the pool is not filled up yet
    loaded(pool)
    assert Instance.objects.get(pk=pool).weights == "present"
    decision = tick(policy, fleet(0.5, *two, pool))
    assert decision.reason == "pool_below_target"
    assert ScalerState.objects.get(policy=policy).state["load"] == 0.5


def test_a_warm_one_that_still_starts_is_not_taken(policy, two):
    policy = wanting(policy, 1)
    (warm,) = tick(policy, fleet(0.5, *two)).outcome["started"]
    decision = tick(policy, fleet(0.95, *two))
    assert warm not in decision.outcome["started"]
    assert len(decision.outcome["started"]) == 1
    new = Instance.objects.get(pk=decision.outcome["started"][0])
    assert (new.weights, "weights" in new.spec) == ("present", False)


def test_a_load_that_fails_gives_the_instance_up(policy, two, pool):
    tick(policy, fleet(0.95, *two))
    loaded(pool, "failed")
    row = Instance.objects.get(pk=pool)
    assert (row.desired_state, row.observed_state) == ("stopped", "failed")
    again = tick(policy, fleet(0.95, *two))
    assert (again.kind, again.outcome["started"] != [pool]) == ("scale_out", True)


# ---- the reconciler --------------------------------------------------------------------------------------------------


@pytest.fixture
def reconciled(fake, monkeypatch):
    monkeypatch.setattr(reconcile, "fleet_or_nothing", list)
    return lambda: reconcile_once({"process": fake, "static": type(fake)()}, time.time())


def test_a_warm_one_that_dies_is_replaced_by_a_warm_one(fake, reconciled, pool):
    fake.becomes(pool, "exited", exit_code=1)
    reconciled()
    decision = Decision.objects.get(kind="instance_replaced", subject=pool)
    assert Instance.objects.get(pk=decision.outcome["replacement"]).weights == "absent"


@pytest.mark.parametrize("weights", ["asleep", "leaving"])
def test_a_sleeping_instance_that_dies_is_replaced_by_one_that_sleeps_too(fake, reconciled, pool, weights):
    Instance.objects.filter(pk=pool).update(weights=weights)
    fake.becomes(pool, "exited", exit_code=1)
    reconciled()
    decision = Decision.objects.get(kind="instance_replaced", subject=pool)
    assert Instance.objects.get(pk=decision.outcome["replacement"]).weights == "absent"


def test_one_that_dies_with_its_weights_is_replaced_by_one_that_serves(policy, two, fake, reconciled, pool):
    tick(policy, fleet(0.95, *two))
    fake.becomes(pool, "exited", exit_code=1)
    reconciled()
    decision = Decision.objects.get(kind="instance_replaced", subject=pool)
    row = Instance.objects.get(pk=decision.outcome["replacement"])
    assert (row.weights, "weights" in row.spec) == ("present", False)


def test_a_process_that_was_started_again_gets_its_weights_again(policy, two, fake, reconciled, pool):
    tick(policy, fleet(0.95, *two))
    loaded(pool)
    fake.becomes(pool, "ready", started_at=time.time() + 60)
    reconciled()
    assert Instance.objects.get(pk=pool).weights == "loading"
    assert Action.objects.filter(instance=pool, kind="weights_load", state="queued").count() == 1


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize(("name", "becomes", "serves"), [("e2", "present", True), ("warm", "absent", False)])
def test_a_sleeper_that_was_started_again_sleeps_no_more(
    policy, two, fake, reconciled, pool, name, becomes, serves, level
):
    """Its sleep was the former process's. One that comes up without weights is in the pool, where it belongs."""
    name = pool if name == "warm" else name
    Instance.objects.filter(pk=name).update(weights="asleep", sleep_level=level)
    fake.becomes(name, "ready", started_at=time.time() + 60)
    reconciled()
    row = Instance.objects.get(pk=name)
    assert (row.weights, row.sleep_level, row.observed_state) == (becomes, 0, "ready")
    assert (name in {spec.id for spec in gateway_snapshot().instances}) == serves
    decision = Decision.objects.get(kind="instance_awake", subject=name)
    assert (decision.reason, decision.inputs, decision.outcome) == ("new_run", {"level": level}, {"weights": becomes})
    assert not Action.objects.filter(instance=name).exists(), "nobody asked for its weights"
    reconciled()
    assert Decision.objects.filter(kind="instance_awake").count() == 1


def test_a_sleeper_of_the_same_run_sleeps_on(policy, two, fake, reconciled):
    fake.becomes("e2", "ready")
    reconciled()
    Instance.objects.filter(pk="e2").update(weights="asleep", sleep_level=1)
    fake.becomes("e2", "ready", url="http://127.0.0.1:8")  # seen elsewhere, by the same start
    reconciled()
    row = Instance.objects.get(pk="e2")
    assert (row.weights, row.sleep_level, row.url) == ("asleep", 1, "http://127.0.0.1:8")


def test_one_that_is_started_again_while_it_wakes_has_no_copy_of_its_weights_any_more(policy, two, fake, reconciled):
    """Its order to load goes on; if that fails it does not sleep, for that process never did."""
    Instance.objects.filter(pk="e2").update(weights="asleep", sleep_level=1)
    wake_order(actor=SYSTEM, instance_id="e2")
    fake.becomes("e2", "ready", started_at=time.time() + 60)
    reconciled()
    row = Instance.objects.get(pk="e2")
    assert (row.weights, row.sleep_level) == ("loading", 0)
    assert Action.objects.filter(instance="e2", kind="weights_load", state="queued").count() == 1


def test_a_warm_engine_opens_its_port_at_once():
    options = {"profile": "constant:5ms", "startup_delay": 4, "emulated_load_s": "disk=4"}
    assert "--startup-delay" in engine_argv(1, options)
    warm = engine_argv(1, {**options, "weights": "absent"})
    assert "--startup-delay" not in warm
    assert warm[warm.index("--weights") + 1] == "absent"
    assert warm[warm.index("--emulated-load-s") + 1] == "disk=4"
