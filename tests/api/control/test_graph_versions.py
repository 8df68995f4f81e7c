"""`/api/v1/graph-versions`: the versions of each tenant's pattern graphs."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
from django.utils import timezone

from controller.models import GraphVersion
from controller.predict.answer_lengths import MOST_AGE_S
from controller.predict.pattern_graphs import Call, graph_of, kind_of, set_of
from tests import factories

pytestmark = [pytest.mark.db, pytest.mark.usefixtures("db")]


def version(tenant, number, age_s=60.0, **fields):
    at = timezone.now() - timedelta(seconds=age_s)
    given = {
        "tenant": tenant, "version": number, "trained_at": at, "first_at": at - timedelta(hours=2), "last_at": at,
        "workflows": 400, "graphs": 120, "judged": 100, "matched": 0.9, "error": 0.02, "even_error": 0.1, **fields,
    }  # fmt: skip
    return GraphVersion.objects.create(**given)


def test_each_tenant_has_its_versions_and_which_is_in_force(viewer):
    version("acme", 1, digest="0" * 64, content=b"graphs")
    version("acme", 2, refused="wrong by 0.3 of the time left")
    version("old", 1, age_s=MOST_AGE_S + 60)
    answer = viewer.get("/graph-versions")
    assert answer.status_code == 200
    acme, old = answer.data["items"]
    assert (acme["tenant"], acme["in_force"]) == ("acme", 1)
    assert [row["version"] for row in acme["versions"]] == [2, 1]
    assert acme["versions"][0]["refused"] == "wrong by 0.3 of the time left"
    assert (acme["versions"][1]["error"], acme["versions"][1]["matched"]) == (0.02, 0.9)
    assert "content" not in acme["versions"][1]
    assert old["in_force"] is None


def test_a_version_stays_in_force_while_all_that_follow_are_refused(viewer):
    for number in (1, 2):
        version("acme", number, digest=str(number) * 64, content=b"graphs")
    for number in range(3, 9):
        version("acme", number, refused="wrong")
    version("other", 1, refused="wrong")
    acme, other = viewer.get("/graph-versions").data["items"]
    assert acme["in_force"] == 2
    assert [row["version"] for row in acme["versions"]] == [8, 7, 6, 5, 4, 2]
    assert (other["in_force"], len(other["versions"])) == (None, 1)


def content():
    plan, write = kind_of("demo", "plan"), kind_of("demo", "write")
    calls = [Call(plan, 0.0, 2.0, 500, 100), Call(write, 3.0, 6.0, 200, 50), Call(7, 3.1, 6.0, 200, 50)]
    return set_of([graph_of(calls)], [4.0], {}).to_bytes()


def test_a_graph_in_force_is_read_with_its_edges_and_the_names_of_its_calls(viewer):
    version("acme", 1, digest="0" * 64, content=content())
    factories.records_stored(
        factories.record(tenant="acme", workflow="w", model="demo", stage="plan", arrived_at=time.time()),
        factories.record(tenant="globex", workflow="w", model="demo", stage="write", arrived_at=time.time()),
    )
    answer = viewer.get("/graph-versions/graphs", tenant="acme")
    assert answer.status_code == 200, answer.data
    assert (answer.data["version"], answer.data["graphs"]) == (1, 1)
    (graph,) = answer.data["items"]
    assert graph["edges"] == [[1, 2], [1, 3]]
    assert [node["kind"] for node in graph["nodes"]] == ["plan (demo)", f"{kind_of('demo', 'write'):08x}", "00000007"]
    assert [node["level"] for node in graph["nodes"]] == [1, 2, 2]
    assert graph["levels"][1]["gap_s"] == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("fields", [{"content": b"damaged"}, {"content": content(), "age_s": MOST_AGE_S + 60}])
def test_graphs_that_gateways_do_not_use_are_not_found(viewer, fields):
    assert viewer.get("/graph-versions/graphs", tenant="acme").status_code == 404
    version("acme", 1, digest="0" * 64, **fields)
    assert viewer.get("/graph-versions/graphs", tenant="acme").status_code == 404


@pytest.mark.parametrize("query", [{}, {"tenant": "acme", "most": 0}, {"tenant": "acme", "most": 51}])
def test_a_wrong_query_of_graphs_is_refused(viewer, query):
    assert viewer.get("/graph-versions/graphs", **query).status_code == 400
