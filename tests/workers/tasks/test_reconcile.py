"""The reconciler against a real database and a scripted provisioner: every look repeated must come to rest."""

import time
from datetime import timedelta
from pathlib import Path

import pytest
from django.core.exceptions import ValidationError
from django.utils import timezone

from controller.models import Decision, Instance, InstanceInterval, LaunchTemplate, ProvisionerLook
from controller.policies.batching import selects
from controller.selectors.fleet.topology import provisioners_unseen
from controller.selectors.snapshot import config_version, gateway_snapshot
from controller.services.actors import SYSTEM
from controller.services.fleet.instances import (
    instance_create,
    instance_drain,
    instance_register,
    instance_remove,
    instance_set_role,
    instance_stop,
)
from controller.services.fleet.lifecycle import instance_error_set
from controller.services.fleet.scaling_stages import stage_of
from controller.services.fleet.served_models import served_model_create
from controller.wording.sentences import sentence
from tests import factories
from tests.workers.sleep_orders import Killed
from workers.engine.config import parse
from workers.ray.jobs import HostSeen
from workers.supervisor.engine_processes import engine_argv
from workers.tasks import reconcile
from workers.tasks.reconcile import reconcile_once

pytestmark = [pytest.mark.django_db, pytest.mark.db]


def message(**running):
    instances = [{"id": id, "utilisation": 0.1, "running": n, "waiting": 0} for id, n in running.items()]
    return [{"at": time.time(), "period_s": 1.0, "instances": instances}]


def kinds():
    return list(Decision.objects.filter(actor="reconciler").order_by("pk").values_list("kind", flat=True))


def test_from_created_to_ready(look, fake, one):
    look()
    desired = {"profile": "constant:5ms", "model": "mid", "role": "collocated", "max_num_seqs": 5}
    assert desired.items() <= fake.started["e1"].items()
    fake.becomes("e1", "starting")
    look(3)
    fake.becomes("e1", "ready")
    look(3)
    row = Instance.objects.get(pk="e1")
    assert (row.observed_state, row.url, row.observed_generation) == ("ready", fake.seen["e1"].url, row.generation)
    assert kinds() == ["instance_started", "instance_ready"]
    assert InstanceInterval.objects.filter(instance=row, ended_at=None).count() == 1


def test_one_that_starts_again_is_not_told_with_the_time_since_it_was_requested(look, fake, one):
    """`make up` was stopped overnight: the start took seconds, whatever the time since the request."""
    fake.becomes("e1", "ready")
    look()
    for state in ("starting", "ready"):
        fake.becomes("e1", state, started_at=time.time() + 60.0)
        look()
    told = [sentence(each) for each in Decision.objects.filter(actor="reconciler").order_by("pk")]
    assert told[0].startswith("e1 is ready, 0.")
    assert told[1:] == ["e1 is starting again", "e1 is ready again"]


@pytest.mark.parametrize(
    ("spec", "longest"),
    [
        ({}, 2048),
        ({"max_model_len": 512}, 512),
        ({"kv_capacity_tokens": 1024}, 1024),  # no more than its KV cache holds
    ],
)
def test_an_engine_is_told_the_context_that_its_model_promises(look, fake, spec, longest):
    model = served_model_create(actor=SYSTEM, name="short", context_tokens=2048)
    instance_create(actor=SYSTEM, id="e1", model=model, spec=spec)
    look()
    assert parse(engine_argv(1, fake.started["e1"])[3:]).engine.max_model_len == longest


def test_a_longer_context_than_the_engines_own_default_is_told_too(look, fake):
    model = served_model_create(actor=SYSTEM, name="long", context_tokens=32_768)
    instance_create(actor=SYSTEM, id="e1", model=model)
    look()
    assert parse(engine_argv(1, fake.started["e1"])[3:]).engine.max_model_len == 32_768


