"""Somebody else removed it meanwhile: a page that says who and when, keeps what was typed, and leads to its history."""

from __future__ import annotations

import pytest
from django.urls import reverse

from controller.models import PriorityMapping, ScalingPolicy, SLOClass, Tenant
from controller.services.actors import Actor
from controller.services.fleet.scaling_policies import scaling_policy_remove
from controller.services.slo.priority_mappings import priority_mapping_remove
from controller.services.slo.slo_classes import slo_class_remove, slo_class_update
from controller.services.slo.tenants import tenant_remove
from tests import factories

OLGA = Actor.person("olga")
CLASS = {
    "title": "Typed <b>by</b> hand", "ttft_s": "0.91", "tpot_s": "0.2", "waiting_time_s": "5", "target": "95",
    "value": "1", "version": "1",
}  # fmt: skip
POLICY = {
    "enabled": "on", "min_instances": "1", "max_instances": "7", "upper": "77", "lower": "30", "sustain_s": "15",
    "cooldown_s": "10", "interval_s": "1", "sleep_level": "0", "version": "1",
}  # fmt: skip


@pytest.fixture
def gone_class(db):
    row = factories.slo_class(name="night", title="at night")
    slo_class_update(actor=factories.ACTOR, slo_class_id=row.pk, version=1, changes={"ttft_s": 3.0})
    slo_class_remove(actor=OLGA, slo_class_id=row.pk)
    return row


def test_a_class_that_was_removed_while_it_was_edited(operator, gone_class):
    answer = operator.post(reverse("class-edit", args=[gone_class.pk]), CLASS)
    html = answer.content.decode()
    assert answer.status_code == 410
    assert "night was removed" in html
    assert "olga" in html
    for typed in ("TTFT", "0.91 s", "Typed &lt;b&gt;by&lt;/b&gt; hand", "95 %"):
        assert typed in html
    assert reverse("class-history", args=[gone_class.pk]) in html
    assert not SLOClass.objects.exists()


def test_it_is_made_again_with_what_was_typed(operator, gone_class):
    html = operator.post(reverse("class-edit", args=[gone_class.pk]), CLASS).content.decode()
    fields = dict(part.split('"')[:3:2] for part in html.split('<input type="hidden" data-again name="')[1:])
    assert fields["name"] == "night"
    assert operator.post(reverse("class-new"), fields).status_code == 302
    row = SLOClass.objects.get()
    assert (row.name, row.ttft_s, row.title) == ("night", 0.91, "Typed &lt;b&gt;by&lt;/b&gt; hand")


def test_its_history_is_still_there(viewer, operator, gone_class):
    url = reverse("class-history", args=[gone_class.pk])
    html = viewer.get(url).content.decode()
    assert "night" in html
    assert "Updated</a> by" in html
    assert "Removed</a> by olga" in html
    assert "restore=" not in html
    html = operator.get(url).content.decode()
    assert f"{reverse('class-new')}?restore=" in html
    assert reverse("class-edit", args=[gone_class.pk]) not in html


def test_its_preview_says_so(operator, gone_class):
    url = reverse("class-preview", args=[gone_class.pk])
    answer = operator.post(url, CLASS, headers={"accept": "application/json"})
    assert answer.status_code == 410
    assert "night was removed by olga" in answer.json()["message"]


@pytest.mark.parametrize("name", ["class-edit", "class-remove"])
def test_to_open_it_says_so_too(operator, gone_class, name):
    answer = operator.get(reverse(name, args=[gone_class.pk]))
    assert answer.status_code == 410
    assert b"Your unsaved values" not in answer.content


def test_one_that_goes_while_it_is_saved(operator, monkeypatch):
    """Between being looked up and being locked."""
    row = factories.slo_class()
    real = slo_class_update

    def late(**asked):
        slo_class_remove(actor=OLGA, slo_class_id=row.pk)
        return real(**asked)

    monkeypatch.setattr("console.views.configuration.classes.slo_class_update", late)
    answer = operator.post(reverse("class-edit", args=[row.pk]), CLASS)
    assert answer.status_code == 410
    assert b"0.91 s" in answer.content


