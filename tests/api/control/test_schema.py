"""The OpenAPI document: complete, current, and shown without help from elsewhere."""

import io
import re
from pathlib import Path

import pytest
import yaml
from django.core.management import call_command

from api.control.openapi.data_path import ERROR_CODES, RESPONSE_HEADERS, SLO_FIELDS
from api.control.openapi.document import SchemaView
from api.openai.in_flight import CHAT, COMPLETIONS, RESPONSES
from api.openai.protocol.errors import KINDS
from api.openai.protocol.response_requests import NOT_SERVED
from api.openai.protocol.schemas import OUR_FIELDS
from controller.slo.classes import SloError, parse_slo_fields
from tests.api.control.test_access import ADMINS, NO_SUCH, OPERATORS, RULES

ROOT = Path(__file__).parents[3]
STORED = ROOT / "docs/openapi.yaml"


@pytest.fixture(scope="module")
def document():
    out = io.StringIO()
    call_command("spectacular", validate=True, fail_on_warn=True, stdout=out)
    return out.getvalue()


def test_the_stored_document_is_current(document):
    assert STORED.read_text().strip() == document.strip(), "run `make openapi` and commit docs/openapi.yaml"


def test_every_resource_is_described(document):
    paths = yaml.safe_load(document)["paths"]
    names = {path.split("/")[3] for path in paths if path.startswith("/api/v1/")}
    assert names == {
        "tenants", "api-keys", "slo-classes", "priority-mappings", "models", "hosts", "devices", "links", "instances",
        "scaling-policies", "decisions", "requests", "attainment", "queue", "health", "simulations", "traces",
        "actions", "starts", "transfers", "instance-links", "kv-transfers", "launch-templates", "flow-settings",
        "workflows", "workflow-results", "goodput", "length-versions", "graph-versions",
        "learned-takeovers",
    }  # fmt: skip


def test_every_operation_says_who_may_call_it_and_how_it_fails(document):
    for path, methods in yaml.safe_load(document)["paths"].items():
        for method, operation in methods.items():
            schemes = {name for each in operation["security"] for name in each}
            assert "apiKey" in schemes, (path, method)
            assert "401" in operation["responses"], (path, method)


def test_every_call_names_the_least_role_that_may_make_it(document):
    """By the rules that `test_access.py` holds the views to."""
    least = {frozenset(OPERATORS): "operator", frozenset(ADMINS): "admin"}
    told = {}
    for path, methods in yaml.safe_load(document)["paths"].items():
        for method, operation in methods.items():
            if path.startswith("/api/v1/"):
                address = re.sub(r"/\{\w+\}", NO_SUCH, path.removeprefix("/api/v1"))
                told[method, address] = operation["description"]
    assert RULES.keys() <= told.keys()
    for call, people in RULES.items():
        assert f"Role: {least.get(frozenset(people), 'viewer')};" in told[call], call
        assert ("tenant's API key" in told[call]) == ("tenant_key" in people), call


def test_calls_of_one_resource_are_not_all_described_alike(document):
    resource = yaml.safe_load(document)["paths"]["/api/v1/slo-classes/{id}"]
    assert len({operation["description"] for operation in resource.values()}) == len(resource)
    assert "`If-Match` or `version`" in resource["patch"]["description"]


def test_the_data_path_is_described_as_the_gateway_speaks():
    described = {code: status for status, codes in ERROR_CODES.items() for code in codes}
    assert described == {code: kind.status for code, kind in KINDS.items()}
    assert set(SLO_FIELDS) == set(OUR_FIELDS) - {"request_id"}
    source = "".join(path.read_text() for path in (ROOT / "api/openai").rglob("*.py"))
    for header in RESPONSE_HEADERS:
        assert header in source, header


def test_the_data_paths_limits_are_the_gateways(document):
    paths = yaml.safe_load(document)["paths"]
    bodies = {}
    for path in (CHAT, COMPLETIONS, RESPONSES):
        post = paths[path]["post"]
        bodies[path] = post["requestBody"]["content"]["application/json"]["schema"]["properties"]
        assert set(post["responses"]) == {"200", *(str(kind.status) for kind in KINDS.values())}
    assert "max_completion_tokens" in bodies[CHAT]
    assert "max_tokens" not in bodies[RESPONSES]
    said = paths[RESPONSES]["post"]["requestBody"]["content"]["application/json"]["schema"]["description"]
    others = {"messages", "max_tokens", "max_completion_tokens", "stream_options"}  # of other endpoints, or harmless
    assert [field for field in NOT_SERVED.keys() - others if field not in said] == []
    for field in ("target_ttft", "target_tbt", "deadline", "waiting_time"):
        for value in (0, 1):
            described = bodies[CHAT][field]
            allowed = value > 0 or not described.get("exclusiveMinimum")
            assert _accepts(field, value) == allowed, (field, value)


def _accepts(field, value):
    try:
        parse_slo_fields({field: value})
    except SloError:
        return False
    return True


@pytest.mark.parametrize("accept", ["application/vnd.oai.openapi", "application/vnd.oai.openapi+json"])
def test_the_document_is_public(client, accept):
    answer = client.get("/api/schema", headers={"Accept": accept})
    assert answer.status_code == 200
    assert b"/v1/chat/completions" in answer.content


def test_the_page_keeps_the_security_policy(client):
    page = client.get("/api/docs").content.decode()
    assert not re.search(r"<script(?![^>]*\bsrc=)", page)
    assert "<style" not in page
    assert "style=" not in page
    addresses = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert addresses
    assert all(address.startswith("/") for address in addresses), addresses


def test_the_pages_script_names_the_document(client):
    answer = client.get("/api/docs?script=")
    assert answer["Content-Type"].startswith("application/javascript")
    assert b"schema" in answer.content


def test_it_is_made_once_however_often_and_however_it_is_asked_for(client, monkeypatch):
    """Anybody may ask, and making it takes a good part of a second."""
    first = client.get("/api/schema").content
    monkeypatch.setattr(SchemaView, "generator_class", None)
    for query in ({}, {"lang": "de"}, {"version": "9"}, {"x": "1"}):
        assert client.get("/api/schema", query).content == first
