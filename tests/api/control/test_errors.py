"""One error shape, whatever goes wrong, and never a traceback."""

import pytest
from django.db import DataError, IntegrityError, InterfaceError, OperationalError, connection
from rest_framework import exceptions, serializers

from api.control.framework.errors import exception_handler
from controller.core.errors import UnknownName
from controller.selectors import catalogue
from tests import factories
from tests.api.control.conftest import ROOT
from workers.live import LiveUnavailable


def shape(answer):
    error = answer.data["error"]
    assert set(error) == {"code", "message", "fields"}
    assert error["message"]
    return answer.status_code, error["code"]


@pytest.mark.parametrize(
    ("raised", "status", "code"),
    [
        (OperationalError("connection refused"), 503, "database_unavailable"),
        (InterfaceError("the connection is closed"), 503, "database_unavailable"),
        (LiveUnavailable("Redis is unavailable"), 503, "live_data_unavailable"),
        (DataError("out of range"), 400, "validation_failed"),
        (IntegrityError("duplicate"), 409, "conflict"),
        (UnknownName("unknown ordering", field="ordering"), 400, "validation_failed"),
        (exceptions.Throttled(wait=3), 429, "rate_limit_exceeded"),
        (exceptions.ParseError(), 400, "malformed_body"),
        (exceptions.NotAcceptable(), 406, "not_acceptable"),
        (RuntimeError("a bug"), 500, "internal_error"),
    ],
)
def test_each_exception_has_its_status_and_code(raised, status, code):
    answer = exception_handler(raised, {})
    assert shape(answer) == (status, code)
    assert "bug" not in str(answer.data)


def test_what_may_come_back_says_when():
    assert exception_handler(OperationalError(), {})["Retry-After"] == "2"
    assert exception_handler(exceptions.Throttled(wait=3), {})["Retry-After"] == "4"


@pytest.mark.db
@pytest.mark.parametrize(
    ("path", "body", "field", "valid"),
    [
        ("set-role", {"role": "both"}, "role", "collocated, prefill, decode"),
        ("sleep", {"level": 3}, "level", "1, 2"),
        ("load", {"sources": [{"kind": "tape"}]}, "sources.0.kind", "engine, host, disk"),
        ("desired-state", {"desired_state": "{gone}"}, "desired_state", "running, draining, stopped"),
    ],
)
def test_a_choice_that_is_none_is_told_what_would_have_been_one(operator, path, body, field, valid):
    row = factories.instance(weights="absent")
    answer = operator.post(f"/instances/{row.pk}/{path}", body)
    assert shape(answer) == (400, "validation_failed")
    [said] = answer.data["error"]["fields"][field]
    assert said.endswith(f"is not a valid choice. Must be one of: {valid}.")
    assert answer.data["error"]["message"].endswith(said)


@pytest.mark.db
def test_so_is_a_filter(viewer):
    fields = viewer.get("/instances", role="both").data["error"]["fields"]
    assert fields == {"role": ['"both" is not a valid choice. Must be one of: collocated, prefill, decode.']}


def test_nested_details_become_dotted_names():
    detail = {"levels": [{}, {"ttft_s": ["Too small."]}], "non_field_errors": ["Odd."]}
    fields = exception_handler(serializers.ValidationError(detail), {}).data["error"]["fields"]
    assert fields == {"levels.1.ttft_s": ["Too small."]}


@pytest.mark.db
def test_an_unknown_address_answers_in_shape(viewer, anonymous):
    assert shape(viewer.get("/nothing/here")) == (404, "not_found")
    assert shape(anonymous.post("/slo-classes/")) == (404, "not_found")


@pytest.mark.db
@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("{", "malformed_body"),
        ('{"name": NaN}', "malformed_body"),
        ("[1]", "validation_failed"),
        ("7", "validation_failed"),
    ],
)
def test_a_body_that_is_no_object_is_refused(operator, body, code):
    answer = operator.client.post(f"{ROOT}/slo-classes", body, content_type="application/json")
    assert shape(answer) == (400, code)


@pytest.mark.db
def test_another_content_type_is_refused(operator):
    answer = operator.client.post(f"{ROOT}/slo-classes", "a=1", content_type="application/x-www-form-urlencoded")
    assert shape(answer) == (415, "unsupported_media_type")


@pytest.mark.db
def test_html_is_not_on_offer(viewer):
    answer = viewer.client.get(f"{ROOT}/tenants", headers={"Accept": "text/html"})
    assert shape(answer) == (406, "not_acceptable")


@pytest.mark.db
def test_postgresql_away_is_503_for_keys_and_people(viewer, tenant_key):
    """The statement fails as it does when the server is gone, from the first query on: the one for the caller."""

    def gone(execute, sql, params, many, context):
        raise OperationalError("server closed the connection unexpectedly")

    with connection.execute_wrapper(gone):
        answers = [viewer.get("/tenants"), tenant_key.get("/tenants"), tenant_key.get("/health")]
    for answer in answers:
        assert shape(answer) == (503, "database_unavailable")
        assert answer["Retry-After"] == "2"


@pytest.mark.db
def test_postgresql_lost_in_a_write_leaves_nothing_behind(operator):
    def gone(execute, sql, params, many, context):
        if "decision" in sql:
            raise OperationalError("server closed the connection unexpectedly")
        return execute(sql, params, many, context)

    with connection.execute_wrapper(gone):
        answer = operator.post("/slo-classes", {"name": "a", "ttft_s": 1, "tpot_s": 0.1})
    assert shape(answer) == (503, "database_unavailable")
    assert not catalogue.slo_classes().exists()


@pytest.mark.db
def test_two_writers_of_one_name_are_a_conflict_not_a_defect(admin, monkeypatch):
    """Both checks pass before either row is there: the database decides."""
    factories.tenant(name="taken")
    from controller.models import Tenant

    for check in ("validate_unique", "validate_constraints"):
        monkeypatch.setattr(Tenant, check, lambda self, exclude=None: None)
    answer = admin.post("/tenants", {"name": "taken"})
    assert shape(answer) == (409, "conflict")
    assert "tenant_name" in answer.data["error"]["message"]
