"""Models, hosts, devices, links and scaling policies."""

import pytest

from controller.models import Decision, Host, ServedModel
from tests import factories

pytestmark = [pytest.mark.db, pytest.mark.usefixtures("db")]


def test_an_admin_registers_a_model(admin):
    answer = admin.post("/models", {"name": "meta/llama-3", "aliases": ["llama"], "context_tokens": 8192})
    assert answer.status_code == 201, answer.data
    assert (answer.data["aliases"], answer.data["tokenizer"]) == (["llama"], "")
    answer = admin.patch(
        f"/models/{answer.data['id']}",
        {"context_tokens": 4096, "tokenizer": "/models/llama/tokenizer.json", "version": 1},
    )
    assert (answer.data["context_tokens"], answer.data["tokenizer"]) == (4096, "/models/llama/tokenizer.json")
    assert Decision.objects.filter(subject_type="served_model", actor=admin.user.username).count() == 2


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"context_tokens": 0}, "context_tokens"),
        ({"chars_per_token": 0}, "chars_per_token"),
        ({"tokenizer": "models/demo/tokenizer.json"}, "tokenizer"),
        ({"tokenizer": 5}, "tokenizer"),
        ({"tokenizer": "/" + 500 * "x"}, "tokenizer"),
        ({"aliases": ["a b"]}, "aliases.0"),
        ({"aliases": "llama"}, "aliases"),
        ({"name": "/etc"}, "name"),
    ],
)
def test_a_wrong_model_is_named(admin, change, field):
    answer = admin.post("/models", {"name": "llama", **change})
    assert answer.status_code == 400, answer.data
    assert field in answer.data["error"]["fields"], answer.data


def test_a_model_in_use_cannot_be_removed(admin):
    row = factories.instance().model
    answer = admin.delete(f"/models/{row.pk}")
    assert (answer.status_code, answer.data["error"]["code"]) == (409, "conflict")
    assert "in use by" in answer.data["error"]["message"]
    assert ServedModel.objects.filter(pk=row.pk).exists()
    assert not Decision.objects.filter(kind="served_model_removed").exists()


def test_a_host_with_device_and_links(admin):
    for name in ("a", "b"):
        assert admin.post("/hosts", {"name": name, "labels": {"rack": "7"}}).status_code == 201
    device = admin.post("/devices", {"host": "a", "index": 0, "kind": "A100", "memory_bytes": 80 * 2**30})
    assert device.data["host"] == "a", device.data
    link = admin.post("/links", {"source": "a", "target": "b", "medium": "rdma", "bandwidth_bytes_s": 25e9})
    assert link.status_code == 201, link.data
    down = admin.patch(f"/links/{link.data['id']}", {"state": "down", "version": 1})
    assert down.data["state"] == "down"
    kinds = set(Decision.objects.filter(actor=admin.user.username).values_list("kind", flat=True))
    assert kinds == {"host_created", "device_created", "link_created", "link_updated"}
    assert [row["kind"] for row in admin.get("/devices", host="a").data["items"]] == ["A100"]
    assert admin.get("/links", source="b").data["items"] == []


def test_a_host_is_changed_and_removed(admin):
    row = factories.host()
    assert admin.patch(f"/hosts/{row.pk}", {"zone": "z2", "version": 1}).data["zone"] == "z2"
    assert admin.patch(f"/hosts/{row.pk}", {"zone": "z3", "version": 1}).status_code == 412
    assert admin.delete(f"/hosts/{row.pk}", If_Match='"2"').status_code == 204
    assert not Host.objects.exists()


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/hosts", {"name": "a", "labels": {"x": {"deep": 1}}}, "labels.x"),
        ("/hosts", {"name": "a", "labels": ["x"]}, "labels"),
        ("/hosts", {"name": "a", "labels": {"x\x00": "y"}}, "labels"),
        ("/devices", {"host": "none", "index": 0, "kind": "x", "memory_bytes": 1}, "host"),
        ("/devices", {"host": "here", "index": 40_000, "kind": "x", "memory_bytes": 1}, "index"),
        ("/devices", {"host": "here", "index": 0, "kind": "x", "memory_bytes": 0}, "memory_bytes"),
        ("/links", {"source": "here", "target": "none", "medium": "x", "bandwidth_bytes_s": 1}, "target"),
        ("/links", {"source": "here", "target": "here", "medium": "x", "bandwidth_bytes_s": 0}, "bandwidth_bytes_s"),
    ],
)
def test_wrong_topology_is_named(admin, path, body, field):
    factories.host(name="here")
    answer = admin.post(path, body)
    assert answer.status_code == 400, answer.data
    assert field in answer.data["error"]["fields"], answer.data


def test_a_device_twice_is_a_conflict(admin):
    factories.host(name="here")
    body = {"host": "here", "index": 0, "kind": "cpu", "memory_bytes": 1}
    assert admin.post("/devices", body).status_code == 201
    answer = admin.post("/devices", body)
    assert (answer.status_code, set(answer.data["error"]["fields"])) == (409, {"host", "index"})


def test_a_second_scaling_policy_names_the_model_and_the_role(operator):
    body = {"model": factories.served_model(name="m").name}
    assert operator.post("/scaling-policies", body).status_code == 201
    answer = operator.post("/scaling-policies", body)
    assert answer.status_code == 409
    told = "Scaling policy with this Model and Role already exists."
    assert answer.data["error"] == {
        "code": "conflict", "message": told, "fields": {"model": [told], "role": [told]},
    }  # fmt: skip


def test_an_operator_sets_a_scaling_policy(operator):
    model = factories.served_model()
    answer = operator.post("/scaling-policies", {"model": model.name, "max_instances": 6})
    assert answer.status_code == 201, answer.data
    answer = operator.patch(f"/scaling-policies/{answer.data['id']}", {"enabled": False, "version": 1})
    assert answer.data["enabled"] is False
    assert Decision.objects.filter(subject_type="scaling_policy", actor=operator.user.username).count() == 2
    assert operator.get("/scaling-policies", enabled="true").data["items"] == []
    assert len(operator.get("/scaling-policies", model=model.name, enabled="false").data["items"]) == 1


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"min_instances": 5, "max_instances": 2}, "max_instances"),
        ({"upper": 0.2, "lower": 0.5}, "lower"),
        ({"interval_s": 0}, "interval_s"),
        ({"sustain_s": -1}, "sustain_s"),
        ({"role": "boss"}, "role"),
        ({"model": "none"}, "model"),
    ],
)
def test_a_wrong_scaling_policy_is_named(operator, change, field):
    answer = operator.post("/scaling-policies", {"model": factories.served_model().name, **change})
    assert answer.status_code == 400, answer.data
    assert field in answer.data["error"]["fields"], answer.data