@pytest.mark.parametrize("submitted", [True, False])
def test_a_worker_that_is_killed_at_a_start_starts_one_engine(look, fake, one, monkeypatch, submitted):
    """Before its order reached the provisioner, or after that and before anybody stored what came of it."""
    start, started = fake.start, []

    def killed(id, spec):
        if submitted:
            start(id, spec)
            started.append(id)
        raise Killed

    monkeypatch.setattr(fake, "start", killed)
    with pytest.raises(Killed):
        look()
    monkeypatch.setattr(fake, "start", lambda id, spec: (started.append(id), start(id, spec)))
    look(3)
    assert started == ["e1"]
    assert [(row.pk, row.observed_state) for row in Instance.objects.all()] == [("e1", "starting")]


def test_a_crashed_instance_is_replaced_once(look, fake, one):
    fake.becomes("e1", "ready")
    look()
    fake.becomes("e1", "exited", exit_code=-9)
    look(3)
    failed = Instance.objects.get(pk="e1")
    assert (failed.observed_state, failed.desired_state, failed.error) == (
        "failed",
        "stopped",
        "was killed by signal 9",
    )
    assert not failed.intervals.filter(ended_at=None).exists()
    [decision] = Decision.objects.filter(kind="instance_replaced")
    [other] = Instance.objects.exclude(pk="e1")
    assert decision.outcome == {"replacement": other.pk}
    assert other.pk in fake.started
    assert "e1" in fake.stopped


@pytest.mark.parametrize(("others", "outcome"), [(1, "replacement"), (2, "held")])
def test_one_that_was_out_of_sight_is_replaced_once_by_scaler_or_reconciler(look, fake, one, policy, others, outcome):
    """The scaler does not count one that is lost, so it may have filled its place before the engine ends."""
    type(policy).objects.filter(pk=policy.pk).update(max_instances=2)
    fake.becomes("e1", "ready")
    look()
    fake.becomes("e1", "lost")
    look()
    for number in range(others):
        instance_create(actor=SYSTEM, id=f"other-{number}", model=policy.model)
    look()
    fake.becomes("e1", "exited")
    look(2)
    [decision] = Decision.objects.filter(kind="instance_replaced")
    assert set(decision.outcome) == {outcome}
    assert Instance.objects.get(pk="e1").observed_state == "failed"
    assert Instance.objects.live().filter(desired_state="running").count() == 2


def test_one_that_keeps_crashing_is_started_later_and_later(look, fake, one):
    for _ in range(4):
        look(2)
        for id in list(fake.seen):
            fake.becomes(id, "exited", exit_code=1)
        look(2)
        Instance.objects.filter(desired_state="running").update(spec={"start_after": 0})
    pauses = [d.inputs["pause_s"] for d in Decision.objects.filter(kind="instance_replaced").order_by("pk")]
    assert pauses == [0.0, 1.0, 2.0, 4.0]


def crash(fake, look, **how):
    """What runs ends, and so does what comes in its place, until nothing is started any more. How many ended."""
    ended = 0
    for _ in range(30):
        Instance.objects.filter(desired_state="running").update(spec={"profile": "constant:5ms"})
        look(2)
        if not Instance.objects.filter(desired_state="running").exists():
            return ended
        for id in list(fake.seen):
            fake.becomes(id, "exited", **how)
            ended += 1
    raise AssertionError("it goes on forever")


def test_settings_that_the_engine_refuses_are_given_up_after_three(look, fake, one):
    assert crash(fake, look, exit_code=2, error="error: --threads: must be at least 1") == 3
    last = Instance.objects.order_by("created_at").last()
    assert last.error == "given up: its settings are refused by the engine: error: --threads: must be at least 1"
    assert (last.desired_state, last.observed_state) == ("stopped", "failed")
    decision = Decision.objects.get(kind="instance_given_up")
    assert (decision.subject, decision.reason, decision.inputs["never_ready"]) == (last.pk, "settings_refused", 3)
    assert not Instance.objects.filter(desired_state="running").exists()