def test_a_mapping(operator, live_store):
    row = factories.priority_mapping()
    url, history = reverse("mapping-edit", args=[row.pk]), reverse("mapping-history", args=[row.pk])
    priority_mapping_remove(actor=OLGA, mapping_id=row.pk)
    data = {"window": "77", "levels-TOTAL_FORMS": "1", "levels-INITIAL_FORMS": "1", "levels-0-ttft_s": "1.25"}
    html = operator.post(url, data).content.decode()
    for said in ("was removed", "olga", "Requests in the window", "77", "Priority 0: Initial TTFT", "1.25 s", history):
        assert said in html
    assert "Removed</a> by olga" in operator.get(history).content.decode()
    assert not PriorityMapping.objects.exists()


def test_a_tenant_and_with_it_its_key_and_its_class(admin, live_store):
    tenant = factories.tenant(name="acme")
    key = factories.api_key(tenant).key
    tenant_remove(actor=OLGA, tenant_id=tenant.pk)
    html = admin.post(reverse("tenant-edit", args=[tenant.pk]), {"title": "ACME", "rpm": "5"}).content.decode()
    for said in ("acme was removed", "olga", "ACME", "5 requests/min", "subject_type=tenant&amp;subject=acme"):
        assert said in html
    for url in (reverse("tenant", args=[tenant.pk]), reverse("key-new", args=[tenant.pk])):
        answer = admin.get(url) if url.endswith(f"/{tenant.pk}/") else admin.post(url, {"name": "k"})
        assert answer.status_code == 410
        assert b"acme was removed" in answer.content
    for name in ("key-revoke", "key-rotate"):
        answer = admin.post(reverse(name, args=[key.pk]), {"grace": "0"})
        assert answer.status_code == 410
        assert b"together with the tenant acme" in answer.content
    assert not Tenant.objects.exists()


def test_a_class_that_went_with_its_tenant(operator, signed_in):
    tenant = factories.tenant(name="acme")
    made = signed_in("operator").post(reverse("class-new"), {**CLASS, "name": "own", "tenant": tenant.pk})
    assert made.status_code == 302
    row = SLOClass.objects.get()
    tenant_remove(actor=OLGA, tenant_id=tenant.pk)
    answer = operator.post(reverse("class-edit", args=[row.pk]), CLASS)
    assert answer.status_code == 410
    assert b"together with the tenant acme" in answer.content
    assert operator.get(reverse("class-history", args=[row.pk])).status_code == 200


def test_a_scaling_policy(operator, live_store):
    row = factories.scaling_policy()
    url, history = reverse("scaling-edit", args=[row.pk]), reverse("scaling-history", args=[row.pk])
    scaling_policy_remove(actor=OLGA, policy_id=row.pk)
    answer = operator.post(url, POLICY)
    html = answer.content.decode()
    assert answer.status_code == 410
    for said in ("was removed", "olga", "Scale out above", "77 %", history):
        assert said in html
    fields = dict(part.split('"')[:3:2] for part in html.split('<input type="hidden" data-again name="')[1:])
    assert operator.post(reverse("scaling-new"), fields).status_code == 302
    made = ScalingPolicy.objects.get()
    assert (made.model_id, made.role, made.upper, made.max_instances) == (row.model_id, row.role, 0.77, 7)
    assert operator.get(history).status_code == 200


@pytest.mark.parametrize("name", ["class-edit", "class-history", "mapping-edit", "tenant", "scaling-edit"])
def test_what_never_was_is_not_found(admin, live_store, name):
    assert admin.get(reverse(name, args=[99_999])).status_code == 404


def test_who_may_not_change_it_is_told_that_first(viewer, gone_class):
    assert viewer.post(reverse("class-edit", args=[gone_class.pk]), CLASS).status_code == 403
