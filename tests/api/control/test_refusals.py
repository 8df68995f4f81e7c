"""Calls that would change something, by who may not make them: refused, and in the audit within bounds."""

from __future__ import annotations

import pytest
from django.db import OperationalError

from controller.models import Decision
from controller.services.records import refusals
from tests import factories
from tests.api.control.conftest import Caller

pytestmark = [pytest.mark.db, pytest.mark.usefixtures("db")]

CLASS = {"name": "forged", "ttft_s": 1, "tpot_s": 0.1}


@pytest.fixture(autouse=True)
def _new_log(monkeypatch):
    monkeypatch.setattr(refusals, "LOG", refusals.Bounded())


def recorded():
    return [
        (each.actor, each.subject_type, each.subject, each.reason, each.inputs)
        for each in Decision.objects.filter(kind="access_refused").order_by("id")
    ]


def expected(actor, reason):
    return [(actor, "api", "/api/v1/slo-classes", reason, {"method": "POST", "not_written_before": 0})]


def test_a_viewers_call(viewer):
    assert viewer.post("/slo-classes", CLASS).status_code == 403
    assert recorded() == expected(viewer.user.username, "role_too_low")


def test_a_call_without_a_request(anonymous):
    assert anonymous.post("/slo-classes", CLASS).status_code == 401
    assert recorded() == expected("(nobody signed in)", "not_signed_in")


def test_a_call_with_a_key_that_is_none(db):
    assert Caller(secret="sk-nobody").post("/slo-classes", CLASS).status_code == 401
    assert recorded() == expected("(nobody signed in)", "invalid_api_key")


def test_a_call_with_a_tenants_key():
    key = factories.api_key()
    assert Caller(secret=key.secret).post("/slo-classes", CLASS).status_code == 403
    assert recorded() == expected(f"{key.key.tenant.name}/key-{key.key.pk}", "keys_change_nothing")


def test_a_call_with_a_key_for_inference_alone():
    key = factories.api_key(scopes=["inference"])
    assert Caller(secret=key.secret).post("/slo-classes", CLASS).status_code == 403
    assert recorded() == expected("(nobody signed in)", "scope_missing")


def test_a_forged_call_names_whose_session_it_used(operator):
    operator.client.handler.enforce_csrf_checks = True
    assert operator.post("/slo-classes", CLASS).status_code == 403
    assert recorded() == expected(operator.user.username, "csrf_failed")


def test_a_removal_of_another_tenants_object(viewer):
    assert viewer.delete(f"/tenants/{factories.tenant().pk}").status_code == 403
    assert [each[-1]["method"] for each in recorded()] == ["DELETE"]


def test_reads_and_wrong_values_are_no_refusals(viewer, operator, anonymous):
    assert anonymous.get("/tenants").status_code == 401
    assert viewer.get("/no-such-thing").status_code == 404
    assert operator.post("/slo-classes", {"name": ""}).status_code == 400
    assert recorded() == []


def test_anonymous_requests_cannot_fill_the_audit(anonymous, viewer):
    for _ in range(refusals.BURST + 3):
        anonymous.post("/slo-classes", CLASS)
    assert len(recorded()) == refusals.BURST
    viewer.post("/slo-classes", CLASS)
    assert len(recorded()) == refusals.BURST + 1


def test_one_persons_refusals_keep_nobody_elses_out_of_the_audit(viewer):
    for _ in range(refusals.BURST + 3):
        viewer.post("/slo-classes", CLASS)
    assert len(recorded()) == refusals.BURST
    other = Caller(factories.user("viewer"))
    other.post("/slo-classes", CLASS)
    assert [each[0] for each in recorded()[refusals.BURST :]] == [other.user.username]


def test_without_the_database_it_is_refused_all_the_same(anonymous, monkeypatch):
    def away(**fields):
        raise OperationalError("gone")

    monkeypatch.setattr(refusals, "decision_record", away)
    assert anonymous.post("/slo-classes", CLASS).status_code == 401