def test_a_chain_in_which_none_became_ready_is_given_up(look, fake, one):
    assert crash(fake, look, exit_code=1, error="ValueError: x") == 8
    last = Instance.objects.order_by("created_at").last()
    assert last.error == "given up: 8 in a row never became ready, the last: exit code 1: ValueError: x"
    assert Decision.objects.get(kind="instance_given_up").reason == "never_ready"


def test_one_that_was_ready_begins_a_new_count(look, fake, one):
    for _ in range(2):
        look(2)
        fake.becomes(next(iter(fake.seen)), "exited", exit_code=2)
        look()
        Instance.objects.filter(desired_state="running").update(spec={})
    look()
    fake.becomes(next(iter(fake.seen)), "ready")
    look()
    assert crash(fake, look, exit_code=2) == 4  # itself, and three in its place


def test_a_row_whose_settings_would_be_refused_is_not_copied(look, fake, one):
    """From before values were checked."""
    fake.becomes("e1", "ready")
    look()
    Instance.objects.filter(pk="e1").update(spec={"threads": 0})
    fake.becomes("e1", "exited", exit_code=1)
    look(2)
    row = Instance.objects.get()
    assert row.error == "given up: its settings are refused: spec.threads must be a whole number from 1 to 4096."
    assert Decision.objects.get(kind="instance_given_up").reason == "settings_refused"


def test_the_scaler_copies_none_whose_settings_were_refused(look, fake, one, policy):
    crash(fake, look, exit_code=2, error="error: no")
    stage = stage_of(policy, [], time.time())
    assert (stage.pattern, stage.capacity.can_add(time.time())) == (None, False)


def test_a_replacement_waits_out_its_pause(look, fake, one):
    Instance.objects.filter(pk="e1").update(spec={"start_after": time.time() + 60})
    look(2)
    assert fake.started == {}


@pytest.mark.parametrize("bad", ["x", [1], {"a": 1}, True])
def test_one_whose_start_is_no_time_waits_and_says_so_and_the_others_go_on(look, fake, one, policy, bad):
    """A row from before values were checked, of whatever provisioner."""
    instance_create(actor=SYSTEM, id="a0", model=policy.model)
    instance_register(actor=SYSTEM, id="s1", model=policy.model, url="http://h:1")
    Instance.objects.filter(pk__in=("a0", "s1")).update(spec={"start_after": bad})
    look(2)
    row = Instance.objects.get(pk="a0")
    assert set(fake.started) == {"e1"}
    assert row.error == "does not start: spec.start_after must be a time in epoch seconds, at most a day ahead."
    assert [each.not_before for each in gateway_snapshot().coming if each.id == "a0"] == [0.0]
    instance_stop(actor=SYSTEM, instance_id="a0")
    look(2)
    assert Instance.objects.get(pk="a0").observed_state == "stopped"


def test_a_spec_that_cannot_be_told_is_said_on_its_row_and_the_others_go_on(look, fake, one, policy):
    instance_create(actor=SYSTEM, id="a0", model=policy.model)
    Instance.objects.filter(pk="a0").update(spec={"executor": "torch"})  # without its folder
    look(2)
    assert set(fake.started) == {"e1"}
    assert Instance.objects.get(pk="a0").error == "KeyError: 'folder'"


def test_a_drain_ends_when_the_gateways_say_it_is_empty(look, fake, one):
    fake.becomes("e1", "ready")
    look()
    instance_drain(actor=SYSTEM, instance_id="e1")
    Instance.objects.filter(pk="e1").update(desired_at=timezone.now() - timedelta(seconds=5))
    look.fleet = message(e1=2)
    look(2)
    assert Instance.objects.get(pk="e1").observed_state == "draining"
    look.fleet = []  # nobody tells: not known to be empty
    look(2)
    assert Instance.objects.get(pk="e1").desired_state == "draining"
    look.fleet = message(e1=0)
    look(4)
    row = Instance.objects.get(pk="e1")
    assert (row.desired_state, row.observed_state) == ("stopped", "stopped")
    assert kinds()[-4:] == ["instance_draining", "instance_drained", "instance_stopped", "instance_gone"]
    assert Decision.objects.get(kind="instance_drained", actor="reconciler").reason == "drained"


