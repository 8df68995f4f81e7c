"""PUT by name creates or replaces. The same call twice changes nothing and records nothing."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from urllib.parse import quote

import pytest
from django.db import connections

from controller.models import ConfigVersion, Decision, Instance, ScalingPolicy, SLOClass, Tenant
from tests import factories
from tests.api.control.test_service_accounts import caller as service

pytestmark = [pytest.mark.db, pytest.mark.usefixtures("db")]

LEVEL = {"ttft_s": 1.0, "tpot_s": 0.1, "ttft_min_s": 0.5, "ttft_max_s": 2, "tpot_min_s": 0.05, "tpot_max_s": 0.2}
STATIC = {"model": "llama", "backend": "vllm", "provisioner": "static", "url": "http://127.0.0.1:9000"}
PROCESS = {"model": "llama", "backend": "reference", "provisioner": "process"}
TEMPLATE = {"backend": "vllm", "command": ["vllm", "serve", "${model}", "--port", "${port}"]}
CASES = {
    "slo class": ("/slo-classes/by-name/chat", {"ttft_s": 1, "tpot_s": 0.1}, {"ttft_s": 1, "tpot_s": 0.2}),
    "a tenant's class": (
        "/slo-classes/by-name/chat?tenant=acme", {"ttft_s": 1, "tpot_s": 0.1}, {"ttft_s": 1, "tpot_s": 0.2},
    ),
    "shared mapping": ("/priority-mappings/shared", {"levels": [LEVEL]}, {"levels": [LEVEL], "window": 9}),
    "a tenant's mapping": ("/priority-mappings/by-tenant/acme", {"levels": [LEVEL]}, {"levels": [LEVEL] * 2}),
    "tenant": ("/tenants/by-name/new", {"rpm": 5, "default_class": "standard"}, {"rpm": 6}),
    "policy": ("/scaling-policies/by-model/llama?role=prefill", {"max_instances": 3}, {"max_instances": 5}),
    "flow settings": ("/flow-settings", {"flow_policy": "mfs"}, {"flow_policy": "earliest_deadline"}),
    "static instance": ("/instances/one", STATIC, {**STATIC, "unit_cost": 2}),
    "instance with a key": ("/instances/gpu", STATIC, {**STATIC, "key_name": "gpu-1"}),
    "launch template": ("/launch-templates/by-name/mine", TEMPLATE, {**TEMPLATE, "start_limit_s": 5}),
    "process instance": ("/instances/two", PROCESS, {**PROCESS, "max_num_seqs": 9}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _named(db):
    factories.tenant(name="acme")
    factories.slo_class(name="standard")
    factories.served_model(name="llama")


def stored():
    return Decision.objects.count(), getattr(ConfigVersion.objects.first(), "version", 0)


@pytest.mark.parametrize(("path", "body", "other"), CASES.values(), ids=CASES)
def test_the_first_call_creates_the_second_changes_nothing_and_another_body_replaces(admin, path, body, other):
    made = admin.put(path, body)
    assert (made.status_code, made["ETag"]) == (201, '"1"'), made.data
    before = stored()
    again = admin.put(path, body)
    assert (again.status_code, again.data) == (200, made.data), again.data
    assert stored() == before
    changed = admin.put(path, other)
    assert (changed.status_code, changed["ETag"]) == (200, '"2"'), changed.data
    assert Decision.objects.count() == before[0] + 1
    back = admin.put(path, body)  # absent fields get their default again
    timely = {"version", "etag", "updated_at"}
    assert {k: v for k, v in back.data.items() if k not in timely} == {
        k: v for k, v in made.data.items() if k not in timely
    }


@pytest.mark.parametrize(("path", "body", "other"), CASES.values(), ids=CASES)
def test_conditions_of_a_put(admin, path, body, other):
    missing = admin.put(path, body, If_Match='"1"')
    assert (missing.status_code, missing.data["error"]["code"]) == (412, "precondition_failed")
    assert admin.put(path, body, If_Match="*").status_code == 412
    assert admin.put(path, body, If_None_Match="*").status_code == 201
    exists = admin.put(path, other, If_None_Match="*")
    assert (exists.status_code, exists.data["error"]["code"]) == (412, "precondition_failed")
    assert exists.data["error"]["current"]["etag"] == '"1"'
    stale = admin.put(path, other, If_Match='"9"')
    assert (stale.status_code, stale.data["error"]["code"]) == (412, "version_conflict")
    assert stale.data["error"]["differences"]
    assert admin.put(path, other, If_Match='"1"')["ETag"] == '"2"'
    assert admin.put(path, other, If_Match='"2"', If_None_Match="*").status_code == 400
    assert admin.put(path, other, If_None_Match='"2"').status_code == 400


ABSENT = {
    "slo class": ("/slo-classes/by-name/chat", {"ttft_s": 1, "tpot_s": 0.1}, {"title": "Chat", "deadline_s": 9.0}),
    "shared mapping": ("/priority-mappings/shared", {"levels": [LEVEL]}, {"window": 77, "window_age_s": 9.0}),
    "tenant": ("/tenants/by-name/new", {"tpm": 5}, {"rpm": 7, "allowed_models": ["llama"], "queue_share": 0.3}),
    "policy": ("/scaling-policies/by-model/llama", {"max_instances": 3}, {"upper": 0.95, "cooldown_s": 5.0}),
    "static instance": ("/instances/one", STATIC, {"unit_cost": 2.0, "key_name": "gpu-1", "max_num_seqs": 9}),
    "process instance": ("/instances/two", PROCESS, {"device_kind": "h100", "max_num_seqs": 9}),
}


@pytest.mark.parametrize(("path", "body", "more"), ABSENT.values(), ids=ABSENT)
@pytest.mark.parametrize("header", [{"If_Match": '"1"'}, {"If_None_Match": "*"}], ids=["stale", "exists"])
def test_a_412_shows_what_the_body_would_have_reset_by_saying_nothing(admin, path, body, more, header):
    """A PUT states all values: what another operator set and the body does not name would be back at its default."""
    made = admin.put(path, body)
    theirs = admin.put(path, {**body, **more}, If_Match='"1"')
    before = stored()
    mine = admin.put(path, body, **header)
    assert mine.status_code == 412, mine.data
    wanted = [{"field": name, "stored": theirs.data[name], "sent": made.data[name]} for name in more]
    assert sorted(mine.data["error"]["differences"], key=str) == sorted(wanted, key=str)
    assert stored() == before
    assert admin.put(path, body, If_Match=mine["ETag"]).data["etag"] == '"3"'


@pytest.mark.parametrize(("path", "body", "other"), CASES.values(), ids=CASES)
def test_the_etag_decides_and_not_the_values(admin, path, body, other):
    """Who has not seen the stored version gets 412, even if both happen to want the same."""
    admin.put(path, body)
    admin.put(path, other)
    assert admin.put(path, other, If_Match='"1"').status_code == 412
    again = admin.put(path, other, If_Match='"2"')
    assert (again.status_code, again["ETag"]) == (200, '"2"')


def test_what_stays_where_it_is_is_no_difference(admin):
    admin.put("/tenants/by-name/new", {"rpm": 5})
    Tenant.objects.filter(name="new").update(state="suspended")
    assert admin.put("/tenants/by-name/new", {"rpm": 5}, If_Match='"9"').data["error"]["differences"] == []


@pytest.mark.parametrize(("path", "body", "other"), [case for case in CASES.values() if "by-" in case[0]])
def test_it_is_read_and_removed_by_name_too(admin, path, body, other):
    assert admin.client.get("/api/v1" + path).status_code == 404
    admin.put(path, body)
    assert admin.client.get("/api/v1" + path)["ETag"] == '"1"'
    assert admin.delete(path, If_Match='"9"').status_code == 412
    assert admin.delete(path, If_Match='"1"').status_code == 204
    assert admin.delete(path).status_code == 404


@pytest.mark.parametrize("name", ["two words", "-a", "é", "x" * 65, "a\x00"])
def test_names_are_checked(admin, name):
    for path in ("/slo-classes/by-name/", "/tenants/by-name/"):
        answer = admin.put(path + quote(name), {"ttft_s": 1, "tpot_s": 0.1})
        assert (answer.status_code, set(answer.data["error"]["fields"])) == (400, {"name"}), answer.data
    assert admin.put("/priority-mappings/by-tenant/" + quote(name), {"levels": [LEVEL]}).status_code == 400
    answer = admin.put("/instances/" + quote(name), STATIC)
    assert (answer.status_code, set(answer.data["error"]["fields"])) == (400, {"id"}), answer.data
    assert SLOClass.objects.count() == Tenant.objects.count() == 1
    assert not Instance.objects.exists()


def test_a_name_with_a_slash_and_one_of_digits_alone_are_names(admin):
    for name in ("team/chat", "17"):
        assert admin.put(f"/slo-classes/by-name/{name}", {"ttft_s": 1, "tpot_s": 0.1}).data["name"] == name


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/slo-classes/by-name/chat?tenant=nobody", {"ttft_s": 1, "tpot_s": 0.1}, "tenant"),
        ("/slo-classes/by-name/chat?owner=acme", {"ttft_s": 1, "tpot_s": 0.1}, "owner"),
        ("/slo-classes/by-name/chat", {"ttft_s": 1}, "tpot_s"),
        ("/slo-classes/by-name/chat", {"ttft_s": 1, "tpot_s": 0.1, "name": "chat"}, "name"),
        ("/slo-classes/by-name/chat", {"ttft_s": 1, "tpot_s": 0.1, "version": 1}, "version"),
        ("/slo-classes/by-name/chat", {"ttft_s": 1, "tpot_s": 0.1, "deadline_s": 0.5}, "deadline_s"),
        ("/slo-classes/by-name/priority-1", {"ttft_s": 1, "tpot_s": 0.1}, "name"),
        ("/priority-mappings/by-tenant/nobody", {"levels": [LEVEL]}, "tenant"),
        ("/scaling-policies/by-model/nothing", {}, "model"),
        ("/scaling-policies/by-model/llama?role=both", {}, "role"),
        ("/tenants/by-name/new", {"default_class": "nothing"}, "default_class"),
        ("/instances/one", {**STATIC, "provisioner": "process", "backend": "reference"}, "url"),
        ("/instances/one", {"model": "llama", "backend": "vllm", "provisioner": "static"}, "url"),
        ("/instances/one", {**STATIC, "id": "two"}, "id"),
    ],
)
def test_what_is_wrong_is_named(admin, path, body, field):
    answer = admin.put(path, body)
    assert (answer.status_code, set(answer.data["error"]["fields"])) == (400, {field}), answer.data


def test_what_an_operator_has_stopped_by_hand_stays_stopped(admin):
    admin.put("/tenants/by-name/new", {"rpm": 5})
    Tenant.objects.filter(name="new").update(state="suspended")
    assert admin.put("/tenants/by-name/new", {"rpm": 6}).data["state"] == "suspended"
    assert admin.put("/tenants/by-name/new", {"rpm": 6, "state": "active"}).data["state"] == "active"
    admin.put("/scaling-policies/by-model/llama", {})
    ScalingPolicy.objects.update(enabled=False)
    assert admin.put("/scaling-policies/by-model/llama", {"max_instances": 9}).data["enabled"] is False


def test_a_tenant_may_be_created_suspended(admin):
    made = admin.put("/tenants/by-name/new", {"state": "suspended"})
    assert (made.data["state"], made.data["version"]) == ("suspended", 1)


def test_what_never_changes_in_an_instance_is_a_conflict_that_names_the_field(admin):
    factories.served_model(name="other")
    admin.put("/instances/one", {**STATIC, "role": "prefill"})
    assert admin.put("/instances/one", {**STATIC, "url": STATIC["url"] + "/"}).status_code == 200
    for field, value in (
        ("model", "other"),
        ("backend", "sglang"),
        ("url", "http://127.0.0.1:9001"),
        ("role", "decode"),
    ):
        answer = admin.put("/instances/one", {**STATIC, field: value})
        assert (answer.status_code, set(answer.data["error"]["fields"])) == (409, {field}), answer.data
    admin.post("/instances/one/stop")
    answer = admin.put("/instances/one", STATIC)
    assert (answer.status_code, set(answer.data["error"]["fields"])) == (409, {"desired_state"})


def test_it_leaves_alone_what_others_set_in_an_instance(admin):
    admin.put("/instances/one", STATIC)
    admin.post("/instances/one/drain")
    answer = admin.put("/instances/one", {**STATIC, "unit_cost": 4})
    assert (answer.data["desired_state"], answer.data["unit_cost"]) == ("draining", 4.0)


def test_a_service_account_needs_the_scope():
    for scopes, status in ((["configuration"], 201), (["read"], 403), (["tenants"], 403)):
        answer = service(role="operator", scopes=scopes, name=scopes[0]).put(
            f"/slo-classes/by-name/{scopes[0]}", {"ttft_s": 1, "tpot_s": 0.1}
        )
        assert answer.status_code == status, answer.data
    assert Decision.objects.get(kind="slo_class_created").actor_type == "service"


def test_a_tenants_key_reads_its_own_by_name_and_changes_nothing(tenant_key, tenant, admin):
    admin.put(f"/slo-classes/by-name/chat?tenant={tenant.name}", {"ttft_s": 1, "tpot_s": 0.1})
    admin.put("/slo-classes/by-name/chat?tenant=acme", {"ttft_s": 1, "tpot_s": 0.1})
    own, others = (tenant_key.get("/slo-classes/by-name/chat", tenant=name) for name in (tenant.name, "acme"))
    assert (own.status_code, others.status_code) == (200, 404)
    assert tenant_key.get("/tenants/by-name/acme").status_code == 404
    assert tenant_key.put("/slo-classes/by-name/chat", {"ttft_s": 1, "tpot_s": 0.1}).status_code == 403


@pytest.mark.django_db(transaction=True)
def test_of_two_that_create_at_the_same_moment_the_second_replaces(admin, monkeypatch):
    factories.rival_class(monkeypatch, factories.slo_class_elsewhere, name="chat", ttft_s=5.0, title="theirs")
    answer = admin.put("/slo-classes/by-name/chat", {"ttft_s": 1, "tpot_s": 0.1})
    assert (answer.status_code, answer["ETag"]) == (200, '"2"'), answer.data
    row = SLOClass.objects.get(name="chat")
    assert (row.ttft_s, row.title) == (1.0, "")


@pytest.mark.django_db(transaction=True)
def test_of_two_that_replace_the_same_version_at_once_one_sees_what_the_other_stored(admin):
    body = {"ttft_s": 1, "tpot_s": 0.1}
    admin.put("/slo-classes/by-name/chat", body)
    both = Barrier(2)

    def replace(title):
        try:
            both.wait(10)
            return admin.put("/slo-classes/by-name/chat", {**body, "title": title}, If_Match='"1"')
        finally:
            connections.close_all()

    with ThreadPoolExecutor(2) as pool:
        won, lost = sorted(pool.map(replace, ("one", "other")), key=lambda answer: answer.status_code)
    assert (won.status_code, won["ETag"], lost.status_code) == (200, '"2"', 412)
    stored = won.data["title"]
    sent = {"one": "other", "other": "one"}[stored]
    assert lost.data["error"]["differences"] == [{"field": "title", "stored": stored, "sent": sent}]
    assert SLOClass.objects.get(name="chat").title == stored


@pytest.mark.parametrize("name", ["a%0Ab", "%0A", "a%0D%0Ab", "%C2%85", "a%0A"])
@pytest.mark.parametrize("path", ["tenants/by-name", "slo-classes/by-name", "launch-templates/by-name"])
def test_a_name_with_a_line_break_is_an_invalid_name(admin, path, name):
    answer = admin.put(f"/{path}/{name}", {})
    assert answer.status_code == 400
    assert answer.data["error"]["code"] == "validation_failed"
