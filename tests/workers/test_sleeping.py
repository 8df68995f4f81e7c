"""Sleep and wake-up as actions, against a vLLM contract fake over sockets and against the reference engine itself."""

from datetime import timedelta

import pytest
import requests
from django.core.exceptions import ValidationError
from django.utils import timezone

from controller.models import Action, Decision, Instance
from controller.selectors.snapshot import gateway_snapshot
from controller.services.actions import action_end, action_lease, weights_load_order
from controller.services.actors import SYSTEM, Actor
from controller.services.instances import instance_drain
from controller.services.role_switches import role_ask
from controller.services.scaling_stages import stage_of
from controller.services.sleeping import sleep_order, wake_order
from tests import factories
from tests.workers.engine.process import FLEET, EngineProcess
from tests.workers.sleeping_vllm import SleepingVllm
from workers import sleep_client, sleeping
from workers.actions import look
from workers.long_calls import FRESH_S, LongCalls
from workers.sleep_client import SleepClient

pytestmark = [pytest.mark.db, pytest.mark.django_db, pytest.mark.usefixtures("patient")]

OLGA = Actor.person("olga")


class Killed(BaseException):
    """What `kill -9` is to the worker: nothing after it runs."""


@pytest.fixture
def vllm():
    with SleepingVllm() as fake:
        yield fake


@pytest.fixture
def row(vllm):
    return factories.instance(id="v1", backend="vllm", provisioner="static", url=vllm.url)


@pytest.fixture(autouse=True)
def _no_settling(monkeypatch):
    """Gateways have heard of it at once, and an engine that did nothing is told again at once."""
    monkeypatch.setattr(sleeping, "SETTLE_S", 0.0)
    monkeypatch.setattr(sleeping, "ANSWER_S", 0.0)
    for module, name in ((sleeping, "LOOK_S"), (sleep_client, "CALL_S")):  # however slow the test's machine
        monkeypatch.setattr(module, name, 60.0)


def looks(times=1, client=SleepClient):
    calls = LongCalls(threads=False)  # a process of its own: what another one waited for is not known here
    return [decision for _ in range(times) for decision in look([], sleep=client, calls=calls)]


def lease_runs_out():
    Action.objects.update(lease_until=timezone.now() - timedelta(seconds=1))


def put_to_sleep(row, level=1):
    sleep_order(actor=OLGA, instance_id=row.pk, level=level)
    (decision,) = looks()
    assert decision.kind == "instance_asleep", decision.outcome
    return Instance.objects.get(pk=row.pk)


def answer(vllm):
    return requests.post(f"{vllm.url}/v1/completions", json={}, timeout=5).json()["choices"][0]["text"]


# ---- falling asleep -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("level", "gauge"), [(1, "weights_offloaded"), (2, "discard_all")])
def test_it_is_let_go_first_and_asleep_then(vllm, row, level, gauge):
    action = sleep_order(actor=OLGA, instance_id=row.pk, level=level)
    snapshot = gateway_snapshot()
    assert ("v1" in snapshot.draining, "v1" in {spec.id for spec in snapshot.instances}) == (True, True)
    assert Instance.objects.get(pk="v1").shown_state == "falling asleep"
    (decision,) = looks()
    assert (decision.kind, decision.reason, decision.actor) == ("instance_asleep", f"level_{level}", "olga")
    assert (vllm.gauge, vllm.verbs) == (gauge, [f"sleep?level={level}&mode=abort"])
    row.refresh_from_db()
    assert (row.weights, row.sleep_level, row.shown_state) == ("asleep", level, "asleep")
    assert "v1" not in {spec.id for spec in gateway_snapshot().instances}
    action.refresh_from_db()
    assert (action.state, action.decision, action.tries) == ("done", decision, 1)
    assert looks(2) == []


def test_said_twice_it_is_one_order(vllm, row):
    first = sleep_order(actor=OLGA, instance_id="v1", level=2)
    assert sleep_order(actor=SYSTEM, instance_id="v1", level=2) == first
    looks()
    assert sleep_order(actor=SYSTEM, instance_id="v1", level=2) == first
    with pytest.raises(ValidationError, match="sleeps at level 2: wake it first"):
        sleep_order(actor=SYSTEM, instance_id="v1", level=1)
    assert Action.objects.count() == 1


