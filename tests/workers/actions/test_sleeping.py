"""Sleep as an action, against a vLLM contract fake over sockets."""

from datetime import timedelta

import pytest
from django.conf import settings
from django.core.exceptions import ValidationError
from django.utils import timezone

from controller.models import Action, Decision, Instance
from controller.selectors.snapshot import gateway_snapshot
from controller.services.actors import SYSTEM
from controller.services.fleet.actions import action_end, action_lease, weights_load_order
from controller.services.fleet.instances import instance_drain
from controller.services.fleet.role_switches import role_order
from controller.services.fleet.scaling_stages import stage_of
from controller.services.fleet.sleeping import sleep_order, wake_order
from tests import factories
from tests.workers.sleep_orders import OLGA, Killed, answer, killed, lease_runs_out, looks, put_to_sleep
from workers.actions import sleeping

pytestmark = [pytest.mark.db, pytest.mark.django_db, pytest.mark.usefixtures("patient", "no_settling")]


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
    with pytest.raises(ValidationError, match="asleep at level 2"):
        sleep_order(actor=SYSTEM, instance_id="v1", level=1)
    assert Action.objects.count() == 1


def test_what_runs_may_finish_and_is_aborted_after_its_time(vllm, row):
    vllm.running = 2
    action = sleep_order(actor=OLGA, instance_id="v1")
    assert looks(2) == []
    action.refresh_from_db()
    assert (vllm.verbs, action.error) == ([], "2 requests are still running")
    Action.objects.update(created_at=timezone.now() - timedelta(seconds=settings.DRAIN_TIMEOUT_S + 1))
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


def test_without_sleep_mode_it_is_told_nothing_and_serves_on(row, vllm):
    vllm.sleep_mode, vllm.running = False, 3  # refused before its traffic has ended
    sleep_order(actor=OLGA, instance_id="v1")
    (decision,) = looks()
    assert (decision.kind, decision.reason) == ("instance_sleep_failed", "no_sleep_mode")
    assert "--enable-sleep-mode" in decision.outcome["error"]
    assert (vllm.verbs, vllm.gauge, answer(vllm)) == ([], "awake", "good")
    assert (Instance.objects.get(pk="v1").weights, "v1" in gateway_snapshot().draining) == ("present", False)


def test_one_without_sleep_mode_that_says_it_sleeps_is_not_believed(row, vllm):
    vllm.sleep_mode = False
    vllm.sleep(1)  # told by somebody else: merely paused, and its gauge says asleep
    assert vllm.gauge == "weights_offloaded"
    sleep_order(actor=OLGA, instance_id="v1")
    (decision,) = looks()
    assert (decision.kind, decision.reason) == ("instance_sleep_failed", "no_sleep_mode")
    row.refresh_from_db()
    assert (row.weights, row.sleep_level) == ("asleep", 1)  # it serves nobody until it is woken


def test_one_that_does_not_say_how_it_was_started_is_left_alone(row, vllm):
    vllm.sleep_mode = None
    sleep_order(actor=OLGA, instance_id="v1")
    (decision,) = looks()
    assert (decision.reason, vllm.verbs) == ("engine_refused", [])
    assert "whether sleep mode is on" in decision.outcome["error"]


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
def test_where_no_one_answers_it_sleeps_if_it_was_ever_told_to(vllm, row, told, weights):
    action = sleep_order(actor=OLGA, instance_id="v1")
    Action.objects.filter(pk=action.pk).update(
        tries=int(told), created_at=timezone.now() - sleeping.TIMEOUT - timedelta(seconds=1)
    )
    vllm.away = True
    (decision,) = looks()
    assert (decision.reason, Instance.objects.get(pk="v1").weights) == ("timeout", weights)


@pytest.mark.parametrize("order", [sleep_order, wake_order])
def test_an_order_ends_also_where_its_endpoint_has_gone(vllm, row, order):
    if order is wake_order:
        put_to_sleep(row)
    action = order(actor=OLGA, instance_id="v1")
    vllm.away = True
    Instance.objects.update(observed_state="unreachable")
    assert looks() == []
    action.refresh_from_db()
    assert (action.state, action.error) == ("queued", "its process is unreachable")
    Action.objects.update(created_at=timezone.now() - sleeping.TIMEOUT - timedelta(seconds=1))
    (decision,) = looks()
    assert (decision.reason, "its process is unreachable" in decision.outcome["error"]) == ("timeout", True)
    action.refresh_from_db()
    assert (action.state, looks()) == ("failed", [])


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
    with pytest.raises(ValidationError, match="Must be one of: 1, 2"):
        sleep_order(actor=OLGA, instance_id="v1", level=3)


def test_one_that_switches_its_role_is_not_put_to_sleep(row):
    other = factories.instance(backend="sglang", provisioner="static", role="prefill")
    role_order(actor=OLGA, instance_id=other.pk, role="decode")
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


WORDS = "weights are being loaded or sent"


def make_busy(vllm):
    """As a reference engine is while it sends its weights to another: it answers, and does nothing."""
    vllm.fail["sleep"] = (409, WORDS)


def test_one_that_is_busy_is_told_until_it_falls_asleep(vllm, row):
    action = sleep_order(actor=OLGA, instance_id="v1")
    make_busy(vllm)
    assert looks(2 * sleeping.MOST_TRIES) == []
    action.refresh_from_db()
    assert (len(vllm.verbs), action.tries, WORDS in action.error) == (2 * sleeping.MOST_TRIES, 0, True)
    del vllm.fail["sleep"]
    (decision,) = looks()
    assert (decision.kind, decision.inputs["tries"], vllm.gauge) == ("instance_asleep", 1, "weights_offloaded")


def test_one_that_is_busy_to_the_end_says_so_in_its_decision(vllm, row, monkeypatch):
    action = sleep_order(actor=OLGA, instance_id="v1")
    make_busy(vllm)
    looks()
    monkeypatch.setattr(sleeping, "ANSWER_S", 60.0)
    assert (looks(2), len(vllm.verbs)) == ([], 1), "it is not told with every look, and its words stay"
    action.refresh_from_db()
    assert WORDS in action.error
    Action.objects.update(created_at=timezone.now() - sleeping.TIMEOUT - timedelta(seconds=1))
    (decision,) = looks()
    assert (decision.kind, decision.reason) == ("instance_sleep_failed", "timeout")
    assert WORDS in decision.outcome["error"]
    assert Instance.objects.get(pk="v1").weights == "present"


def test_what_it_was_told_without_effect_before_it_was_busy_still_counts(vllm, row):
    sleep_order(actor=OLGA, instance_id="v1")
    Action.objects.update(tries=sleeping.MOST_TRIES - 1)
    make_busy(vllm)
    assert looks(2) == []
    del vllm.fail["sleep"]
    vllm.deaf = True
    (decision,) = looks()
    assert (decision.reason, decision.inputs["tries"], len(vllm.verbs)) == ("stays_awake", sleeping.MOST_TRIES, 3)
