"""Instances: orders with an audit record, and what is refused."""

import pytest
from django.utils import timezone

from api.control.instances import BACKENDS, PROVISIONERS
from controller.models import Action, Decision, Instance, InstanceInterval
from controller.selectors.snapshot import gateway_snapshot
from controller.services.fleet.scaling_stages import like
from tests import factories
from tests.api.control.conftest import ROOT
from workers.backends.registry import BACKENDS as ADAPTERS
from workers.provisioners import PROVISIONERS as REGISTERED

pytestmark = [pytest.mark.db, pytest.mark.usefixtures("db")]


def test_what_is_on_offer_is_what_is_registered():
    assert set(PROVISIONERS) == set(REGISTERED)
    assert set(BACKENDS) == set(ADAPTERS) - {"fake"}


def test_an_operator_creates_an_engine(operator):
    model = factories.served_model()
    body = {"model": model.name, "backend": "reference", "provisioner": "process", "spec": {"profile": "constant:5ms"}}
    answer = operator.post("/instances", body)
    assert answer.status_code == 201, answer.data
    assert (answer.data["desired_state"], answer.data["observed_state"]) == ("running", "pending")
    assert answer.data["spec"] == {"profile": "constant:5ms"}
    decision = Decision.objects.get(kind="instance_created")
    assert (decision.actor, decision.subject) == (operator.user.username, answer.data["id"])


def test_an_operator_registers_an_endpoint(operator):
    model = factories.served_model()
    body = {"id": "gpu-1", "model": model.name, "backend": "vllm", "provisioner": "static", "url": "http://gpu-1:8000/"}
    answer = operator.post("/instances", body)
    assert answer.status_code == 201, answer.data
    assert answer.data["url"] == "http://gpu-1:8000"
    assert operator.post("/instances", body).status_code == 409


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://user:hunter2@gpu-2:8000", "user or password"),
        ("http://gpu-2:8000/?to=elsewhere", "query"),
        ("http://169.254.169.254/latest", "clouds serve credentials"),
        ("http://198.51.100.7:8000", "in no network of ENGINE_NETWORKS"),
    ],
)
def test_what_may_not_be_called_is_neither_registered_nor_the_new_address_of_an_instance(operator, url, why):
    model = factories.served_model()
    body = {"id": "gpu-1", "model": model.name, "backend": "vllm", "provisioner": "static"}
    refused = operator.post("/instances", body | {"url": url})
    assert (refused.status_code, list(refused.data["error"]["fields"])) == (400, ["url"])
    assert why in str(refused.data)
    assert not Instance.objects.exists()
    made = operator.post("/instances", body | {"url": "http://gpu-1:8000"})
    assert made.status_code == 201, made.data
    refused = operator.patch("/instances/gpu-1", {"url": url, "version": made.data["version"]})
    assert (refused.status_code, list(refused.data["error"]["fields"])) == (400, ["url"])
    assert "hunter2" not in str(refused.data)
    assert Instance.objects.get().url == "http://gpu-1:8000"


def test_a_registered_server_names_its_key_and_the_audit_has_no_more(operator):
    model = factories.served_model()
    body = {"id": "gpu-1", "model": model.name, "backend": "vllm", "provisioner": "static", "url": "http://gpu-1:8000/"}
    answer = operator.post("/instances", body | {"key_name": "../secret_key"})
    assert (answer.status_code, list(answer.data["error"]["fields"])) == (400, ["key_name"])
    answer = operator.post("/instances", body | {"key_name": "gpu-1"})
    assert (answer.status_code, answer.data["key_name"]) == (201, "gpu-1")
    Instance.objects.update(observed_state="ready")
    assert [spec.key for spec in gateway_snapshot().instances] == ["gpu-1"]
    changed = operator.patch("/instances/gpu-1", {"key_name": "", "version": answer.data["version"]})
    assert (changed.status_code, changed.data["key_name"]) == (200, "")
    started = {"model": model.name, "backend": "reference", "provisioner": "process"}
    answer = operator.post("/instances", started | {"key_name": "gpu-1"})
    assert (answer.status_code, list(answer.data["error"]["fields"])) == (400, ["key_name"])
    assert operator.post("/instances", started | {"key_name": ""}).status_code == 201