def test_what_runs_may_finish_and_is_aborted_after_its_time(vllm, row):
    vllm.running = 2
    action = sleep_order(actor=OLGA, instance_id="v1")
    assert looks(2) == []
    action.refresh_from_db()
    assert (vllm.verbs, action.error) == ([], "2 requests run there")
    Action.objects.update(created_at=timezone.now() - timedelta(seconds=sleeping.DRAIN_S + 1))
    (decision,) = looks()
    assert (decision.kind, decision.outcome["aborted"]) == ("instance_asleep", 2)


def test_gateways_get_time_to_hear_of_it(vllm, row, monkeypatch):
    monkeypatch.setattr(sleeping, "SETTLE_S", 60.0)
    sleep_order(actor=OLGA, instance_id="v1")
    assert looks(2) == []
    assert vllm.verbs == []


def test_without_development_mode_it_serves_on(row, vllm):
    vllm.dev_mode = False
    action = sleep_order(actor=OLGA, instance_id="v1")
    (decision,) = looks()
    assert (decision.kind, decision.reason) == ("instance_sleep_failed", "no_sleep_mode")
    assert "VLLM_SERVER_DEV_MODE=1" in decision.outcome["error"]
    action.refresh_from_db()
    assert (action.state, Instance.objects.get(pk="v1").weights) == ("failed", "present")
    assert "v1" not in gateway_snapshot().draining


def test_one_that_is_told_and_stays_awake_is_given_up(vllm, row):
    vllm.deaf = True
    sleep_order(actor=OLGA, instance_id="v1")
    (decision,) = looks(4)
    assert (decision.reason, len(vllm.verbs)) == ("stays_awake", 3)
    assert Instance.objects.get(pk="v1").weights == "present"


def test_a_verb_that_takes_long_is_not_said_again(vllm, row):
    vllm.moving["sleep"] = 1
    sleep_order(actor=OLGA, instance_id="v1")
    assert looks(3) == []
    assert vllm.verbs == []


@pytest.mark.parametrize(("asked", "found"), [(1, 2), (2, 1)])
def test_one_that_sleeps_at_another_level_sleeps_at_that(vllm, row, asked, found):
    """Somebody else put it to sleep: nothing is sent there, and its wake-up is that of the level at which it sleeps."""
    sleep_order(actor=OLGA, instance_id="v1", level=asked)
    vllm.sleep(found)
    (decision,) = looks()
    assert (decision.kind, decision.reason) == ("instance_sleep_failed", "asleep_otherwise")
    assert decision.outcome["sleeps_at"] == found
    row.refresh_from_db()
    assert (row.weights, row.sleep_level, vllm.verbs) == ("asleep", found, [])
    assert "v1" not in {spec.id for spec in gateway_snapshot().instances}
    wake_order(actor=OLGA, instance_id="v1")
    (decision,) = looks()
    assert (decision.kind, decision.reason) == ("instance_awake", f"level_{found}")
    assert ("collective_rpc" in vllm.verbs, answer(vllm)) == (found == 2, "good")


def test_one_that_is_merely_paused_is_put_to_sleep(vllm, row):
    vllm.sleep(0)
    sleep_order(actor=OLGA, instance_id="v1", level=2)
    assert [decision.kind for decision in looks()] == ["instance_asleep"]
    assert (vllm.gauge, Instance.objects.get(pk="v1").sleep_level) == ("discard_all", 2)


def test_an_order_that_ends_after_it_was_carried_out_leaves_a_sleeper(vllm, row):
    sleep_order(actor=OLGA, instance_id="v1", level=2)
    with pytest.raises(Killed):
        looks(client=killed("after", "sleep"))
    lease_runs_out()
    instance_drain(actor=OLGA, instance_id="v1")
    (decision,) = looks()
    assert (decision.reason, decision.outcome["sleeps_at"]) == ("instance_not_wanted", 2)
    row.refresh_from_db()
    assert (row.weights, row.sleep_level) == ("asleep", 2)


@pytest.mark.parametrize(("told", "weights"), [(False, "present"), (True, "asleep")])
def test_where_nobody_answers_it_sleeps_if_it_was_ever_told_to(vllm, row, told, weights):
    action = sleep_order(actor=OLGA, instance_id="v1")
    Action.objects.filter(pk=action.pk).update(
        tries=int(told), created_at=timezone.now() - sleeping.TIMEOUT - timedelta(seconds=1)
    )
    vllm.away = True
    (decision,) = looks()
    assert (decision.reason, Instance.objects.get(pk="v1").weights) == ("timeout", weights)


