"""Whatever is sent, the answer is ours: the shape of an error, never a 500, never a traceback."""

import json

import pytest
from django.db import transaction
from django.test import Client
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from api.control.access.throttle import _LocalThrottle
from tests import factories
from tests.api.control.conftest import ROOT

pytestmark = [pytest.mark.db, pytest.mark.usefixtures("db")]

# One database transaction for all examples of a test: nothing here depends on a clean one.
FUZZ = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
LISTS = ("tenants", "api-keys", "slo-classes", "priority-mappings", "models", "hosts", "devices", "links", "instances",
         "scaling-policies", "decisions", "requests", "attainment", "instance-links", "kv-transfers")  # fmt: skip
PARAMETERS = ("limit", "cursor", "tenant", "name", "q", "kind", "actor", "since", "until", "outcome", "attained",
              "slo_class", "model", "host", "id", "window", "active", "live", "role", "state", "subject", "open",
              "instance", "link", "reason")  # fmt: skip
ODD = st.one_of(
    st.text(max_size=40),
    st.sampled_from([
        "", "0", "-1", "1e9", "NaN", "inf", "9" * 40, "null", "true", "%00", "\x00", "'; --", "é", "😀", "../..",
        "0001-01-01T00:00:00Z", "9999-12-31T23:59:59.999999-23:59", "0001-01-01T00:00:00+23:59", "2026-11-20",
    ]),
    st.integers().map(str),
    st.datetimes().map(lambda at: at.isoformat()),
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELDS = {
    "tenants": ("name", "title", "default_class", "rpm", "tpm", "max_concurrency"),
    "api-keys": ("tenant", "name", "scopes", "expires_at"),
    "slo-classes": (
        "name",
        "tenant",
        "ttft_s",
        "tpot_s",
        "deadline_s",
        "waiting_time_s",
        "target",
        "value",
        "may_defer",
    ),
    "priority-mappings": ("tenant", "levels", "window", "window_age_s", "contention"),
    "models": ("name", "aliases", "context_tokens", "chars_per_token", "tokenizer"),
    "hosts": ("name", "zone", "labels"),
    "devices": ("host", "index", "kind", "memory_bytes"),
    "links": ("source", "target", "medium", "bandwidth_bytes_s", "latency_s", "state"),
    "instances": ("id", "model", "backend", "provisioner", "url", "role", "tp", "max_num_seqs", "unit_cost", "spec"),
    "scaling-policies": ("model", "role", "min_instances", "max_instances", "upper", "lower", "sustain_s", "enabled"),
    "queue/cancel": ("request_ids",),
}


@pytest.fixture
def browser():
    """As an admin, who gets furthest."""
    client = Client()
    client.force_login(factories.user("admin"))
    return client


def send(call, *args, **kwargs):
    """The answer, whose shape is right. Each request in a savepoint, as it has its own transaction in service."""
    _LocalThrottle.cache.clear()
    point = transaction.savepoint()
    answer = call(*args, **kwargs)
    (transaction.savepoint_rollback if answer.status_code >= 400 else transaction.savepoint_commit)(point)
    assert answer.status_code in (200, 201, 204, 400, 404, 405, 409, 412, 415, 428, 503), answer.content
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert error["code"] not in ("internal_error", "database_unavailable"), error
        assert set(error) - {"current", "differences"} == {"code", "message", "fields"}
    return answer


@FUZZ
@given(path=st.sampled_from(LISTS), query=st.dictionaries(st.sampled_from(PARAMETERS), ODD, max_size=3))
def test_queries(browser, path, query):
    assert send(browser.get, f"{ROOT}/{path}", query).status_code in (200, 400, 404, 503)


@FUZZ
@given(cursor=st.lists(ODD, min_size=1, max_size=2), path=st.sampled_from(["decisions", "requests", "slo-classes"]))
def test_cursors_with_odd_values_inside(browser, cursor, path):
    import base64

    text = base64.urlsafe_b64encode(json.dumps(cursor).encode()).decode().rstrip("=")
    assert send(browser.get, f"{ROOT}/{path}", {"cursor": text}).status_code in (200, 400)


@FUZZ
@given(path=st.sampled_from(sorted(FIELDS)), data=st.data())
def test_bodies(browser, path, data):
    body = data.draw(st.dictionaries(st.sampled_from([*FIELDS[path], "version", "other"]), JSON, max_size=6))
    made = send(browser.post, f"{ROOT}/{path}", json.dumps(body), content_type="application/json")
    assert made.status_code in (201, 400, 409, 503)
    changed = send(browser.patch, f"{ROOT}/{path}/1", json.dumps(body), content_type="application/json")
    assert changed.status_code in (200, 400, 404, 405, 409, 412, 428)


@FUZZ
@given(raw=st.binary(max_size=60))
def test_raw_bodies(browser, raw):
    assert send(browser.post, f"{ROOT}/slo-classes", raw, content_type="application/json").status_code == 400


@FUZZ
@given(pk=ODD.filter(lambda text: text not in ("", ".", "..") and "/" not in text), where=st.sampled_from(LISTS[:-1]))
def test_addresses(browser, pk, where):
    from urllib.parse import quote

    assert send(browser.get, f"{ROOT}/{where}/{quote(pk)}").status_code in (200, 400, 404)
    assert send(browser.post, f"{ROOT}/{where}/{quote(pk)}/drain").status_code in (400, 404, 415)
