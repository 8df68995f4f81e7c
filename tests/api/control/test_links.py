"""Links between instances and KV transfers, as the control API lists them."""

import pytest
from django.db import connection
from django.utils import timezone

from controller.core.kv_links import LinkReport, LinkState
from controller.services.fleet.instance_links import instance_links_observe
from controller.services.records.requests import records_write
from tests import factories

pytestmark = [pytest.mark.db, pytest.mark.usefixtures("db")]

FIGURES = {
    "instance": "d", "source": "p", "attempt": 1, "outcome": "done", "state": "released", "after_s": 0.5,
    "seconds": 0.25, "measured_by": "engine", "bytes": 4096, "layers": 2, "tokens": 8, "cached": 0, "overlap_s": 0.1,
}  # fmt: skip


def transfer(reason="kv_landed", **figures):
    return {"kind": "transfer", "reason": reason, "subject": "x", "at": 1.0, "figures": {**FIGURES, **figures}}


@pytest.fixture
def links(db):
    """p to d, up; q to d, down; one that was closed."""
    models = dict.fromkeys("pqd", "demo")
    reports = [LinkReport("p", LinkState.UP, 0.001, 1e9, 500, 2), LinkReport("q", LinkState.DOWN, last_error="refused")]
    instance_links_observe(heard={"q": [LinkReport("d", LinkState.UP)]}, models=models)
    instance_links_observe(heard={"d": reports, "q": []}, models=models)


@pytest.mark.usefixtures("links")
def test_links_with_state_bandwidth_and_error(viewer):
    up, down = viewer.get("/instance-links").data["items"]
    assert (up["source"], up["target"], up["state"], up["bandwidth_bytes_s"]) == ("p", "d", "up", 1e9)
    assert (up["bytes"], up["transfers"], up["latency_s"]) == (500, 2, 0.001)
    assert (down["state"], down["last_error"], down["error_at"] is not None) == ("down", "refused", True)
    assert viewer.get(f"/instance-links/{up['id']}").data["target"] == "d"
    assert [row["source"] for row in viewer.get("/instance-links", state="down").data["items"]] == ["q"]
    assert len(viewer.get("/instance-links", instance="d").data["items"]) == 2
    (closed,) = viewer.get("/instance-links", open="false").data["items"]
    assert (closed["source"], closed["closed_at"] is not None) == ("d", True)


@pytest.mark.usefixtures("links")
def test_links_are_read_only_and_paged(viewer, admin):
    assert admin.post("/instance-links", {"source": "a"}).status_code == 405
    first = viewer.get("/instance-links", limit=1).data
    second = viewer.get("/instance-links", limit=1, cursor=first["next_cursor"]).data
    assert [first["items"][0]["source"], second["items"][0]["source"]] == ["p", "q"]
    assert second["next_cursor"] is None


@pytest.fixture
def moved(db):
    lost = transfer("cut", outcome="failed", state="moving", error="gone")
    records = [
        factories.record(decisions=[lost, transfer(attempt=2)]),
        factories.record(decisions=[transfer(instance="e")]),
    ]
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    records_write(connection=connection.connection, records=records)
    return records


def test_transfers_of_a_request_and_of_an_instance(viewer, moved):
    rows = viewer.get("/kv-transfers", request=moved[0].id).data["items"]
    assert {(row["attempt"], row["outcome"], row["state"]) for row in rows} == {
        (1, "failed", "moving"),
        (2, "done", "released"),
    }
    (row,) = viewer.get("/kv-transfers", target="e").data["items"]
    assert (row["bytes"], row["bytes_s"], row["overlap_s"]) == (4096, 16384.0, 0.1)
    assert (row["held_s"], row["flow"]) == (0.0, "")
    assert viewer.get(f"/kv-transfers/{row['id']}").data["request"] == moved[1].id
    assert len(viewer.get("/kv-transfers", instance="p").data["items"]) == 3
    (failed,) = viewer.get("/kv-transfers", outcome="failed", reason="cut").data["items"]
    assert failed["error"] == "gone"
    assert viewer.get("/kv-transfers", since=timezone.now().isoformat()).data["items"] == []


def test_transfers_are_paged_newest_first(viewer, moved):
    seen, cursor = [], None
    while True:
        page = viewer.get("/kv-transfers", limit=2, **({"cursor": cursor} if cursor else {})).data
        seen += [row["id"] for row in page["items"]]
        if (cursor := page["next_cursor"]) is None:
            break
    assert len(seen) == len(set(seen)) == 3


@pytest.mark.parametrize(("field", "value"), [("outcome", "odd"), ("state", "lost"), ("since", "then"), ("x", "1")])
def test_a_wrong_filter_is_named(viewer, field, value):
    answer = viewer.get("/kv-transfers", **{field: value})
    assert answer.status_code == 400
    assert field in answer.data["error"]["fields"]
