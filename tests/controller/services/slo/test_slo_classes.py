"""SLO classes: names that are taken by the code itself, and what a removal does to tenants whose default it was."""

from __future__ import annotations

import pytest
from django.core.exceptions import ValidationError
from django.db import IntegrityError

from controller.models import Decision, SLOClass, Tenant
from controller.selectors.snapshot import config_version
from controller.services.change import VersionConflict
from controller.services.slo.slo_classes import slo_class_create, slo_class_remove, slo_class_update
from tests import factories
from tests.factories import ACTOR

pytestmark = pytest.mark.django_db


@pytest.fixture
def row() -> SLOClass:
    return factories.slo_class(name="chat")


def test_a_removal_changes_each_tenant_whose_default_it_is(row):
    tenants = [factories.tenant(name=name, default_class=row) for name in ("globex", "acme")]
    other = factories.tenant(name="other", default_class=factories.slo_class())
    before = config_version()

    slo_class_remove(actor=ACTOR, slo_class_id=row.pk, version=1)

    for tenant in tenants:
        tenant.refresh_from_db()
        assert (tenant.default_class, tenant.version) == (None, 2)
        decision = Decision.objects.get(kind="tenant_updated", subject=tenant.name)
        assert (decision.actor, decision.reason) == (ACTOR.name, "person_updated")
        assert decision.inputs == {
            "before": {"default_class": row.pk},
            "after": {"default_class": None},
            "names": {"default_class": {str(row.pk): "chat"}},
        }
        assert decision.outcome == {"id": tenant.pk, "version": 2}
    other.refresh_from_db()
    assert other.version == 1
    assert other.default_class is not None
    assert config_version() > before


def test_the_record_of_a_removal_names_those_tenants_and_comes_after_their_own(row):
    for name in ("globex", "acme"):
        factories.tenant(name=name, default_class=row)

    slo_class_remove(actor=ACTOR, slo_class_id=row.pk)

    *changes, removal = Decision.objects.order_by("id")
    assert [each.subject for each in changes] == ["acme", "globex"]
    assert (removal.kind, removal.inputs["default_of"]) == ("slo_class_removed", ["acme", "globex"])
    assert removal.inputs["before"]["name"] == "chat"


def test_the_removal_of_a_class_that_is_no_default_names_no_tenant(row):
    slo_class_remove(actor=ACTOR, slo_class_id=row.pk)
    assert list(Decision.objects.get().inputs) == ["before"]


def test_a_stale_removal_leaves_the_tenants_as_they_are(row):
    tenant = factories.tenant(default_class=row)

    with pytest.raises(VersionConflict):
        slo_class_remove(actor=ACTOR, slo_class_id=row.pk, version=7)

    assert Tenant.objects.get(pk=tenant.pk).default_class == row
    assert not Decision.objects.exists()


@pytest.mark.parametrize("name", ["priority-0", "priority-1", "priority-12"])
def test_the_name_that_requests_of_a_priority_are_counted_under_is_refused(name):
    with pytest.raises(ValidationError) as caught:
        slo_class_create(actor=ACTOR, name=name, ttft_s=0.5, tpot_s=0.1)

    assert list(caught.value.message_dict) == ["name"]
    assert "priority" in caught.value.message_dict["name"][0]
    assert not SLOClass.objects.exists()


@pytest.mark.parametrize("name", ["priority", "priority-", "priority-high", "priority-1a", "my-priority-1"])
def test_a_name_that_only_looks_like_it_is_free(name):
    assert slo_class_create(actor=ACTOR, name=name, ttft_s=0.5, tpot_s=0.1).name == name


def test_a_class_that_has_such_a_name_from_before_may_still_be_changed():
    row = factories.slo_class(name="priority-1", ttft_s=1.0)
    assert slo_class_update(actor=ACTOR, slo_class_id=row.pk, version=1, changes={"ttft_s": 2.0}).ttft_s == 2.0


@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.django_db(transaction=True)
def test_of_two_who_save_a_name_at_once_the_second_is_told_so_at_the_name(monkeypatch, owned):
    tenant = factories.tenant(name="acme") if owned else None

    factories.rival_class(monkeypatch, factories.slo_class_elsewhere, name="chat", tenant=tenant, title="the first")
    with pytest.raises(ValidationError) as caught:
        slo_class_create(actor=ACTOR, name="chat", tenant=tenant, ttft_s=1.0, tpot_s=0.1)
    whose = "acme" if owned else "all tenants"
    assert caught.value.message_dict == {"name": [f"A class with this name already exists for {whose}."]}
    assert SLOClass.objects.get().title == "the first"
    assert not Decision.objects.filter(kind="slo_class_created").exists()


def test_another_broken_rule_is_not_called_a_taken_name(monkeypatch):
    monkeypatch.setattr(SLOClass, "validate_constraints", lambda self: None)
    monkeypatch.setattr(SLOClass, "clean_fields", lambda self: None)
    with pytest.raises(IntegrityError, match="slo_class_ttft_positive"):
        slo_class_create(actor=ACTOR, name="chat", ttft_s=-1.0, tpot_s=0.1)