def test_stopping_is_carried_out_and_recorded(look, fake, one):
    fake.becomes("e1", "ready")
    look()
    instance_stop(actor=SYSTEM, instance_id="e1")
    look(3)
    assert "e1" in fake.stopped
    row = Instance.objects.get(pk="e1")
    assert row.observed_state == "stopped"
    assert not row.intervals.filter(ended_at=None).exists()


@pytest.mark.parametrize("started", [False, True])
def test_one_stopped_before_it_was_seen_comes_to_its_end(look, fake, one, started):
    """Its devices are free again, and it can be removed."""
    if started:
        look()
    instance_stop(actor=SYSTEM, instance_id="e1")
    look(3)
    assert Instance.objects.get(pk="e1").observed_state == "stopped"
    assert kinds() == ["instance_gone"]
    assert "e1" in fake.stopped
    instance_remove(actor=SYSTEM, instance_id="e1")


def test_a_new_run_closes_the_interval_where_the_former_was_last_seen(look, fake, one):
    fake.becomes("e1", "ready", started_at=time.time() - 7200)
    look()
    an_hour_ago = timezone.now() - timedelta(hours=1)
    InstanceInterval.objects.update(started_at=an_hour_ago - timedelta(hours=1))
    Instance.objects.update(observed_at=an_hour_ago, ready_at=an_hour_ago)
    fake.becomes("e1", "ready", started_at=time.time(), url="http://127.0.0.1:9999")
    look(2)
    former, current = InstanceInterval.objects.order_by("started_at")
    assert former.ended_at == an_hour_ago
    assert current.ended_at is None
    assert Instance.objects.get(pk="e1").url == "http://127.0.0.1:9999"
    assert Decision.objects.filter(kind="instance_ready", reason="new_run").count() == 1
    assert Instance.objects.get(pk="e1").ready_at > an_hour_ago, "it is ready since its new run"


def test_a_process_no_one_wants_is_stopped(look, fake, one):
    fake.becomes("ghost", "ready")
    look()
    assert "ghost" in fake.stopped


def test_one_instance_in_trouble_does_not_hold_the_others_up(look, fake, one, policy, monkeypatch):
    instance_create(actor=SYSTEM, id="a0", model=policy.model, provisioner="nowhere")
    look()
    assert "e1" in fake.started


def test_a_step_that_is_refused_does_not_hold_the_others_up(look, fake, one, policy, monkeypatch):
    def refuse(*, step):
        raise ValidationError({"host": "0 of 1 devices free"})

    monkeypatch.setattr(reconcile.lifecycle, "instance_replace", refuse)
    instance_create(actor=SYSTEM, id="a0", model=policy.model)
    fake.becomes("a0", "exited", exit_code=1)
    look()
    assert "e1" in fake.started


def test_an_endpoint_that_goes_and_comes_back_is_told_each_time(look, fake, policy):
    static = type(fake)()
    instance_register(actor=SYSTEM, id="s1", model=policy.model, url="http://h:1")
    for state in ("ready", "exited", "ready", "exited"):
        static.becomes("s1", state, started_at=None, url="http://h:1")
        for _ in range(2):
            reconcile_once({"static": static}, time.time())
    assert kinds() == ["instance_ready", "instance_unreachable"] * 2