def test_an_sglang_server_is_registered_and_not_started(operator):
    """Its role is one more thing it must be told: an action, and the row follows."""
    model = factories.served_model()
    body = {"id": "sg-1", "model": model.name, "backend": "sglang", "role": "prefill"}
    refused = operator.post("/instances", {**body, "provisioner": "process"})
    assert refused.status_code == 400
    assert "SGLang is started from a launch template: name one." in str(refused.data)
    answer = operator.post("/instances", {**body, "provisioner": "static", "url": "http://sg-1:30000"})
    assert (answer.status_code, answer.data["role"]) == (201, "prefill")
    Instance.objects.filter(pk="sg-1").update(observed_state="ready")
    assert operator.post("/instances/sg-1/set-role", {"role": "collocated"}).status_code == 400
    ordered = operator.post("/instances/sg-1/set-role", {"role": "decode"})
    assert (ordered.status_code, ordered.data["role"]) == (200, "prefill")
    (action,) = Action.objects.all()
    assert (action.kind, action.params) == ("role_switch", {"role": "decode", "from": "prefill"})
    assert operator.post("/instances/sg-1/set-role", {"role": "decode"}).status_code == 200
    assert Action.objects.count() == 1


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model": "none"}, "model"),
        ({"backend": "magic"}, "backend"),
        ({"backend": "vllm"}, "template"),
        ({"template": "none"}, "template"),
        ({"provisioner": "magic"}, "provisioner"),
        ({"provisioner": "static"}, "url"),
        ({"url": "http://x"}, "url"),
        ({"id": "../../etc"}, "id"),
        ({"id": "a..b"}, "id"),
        ({"host": "none"}, "host"),
        ({"tp": 0}, "tp"),
        ({"unit_cost": -1}, "unit_cost"),
        ({"spec": [1]}, "spec"),
        ({"spec": {"a": {"b": {"c": {"d": {"e": {"f": {"g": 1}}}}}}}}, "spec"),
        ({"spec": {"a": "x\x00"}}, "spec"),
        ({"id": "gpu-1", "provisioner": "static", "url": "ftp://x"}, "url"),
        ({"id": "gpu-1", "provisioner": "static", "url": "http://"}, "url"),
        ({"id": "gpu-1", "provisioner": "static", "url": "http://x:99999"}, "url"),
        ({"spec": {str(i): i for i in range(600)}}, "spec"),
        ({"spec": {"start_after": "x"}}, "spec.start_after"),
        ({"spec": {"start_after": [1]}}, "spec.start_after"),
        ({"spec": {"start_after": 99_999_999_999}}, "spec.start_after"),
        ({"id": "own", "provisioner": "static", "url": "http://x", "spec": {"start_after": "x"}}, "spec.start_after"),
        ({"spec": {"kv_capacity_tokens": "many"}}, "spec.kv_capacity_tokens"),
        ({"spec": {"executor": ["torch"]}}, "spec.executor"),
        ({"spec": {"executor": "torch"}}, "spec.folder"),
        ({"spec": {"max_num_batched_tokens": 3}}, "spec.max_num_batched_tokens"),  # of 32 sequences at once
        ({"spec": {"kv_blocks": -5, "threads": 0}}, "spec.threads"),
    ],
)
def test_what_is_wrong_is_named(operator, change, field):
    body = {"model": factories.served_model().name, "backend": "reference", "provisioner": "process", **change}
    answer = operator.post("/instances", body)
    assert answer.status_code == 400, answer.data
    assert field in answer.data["error"]["fields"], answer.data
    assert not Instance.objects.exists()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            {"profile": "constant:5ms", "kv_leese": 9, "note": "x"},
            "unknown: kv_leese, note; known: ",
        ),
        ({"max_num_seqs": 4}, "max_num_seqs does not belong here: set the instance's own max_num_seqs"),
        ({"tensor_parallel": 2}, "tensor_parallel does not belong here: set the instance's own tp"),
        ({"batching_options": "slots=7"}, "spec.batching_options must be an object"),
        ({"keep_room": "yes"}, "spec.keep_room must be true or false"),
        ({"deadlines": 1}, "spec.deadlines must be true or false"),
    ],
)
def test_what_would_not_reach_an_engine_is_refused(operator, spec, said):
    """Of one that is started here; an endpoint that somebody else runs may have any note."""
    model = factories.served_model().name
    body = {"model": model, "backend": "reference", "provisioner": "process"}
    refused = operator.post("/instances", {**body, "spec": spec})
    assert refused.status_code == 400
    [(field, message)] = refused.data["error"]["fields"].items()
    assert said in f"{field} {message[0]}"
    row = operator.post("/instances", {**body, "spec": {"profile": "constant:5ms"}}).data
    patched = operator.patch(f"/instances/{row['id']}", {"spec": spec, "version": row["version"]})
    assert patched.status_code == 400
    assert patched.data["error"]["fields"] == refused.data["error"]["fields"]
    noted = {**body, "id": "theirs", "provisioner": "static", "url": "http://theirs", "spec": {"note": "x"}}
    assert operator.post("/instances", noted).status_code == 201


