"""Wake-up as an action, against a vLLM contract fake over sockets and against the reference engine itself."""

from datetime import timedelta

import pytest
from django.core.exceptions import ValidationError
from django.utils import timezone

from controller.models import Action, Decision, Instance
from controller.selectors.snapshot import gateway_snapshot
from controller.services.actors import SYSTEM
from controller.services.fleet.sleeping import sleep_order, wake_order
from tests import factories
from tests.workers.engine.process import FLEET, EngineProcess
from tests.workers.sleep_orders import OLGA, Killed, answer, killed, lease_runs_out, looks, put_to_sleep
from workers.actions.long_calls import FRESH_S, LongCalls
from workers.actions.runner import advance_actions

pytestmark = [pytest.mark.db, pytest.mark.django_db, pytest.mark.usefixtures("patient", "no_settling")]


def test_level_one_wakes_with_one_verb(vllm, row):
    row = put_to_sleep(row, 1)
    action = wake_order(actor=OLGA, instance_id="v1")
    assert (action.kind, Instance.objects.get(pk="v1").shown_state) == ("wake", "waking")
    assert "v1" not in {spec.id for spec in gateway_snapshot().instances}
    (decision,) = looks()
    assert (decision.kind, decision.reason, decision.outcome["source"]) == ("instance_awake", "level_1", "host")
    assert vllm.verbs[1:] == ["wake_up"]
    row.refresh_from_db()
    assert (row.weights, row.sleep_level, answer(vllm)) == ("present", 0, "good")
    assert wake_order(actor=SYSTEM, instance_id="v1") == action
    assert "v1" in {spec.id for spec in gateway_snapshot().instances}


def test_level_two_reads_its_weights_again_before_it_serves(vllm, row):
    put_to_sleep(row, 2)
    wake_order(actor=OLGA, instance_id="v1")
    (decision,) = looks()
    assert vllm.verbs[1:] == [
        "wake_up?tags=weights", "collective_rpc", "reset_prefix_cache", "wake_up?tags=kv_cache",
    ]  # fmt: skip
    assert (decision.reason, decision.outcome["source"]) == ("level_2", "disk")
    assert decision.outcome["load_s"] >= 0
    assert (answer(vllm), Instance.objects.get(pk="v1").weights) == ("good", "present")


def test_the_fake_punishes_a_wake_up_without_reload(vllm):
    vllm.sleep(2)
    vllm.wake_up(None)
    assert answer(vllm) == "garbage"
    vllm.reload_weights()
    assert answer(vllm) == "stale prefix"


@pytest.mark.parametrize("verb", ["wake_up", "collective_rpc", "reset_prefix_cache"])
@pytest.mark.parametrize("after", [False, True])
def test_a_worker_killed_while_it_wakes_from_level_two(vllm, row, verb, after):
    put_to_sleep(row, 2)
    wake_order(actor=OLGA, instance_id="v1")
    with pytest.raises(Killed):
        looks(client=killed("after" if after else verb, verb))
    lease_runs_out()
    (decision,) = looks()
    assert (decision.kind, answer(vllm)) == ("instance_awake", "good")
    assert Decision.objects.filter(kind="instance_awake").count() == 1


def test_another_workers_reload_is_left_to_it(vllm, row):
    put_to_sleep(row, 2)
    action = wake_order(actor=OLGA, instance_id="v1")
    vllm.wake_up(["weights"])
    mark = {"by": "elsewhere:1", "at": timezone.now().timestamp()}
    Action.objects.filter(pk=action.pk).update(params={**action.params, "stage": "reload", "reload": mark})
    assert looks(2) == []
    assert "collective_rpc" not in vllm.verbs
    mark["at"] -= FRESH_S
    Action.objects.filter(pk=action.pk).update(params={**action.params, "stage": "reload", "reload": mark})
    assert [decision.kind for decision in looks()] == ["instance_awake"]


def test_a_reload_that_takes_long_holds_no_other_up(vllm, row):
    vllm.reload_s = 0.5
    put_to_sleep(row, 2)
    wake_order(actor=OLGA, instance_id="v1")
    calls, found, looked = LongCalls(), [], 0
    ends_at = timezone.now() + timedelta(seconds=60)
    while not found and timezone.now() < ends_at:
        found, looked = advance_actions([], calls=calls), looked + 1
    (decision,) = found
    assert (decision.kind, looked > 1, vllm.verbs.count("collective_rpc")) == ("instance_awake", True, 1)
    assert decision.outcome["load_s"] >= 0.5


def test_a_reload_that_fails_leaves_it_asleep_and_unused(vllm, row):
    put_to_sleep(row, 2)
    vllm.fail["collective_rpc"] = (500, "model.safetensors: truncated")
    action = wake_order(actor=OLGA, instance_id="v1")
    (decision,) = looks()
    assert (decision.kind, decision.reason) == ("instance_wake_failed", "reload_failed")
    assert "truncated" in decision.outcome["error"]
    action.refresh_from_db()
    row.refresh_from_db()
    assert (action.state, row.weights, row.sleep_level) == ("failed", "asleep", 2)
    assert "v1" not in {spec.id for spec in gateway_snapshot().instances}
    vllm.fail.clear()
    assert wake_order(actor=OLGA, instance_id="v1") != action
    assert [decision.kind for decision in looks()] == ["instance_awake"]


def test_a_deeper_sleep_since_is_noticed_before_it_is_woken(vllm, row):
    put_to_sleep(row, 1)
    vllm.wake_up(None)
    vllm.sleep(2)
    wake_order(actor=OLGA, instance_id="v1")
    (decision,) = looks()
    assert (decision.kind, decision.reason, answer(vllm)) == ("instance_awake", "level_2", "good")


def test_the_fleets_token_is_for_reference_engines_only(vllm, row, settings):
    settings.FLEET_TOKEN = FLEET["token"]
    put_to_sleep(row, 2)
    wake_order(actor=OLGA, instance_id="v1")
    looks()
    assert not any(FLEET["token"].encode() in body for body in vllm.bodies)
    with EngineProcess("--profile", "constant:2ms", "--model", "tiny", token=FLEET["token"]) as engine:
        other = factories.instance(id="r1", url=engine.url)
        settings.FLEET_TOKEN = "another"
        sleep_order(actor=OLGA, instance_id="r1")
        (decision,) = looks()
        assert (decision.reason, "token" in decision.outcome["error"]) == ("engine_refused", True)
        settings.FLEET_TOKEN = FLEET["token"]
        assert put_to_sleep(other).sleep_level == 1
        wake_order(actor=OLGA, instance_id="r1")
        decisions = [decision for _ in range(50) for decision in looks()]
        assert [(each.kind, each.outcome["source"]) for each in decisions] == [("weights_load", "host")]


def test_one_that_was_started_again_meanwhile_is_awake(vllm, row):
    put_to_sleep(row, 1)
    vllm.restart()
    wake_order(actor=OLGA, instance_id="v1")
    assert [decision.kind for decision in looks()] == ["instance_awake"]


def test_what_is_awake_or_on_its_way_is_not_woken(vllm, row):
    with pytest.raises(ValidationError, match="is not asleep"):
        wake_order(actor=OLGA, instance_id="v1")
    sleep_order(actor=OLGA, instance_id="v1")
    with pytest.raises(ValidationError, match="still falling asleep"):
        wake_order(actor=OLGA, instance_id="v1")