def test_what_was_said_of_an_endpoint_is_compared_when_it_joins_and_not_again(policy):
    """A role may be turned while it serves."""
    both = {"role": "prefill", "spec": {"kv_role": "kv_both"}}
    instance_register(actor=SYSTEM, id="v1", model=policy.model, url="http://h:1", **both)
    joins = reconcile.provisioners(Path("/nowhere"))["static"].endpoints["v1"]
    assert (joins.backend, joins.role, joins.kv_role, joins.known) == ("vllm", "prefill", "kv_both", False)
    Instance.objects.update(observed_state="ready")
    serves = reconcile.provisioners(Path("/nowhere"))["static"].endpoints["v1"]
    assert (serves.role, serves.kv_role) == ("", "")
    Instance.objects.update(observed_state="unreachable", ready_at=timezone.now())
    assert reconcile.provisioners(Path("/nowhere"))["static"].endpoints["v1"].known, "it was ready once"


@pytest.mark.parametrize("deadlines", [False, True])
@pytest.mark.parametrize(
    "roles", [("prefill", "decode", "collocated"), ("decode", "prefill"), ("collocated", "prefill")]
)
def test_what_gateways_believe_of_an_engines_scheduler_is_what_runs_there(
    look, fake, policy, roles, deadlines, fleet_token
):
    """The scheduler is chosen by the role of the start, and neither a role given later nor a restart changes it."""
    spec = {"scheduler": "slackline", "deadlines": deadlines}
    instance_create(actor=SYSTEM, id="s1", model=policy.model, role="collocated", spec=spec)
    instance_set_role(actor=SYSTEM, instance_id="s1", role=roles[0])  # before it is started
    look()
    told = fake.started["s1"]
    assert told["role"] == roles[0]
    runs = selects(parse(engine_argv(1, told)[3:]).batching.name)
    for run in range(2):
        InstanceInterval.objects.filter(ended_at=None).update(started_at=timezone.now() - timedelta(hours=1))
        fake.becomes("s1", "ready", started_at=time.time() - 60 + run)
        look()
        for role in (*roles, roles[0]):
            instance_set_role(actor=SYSTEM, instance_id="s1", role=role)
            (seen,) = gateway_snapshot().instances
            assert (seen.role, seen.selects) == (role, runs)
    assert Decision.objects.filter(kind="instance_ready", reason="new_run").count() == 1


def test_a_process_without_a_spec_file_gets_the_role_of_its_first_start(look, fake, policy):
    """Whoever told it may or may not tell it the old one again, so that it is always that one."""
    instance_create(actor=SYSTEM, id="s1", model=policy.model, role="decode")
    look()
    instance_set_role(actor=SYSTEM, instance_id="s1", role="prefill")
    fake.seen.clear()
    fake.started.clear()
    look()
    assert fake.started["s1"]["role"] == "decode"


def test_an_endpoint_that_is_registered_was_started_in_the_role_it_is_registered_with(policy):
    spec = {"scheduler": "slackline"}
    instance_register(
        actor=SYSTEM, id="s1", model=policy.model, url="http://h:1", backend="reference", role="prefill", spec=spec
    )
    Instance.objects.update(observed_state="ready")
    for role in ("prefill", "collocated", "decode", "prefill"):
        instance_set_role(actor=SYSTEM, instance_id="s1", role=role)
        (seen,) = gateway_snapshot().instances
        assert (seen.role, seen.selects) == (role, True)


# ---- provisioners, each by itself ------------------------------------------------------------------------------------


class Away:
    """A provisioner that cannot be reached."""

    def __init__(self):
        self.calls = []

    def observe(self):
        raise ConnectionError("no route")

    def start(self, id, spec):
        self.calls.append(("start", id))

    def stop(self, id, grace_s):
        self.calls.append(("stop", id))