def test_an_instance_from_before_names_were_checked_is_edited_and_copied(operator):
    row = factories.instance(provisioner="process", backend="reference", spec={"profile": "constant:5ms", "note": "x"})
    changed = operator.patch(f"/instances/{row.pk}", {"unit_cost": 2.0, "version": row.version})
    assert changed.status_code == 200, changed.data
    assert like(row)["spec"] == {"profile": "constant:5ms"}


def test_half_a_surrogate_pair_is_refused(operator):
    model = factories.served_model().name
    raw = f'{{"model": "{model}", "backend": "reference", "provisioner": "process", "spec": {{"a": "\\ud800"}}}}'
    answer = operator.client.post(f"{ROOT}/instances", raw, content_type="application/json")
    assert answer.status_code == 400
    assert "spec" in answer.data["error"]["fields"]


def test_drain_undrain_and_stop_each_leave_a_record(operator):
    row = factories.instance()
    assert operator.post(f"/instances/{row.pk}/drain", {"version": 1}).data["desired_state"] == "draining"
    running = operator.post(f"/instances/{row.pk}/desired-state", {"desired_state": "running"})
    assert running.data["desired_state"] == "running"
    stopped = operator.post(f"/instances/{row.pk}/stop", None, If_Match='"3"')
    assert (stopped.data["desired_state"], stopped.data["version"]) == ("stopped", 4)
    kinds = list(Decision.objects.filter(actor=operator.user.username).order_by("id").values_list("kind", flat=True))
    assert kinds == ["instance_drained", "instance_undrained", "instance_stopped"]


def test_the_same_desired_state_twice_changes_nothing(operator):
    row = factories.instance()
    for _ in range(2):
        assert operator.post(f"/instances/{row.pk}/drain").data["version"] == 2
    assert Decision.objects.count() == 1


def test_a_change_of_an_older_version_is_a_conflict(operator):
    row = factories.instance(version=5)
    answer = operator.post(f"/instances/{row.pk}/stop", {"version": 4})
    assert answer.data["error"]["code"] == "version_conflict"
    assert operator.post(f"/instances/{row.pk}/stop", {"version": 5}, If_Match='"4"').status_code == 400


def test_what_was_stopped_does_not_run_again(operator):
    row = factories.instance(desired_state="stopped")
    answer = operator.post(f"/instances/{row.pk}/desired-state", {"desired_state": "running"})
    assert answer.status_code == 400
    assert "desired_state" in answer.data["error"]["fields"]


def test_an_instance_is_changed_with_its_version(operator):
    row = factories.instance()
    answer = operator.patch(f"/instances/{row.pk}", {"max_num_seqs": 64, "version": 1})
    assert answer.data["max_num_seqs"] == 64
    assert operator.patch(f"/instances/{row.pk}", {"max_num_seqs": 8, "version": 1}).status_code == 412
    assert operator.patch(f"/instances/{row.pk}", {"role": "prefill", "version": 2}).status_code == 400