@pytest.mark.parametrize("when", ["look", "sleep", "after"])
def test_a_worker_killed_while_it_puts_to_sleep(vllm, row, when):
    sleep_order(actor=OLGA, instance_id="v1", level=2)
    with pytest.raises(Killed):
        looks(client=killed(when, "sleep"))
    assert looks() == []  # its lease runs still
    lease_runs_out()
    (decision,) = looks()
    assert (decision.kind, vllm.gauge) == ("instance_asleep", "discard_all")
    assert vllm.verbs == ["sleep?level=2&mode=abort"]
    assert Decision.objects.filter(kind="instance_asleep").count() == 1


def killed(when, verb):
    """A client whose worker dies before it looks, before it says the verb, or after it has said it."""

    class Client(SleepClient):
        def look(self):
            if when == "look":
                raise Killed
            return super().look()

        def _call(self, path, query, body, timeout_s):
            mine = path == f"/{verb}"
            if mine and when == verb:
                raise Killed
            found = super()._call(path, query, body, timeout_s)
            if mine and when == "after":
                raise Killed
            return found

    return Client


def test_what_cannot_sleep_is_refused_with_the_field(vllm, row):
    for fields, field in (
        ({"backend": "fake"}, "backend"),
        ({"observed_state": "starting"}, "observed_state"),
        ({"weights": "absent"}, "weights"),
        ({"desired_state": "draining"}, "desired_state"),
    ):
        other = factories.instance(**{"backend": "vllm", **fields})
        with pytest.raises(ValidationError) as refused:
            sleep_order(actor=OLGA, instance_id=other.pk)
        assert list(refused.value.message_dict) == [field]
    with pytest.raises(ValidationError, match="Must be one of 1, 2"):
        sleep_order(actor=OLGA, instance_id="v1", level=3)


def test_one_that_switches_its_role_is_not_put_to_sleep(row):
    other = factories.instance(backend="sglang", provisioner="static", role="prefill")
    role_ask(actor=OLGA, instance_id=other.pk, role="decode")
    policy = factories.scaling_policy(other.model, role="decode", sleep_level=1)
    (member,) = stage_of(policy, [], 0.0).seen.members
    assert (member.state, member.fixed) == ("starting", True), "the scaler does not try"
    with pytest.raises(ValidationError) as refused:
        sleep_order(actor=OLGA, instance_id=other.pk)
    assert list(refused.value.message_dict) == ["role"]


def test_a_load_of_weights_does_not_end_a_sleep(row):
    other = factories.instance(backend="reference")
    before = weights_load_order(actor=OLGA, instance_id=other.pk)
    sleep_order(actor=OLGA, instance_id=other.pk)
    with pytest.raises(ValidationError) as refused:
        weights_load_order(actor=OLGA, instance_id=factories.instance(weights="leaving", sleep_level=1).pk)
    assert list(refused.value.message_dict) == ["weights"]
    leased = action_lease(action_id=before.pk)
    assert action_end(action=leased, state="done", kind="weights_load", subject=("instance", other.pk),
                      reason="present_already", inputs={}, outcome={}) is not None  # fmt: skip
    other.refresh_from_db()
    assert (other.weights, other.sleep_level) == ("leaving", 1)


def test_an_instance_that_is_no_longer_wanted_ends_the_order(vllm, row):
    sleep_order(actor=OLGA, instance_id="v1")
    instance_drain(actor=OLGA, instance_id="v1")
    (decision,) = looks()
    assert (decision.kind, decision.reason, vllm.verbs) == ("instance_sleep_failed", "instance_not_wanted", [])


# ---- waking up ------------------------------------------------------------------------------------------------------


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


def test_a_reload_that_takes_long_holds_nobody_up(vllm, row):
    vllm.reload_s = 0.5
    put_to_sleep(row, 2)
    wake_order(actor=OLGA, instance_id="v1")
    calls, found, looked = LongCalls(), [], 0
    ends_at = timezone.now() + timedelta(seconds=60)
    while not found and timezone.now() < ends_at:
        found, looked = look([], calls=calls), looked + 1
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