def test_one_that_is_away_keeps_its_instances_as_last_seen_and_the_others_go_on(look, fake, one, policy):
    for id in ("r1", "d1", "g1"):
        instance_create(actor=SYSTEM, id=id, model=policy.model)
        fake.becomes(id, "ready")
    look(2)
    instance_drain(actor=SYSTEM, instance_id="d1")
    instance_stop(actor=SYSTEM, instance_id="g1")
    Instance.objects.filter(pk="d1").update(desired_at=timezone.now() - timedelta(days=1))
    before = list(Instance.objects.order_by("pk").values("pk", "observed_state", "desired_state", "url", "error"))
    away, static, since = Away(), type(fake)(), time.time()
    instance_register(actor=SYSTEM, id="s1", model=policy.model, url="http://h:1")
    static.becomes("s1", "ready", url="http://h:1")
    for _ in range(3):
        steps = reconcile_once({"process": away, "static": static}, time.time())
    assert (steps, away.calls) == ([], [])
    assert list(Instance.objects.exclude(pk="s1").order_by("pk").values(*before[0])) == before
    assert Instance.objects.get(pk="s1").observed_state == "ready"
    stale = ProvisionerLook.objects.get(name="process")
    assert (stale.error, stale.instances) == ("ConnectionError: no route", 4)
    assert stale.failing_since.timestamp() >= since > stale.seen_at.timestamp()
    assert ProvisionerLook.objects.get(name="static").failing_since is None
    assert [each.name for each in provisioners_unseen()] == ["process"]
    look(3)
    assert Instance.objects.get(pk="g1").observed_state == "stopped"
    assert provisioners_unseen() == []


def test_what_two_provisioners_call_by_one_name_is_told_apart(look, fake, one):
    """An instance is looked for at its own provisioner, and a stranger elsewhere is stopped there."""
    other = type(fake)()
    other.becomes("e1", "ready")
    reconcile_once({"process": fake, "static": other}, time.time())
    assert "e1" in fake.started
    assert (fake.stopped, other.stopped) == ([], ["e1"])


def test_gateways_expect_no_instance_that_waits_for_a_place(look, fake, one):
    """Nobody knows when it gets one. Until it was looked at it counts: most begin at once."""
    template = LaunchTemplate.objects.create(name="t", backend="vllm", command=["vllm"])
    took = {"process": 100.0, "ready": 130.0}
    factories.instance(one.model, id="before", template=template, start_steps=took)
    Instance.objects.filter(pk="e1").update(template=template, backend=template.backend)

    def expected() -> float:
        return next(each.serves_at for each in gateway_snapshot().coming if each.id == "e1")

    assert expected() == pytest.approx(time.time() + 30.0, abs=5.0)
    look()
    version = config_version()
    fake.becomes("e1", "pending", url="", started_at=None, error="waits for 2 GPU on one node: the most is 0")
    look()
    assert expected() == 0.0
    assert config_version() > version, "gateways hear of it"
    began = time.time()
    fake.becomes("e1", "starting", error="", started_at=began, steps={"process": began})
    look()
    assert expected() == pytest.approx(began + 30.0)


def test_the_steps_of_a_start_are_stored_again_only_where_they_changed(look, fake, one):
    """A launcher elsewhere tells ages, so that its times differ a little from look to look."""
    began = time.time()

    def stored(**steps: float) -> tuple[dict[str, float], object]:
        fake.becomes("e1", "starting", started_at=began, steps=steps)
        look()
        return Instance.objects.values_list("start_steps", "updated_at").get(pk="e1")

    first = stored(process=began)
    assert stored(process=began - 0.4) == first
    steps, _ = stored(process=began - 0.4, ready=began + 9.6)
    assert steps == {"process": began - 0.4, "ready": began + 9.6}
    steps, _ = stored(process=began + 5.0, ready=began + 15.0)
    assert steps == {"process": began + 5.0, "ready": began + 15.0}, "this host's clock was set"