def test_how_many_at_once_is_left_to_a_registered_server_unless_it_is_said(operator):
    factories.served_model(name="demo")
    endpoint = {"id": "e", "model": "demo", "backend": "vllm", "provisioner": "static", "url": "http://e:8000"}
    assert operator.post("/instances", endpoint).data["max_num_seqs"] is None
    answer = operator.patch("/instances/e", {"max_num_seqs": 32, "version": 1})
    assert (answer.data["max_num_seqs"], answer.data["version"]) == (32, 2)
    assert gateway_snapshot().instances == (), "not ready yet"
    Instance.objects.update(observed_state="ready")
    assert [each.max_num_seqs for each in gateway_snapshot().instances] == [32]
    assert operator.patch("/instances/e", {"max_num_seqs": None, "version": 2}).data["max_num_seqs"] is None
    assert [each.max_num_seqs for each in gateway_snapshot().instances] == [None]
    after = Decision.objects.filter(kind="instance_updated").order_by("id").last().inputs["after"]
    assert after == {"seqs_unsaid": True}


def test_what_is_started_here_is_told_how_many_at_once(operator):
    factories.served_model(name="demo")
    body = {"model": "demo", "backend": "reference", "provisioner": "process"}
    assert operator.post("/instances", body).data["max_num_seqs"] == 32
    assert "max_num_seqs" in operator.post("/instances", {**body, "max_num_seqs": None}).data["error"]["fields"]
    row = factories.instance()
    answer = operator.patch(f"/instances/{row.pk}", {"max_num_seqs": None, "version": 1})
    assert "max_num_seqs" in answer.data["error"]["fields"]


def test_a_registered_one_can_be_forgotten_as_soon_as_it_was_stopped(operator):
    """No process of ours has to end first, whatever was last seen of it."""
    row = factories.instance(provisioner="static", observed_state="unreachable")
    assert operator.post(f"/instances/{row.pk}/stop").status_code == 200
    assert operator.delete(f"/instances/{row.pk}").status_code == 204


def test_one_that_is_started_here_is_still_ending_after_its_stop(operator):
    row = factories.instance(provisioner="process", observed_state="ready")
    operator.post(f"/instances/{row.pk}/stop")
    answer = operator.delete(f"/instances/{row.pk}")
    assert answer.status_code == 409
    told = f"{row.pk} is stopping and still ready. Try again in a few seconds, once it has ended."
    assert answer.data["error"]["fields"]["desired_state"] == [told]


def test_only_a_stopped_instance_is_forgotten(operator):
    row = factories.instance()
    assert operator.delete(f"/instances/{row.pk}").status_code == 409
    Instance.objects.update(desired_state="stopped", observed_state="stopped")
    assert operator.delete(f"/instances/{row.pk}").status_code == 204
    assert Decision.objects.get(kind="instance_removed").subject == row.pk


def test_the_list_is_narrowed(viewer):
    model = factories.served_model()
    here = factories.instance(model, host=factories.host(name="h1"))
    gone = factories.instance(desired_state="stopped", observed_state="stopped")

    def ids(**query):
        return [row["id"] for row in viewer.get("/instances", **query).data["items"]]

    assert ids(model=model.name) == ids(host="h1") == ids(live="true") == ids(observed_state="ready") == [here.pk]
    assert ids(live="false") == ids(desired_state="stopped") == [gone.pk]
    assert ids(host="") == [gone.pk]


def test_a_role_is_set_with_a_record_and_its_own_cost(operator):
    row = factories.instance(observed_state="ready")
    InstanceInterval.objects.create(instance=row, role=row.role, unit_cost=2.0, started_at=timezone.now())
    answer = operator.post(f"/instances/{row.pk}/set-role", {"role": "prefill", "version": 1})
    assert (answer.status_code, answer.data["role"], answer.data["version"]) == (200, "prefill", 2)
    assert Decision.objects.filter(kind="instance_role_set", subject=row.pk).count() == 1
    assert [(each.role, each.ended_at is None) for each in row.intervals.order_by("id")] == [
        ("collocated", False),
        ("prefill", True),
    ]
    again = operator.post(f"/instances/{row.pk}/set-role", {"role": "prefill"})
    assert again.data["version"] == 2


def test_a_wrong_role_and_an_old_version_are_refused(operator, viewer):
    row = factories.instance()
    assert operator.post(f"/instances/{row.pk}/set-role", {"role": "leader"}).status_code == 400
    assert operator.post(f"/instances/{row.pk}/set-role", {"role": "decode", "version": 9}).status_code == 412
    assert viewer.post(f"/instances/{row.pk}/set-role", {"role": "decode"}).status_code == 403