def test_gateways_expect_no_instance_whose_start_fails(one):
    template = LaunchTemplate.objects.create(name="t", backend="vllm", command=["vllm"])
    factories.instance(one.model, id="before", template=template, start_steps={"process": 100.0, "ready": 130.0})
    Instance.objects.filter(pk="e1").update(template=template, backend=template.backend)
    version = config_version()
    instance_error_set(instance_id="e1", error="its host has no free device")
    assert [each.serves_at for each in gateway_snapshot().coming if each.id == "e1"] == [0.0]
    assert config_version() > version, "gateways hear of it"
    version = config_version()
    instance_error_set(instance_id="e1", error="its host has no free device")
    assert config_version() == version


def test_pending_says_for_want_of_what_and_has_no_limit(look, fake, one):
    look()
    Instance.objects.update(desired_at=timezone.now() - timedelta(days=1))
    fake.becomes("e1", "pending", url="", started_at=None, error="waits for a device of kind H100")
    look(3)
    row = Instance.objects.get(pk="e1")
    assert (row.observed_state, row.error) == ("pending", "waits for a device of kind H100")
    fake.becomes("e1", "pending", url="", started_at=None, error="waits for 2 CPUs")
    look(3)
    assert Instance.objects.get(pk="e1").error == "waits for 2 CPUs"
    assert kinds() == ["instance_pending", "instance_pending"]
    assert sentence(Decision.objects.filter(kind="instance_pending").earliest("pk")) == (
        "e1 waits for a device of kind H100"
    )
    assert not InstanceInterval.objects.exists(), "it costs nothing yet"


@pytest.mark.parametrize(("state", "kind"), [("unhealthy", "instance_unhealthy"), ("lost", "instance_lost")])
def test_one_in_doubt_gets_no_requests_and_is_replaced_once_it_has_certainly_ended(look, fake, one, state, kind):
    fake.becomes("e1", "ready")
    look()
    assert [each.id for each in gateway_snapshot().instances] == ["e1"]
    fake.becomes("e1", state, error="node n1 is gone")
    look(3)
    assert gateway_snapshot().instances == ()
    assert Instance.objects.count() == 1, "its engine may still run"
    assert kinds()[-1] == kind
    fake.becomes("e1", "ready")
    look()
    assert [each.id for each in gateway_snapshot().instances] == ["e1"]
    fake.becomes("e1", state)
    look()
    fake.becomes("e1", "exited", exit_code=None, error="its lease has ended")
    look(2)
    assert Instance.objects.get(pk="e1").observed_state == "failed"
    assert Instance.objects.filter(desired_state="running").count() == 1


# ---- launch templates ------------------------------------------------------------------------------------------------


def test_a_cluster_that_no_worker_knows_is_not_an_empty_one(policy, fake):
    row = instance_create(actor=SYSTEM, id="r1", model=policy.model)
    Instance.objects.filter(pk="r1").update(provisioner="ray", observed_state="ready", url="http://h:1")
    instance_stop(actor=SYSTEM, instance_id=row.pk)
    assert reconcile_once({"process": fake}, time.time()) == []
    assert Instance.objects.get(pk="r1").observed_state == "ready", "nobody knows whether it has ended"


def test_hosts_of_a_cluster_are_kept_while_it_is_away(policy, fake):
    class Cluster(type(fake)):
        away = False

        def observe(self):
            if self.away:
                raise OSError("no route")
            return []

        def hosts(self):
            return [] if self.away else [HostSeen("10.0.0.2", "alive", {"GPU": (1.0, 2.0)}, {})]

    cluster = Cluster()
    reconcile_once({"ray/default": cluster}, time.time())
    cluster.away = True
    reconcile_once({"ray/default": cluster}, time.time())
    look = ProvisionerLook.objects.get(name="ray/default")
    assert [host["name"] for host in look.hosts] == ["10.0.0.2"]
    assert look.failing_since is not None
    reconcile_once({"process": fake}, time.time())
    assert not ProvisionerLook.objects.filter(name="ray/default").exists(), "no worker has it in its settings any more"
